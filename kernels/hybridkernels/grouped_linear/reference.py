"""One linear layer an expert in plain torch. P rows, D width, E experts, F outputs."""

import torch
from torch import Tensor


def grouped_linear_reference(x_PD: Tensor, weight_EFD: Tensor, group_ends_E: Tensor) -> Tensor:
    """Return out_PF: row p times the transposed weight of the first expert whose end is above p."""
    rows_P = torch.arange(len(x_PD), device=x_PD.device)
    expert_P = torch.searchsorted(group_ends_E.to(rows_P.dtype), rows_P, right=True)
    return torch.einsum("pd,pfd->pf", x_PD, weight_EFD[expert_P])

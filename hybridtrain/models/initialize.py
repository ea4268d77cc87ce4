"""Seeded initial values: each parameter has its own random stream, so that every stack starts from the same model."""

import math

import torch
from torch import Tensor

from hybridtrain.models.model_config import ModelConfig

_STD = 0.02
"""Standard deviation of GPT-2's and LLaMA's initial weights."""


def fill_initial(name: str, values: Tensor, config: ModelConfig, generator: torch.Generator | None) -> None:
    """Fill ``values`` in place by the rule for the parameter's qualified name.

    Norm weights are 1, biases 0, everything else normal; projections onto the residual stream are scaled by
    1/sqrt(2 * num_blocks) (GPT-2's rule). ``generator`` is None on meta tensors, where nothing is drawn.
    """
    if name.endswith("bias"):
        values.zero_()
    elif "norm" in name:
        values.fill_(1.0)
    else:
        onto_residual = name.endswith(("attention_out.weight", "ffn_out.weight"))
        std = _STD / math.sqrt(2 * config.num_blocks) if onto_residual else _STD
        values.normal_(0.0, std, generator=generator)

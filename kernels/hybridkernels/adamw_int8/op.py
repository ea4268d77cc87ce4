"""AdamW with 8-bit moments as an in-place op: bitsandbytes on CUDA, a compiled loop on the CPU, nothing on meta."""

import ctypes
import math

import torch
from torch import Tensor

from hybridkernels.adamw_int8.cpu_build import find_compiler, load_cpu_kernel
from hybridkernels.adamw_int8.dynamic_map import BORDERS, QUANT_GROUP_SIZE, map_values
from hybridkernels.adamw_int8.reference import adamw_int8_reference


def cpu_backend() -> str:
    """Return ``compiled`` where a C compiler is found, else ``reference`` (the same update, about 100x slower)."""
    return "compiled" if find_compiler() else "reference"


def _compiled_update(tensors: list[Tensor], hyper: Tensor) -> bool:
    """Update whole groups in place; False where there is no kernel for this machine or dtype."""
    library = load_cpu_kernel()
    param_GS, grad_GS, *moments = tensors
    if library is None or grad_GS.dtype not in {torch.float32, torch.bfloat16}:
        return False
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (param_GS, grad_GS, *moments)]
    borders = torch.tensor(BORDERS[True] + BORDERS[False])
    library.adamw_int8(
        *pointers[:2], ctypes.c_int(grad_GS.dtype == torch.bfloat16), *pointers[2:],
        ctypes.c_int64(len(param_GS)), ctypes.c_void_p(borders.data_ptr()), ctypes.c_void_p(hyper.data_ptr()),
    )  # fmt: skip
    return True


@torch.library.custom_op(
    "hybridkernels::adamw_int8_",
    mutates_args=("param", "m_codes", "m_scale", "v_codes", "v_scale"),
    device_types="cpu",
)
def _adamw_int8(
    param: Tensor,
    grad: Tensor,
    m_codes: Tensor,
    m_scale: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    corrections = (1 - beta1**step, math.sqrt(1 - beta2**step))
    hyper = torch.tensor([lr, beta1, beta2, eps, weight_decay, *corrections, 0.0])
    moments = [m_codes.view(-1, QUANT_GROUP_SIZE), m_scale, v_codes.view(-1, QUANT_GROUP_SIZE), v_scale]
    whole = param.numel() // QUANT_GROUP_SIZE
    end = whole * QUANT_GROUP_SIZE
    if whole:
        body = [
            param[:end].view(whole, -1),
            grad[:end].contiguous().view(whole, -1),
            *(part[:whole] for part in moments),
        ]
        if not _compiled_update(body, hyper):
            adamw_int8_reference(*[*body, hyper])
    if end < param.numel():
        padding = (0, QUANT_GROUP_SIZE - (param.numel() - end))
        tail = [torch.nn.functional.pad(part[end:], padding)[None] for part in (param, grad)]
        adamw_int8_reference(*[*tail, *(part[whole:] for part in moments), hyper])
        param[end:].copy_(tail[0][0, : param.numel() - end])


@_adamw_int8.register_kernel("cuda")
def _adamw_int8_cuda(
    param: Tensor,
    grad: Tensor,
    m_codes: Tensor,
    m_scale: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    from bitsandbytes.functional import optimizer_update_8bit_blockwise  # noqa: PLC0415  an extra: CUDA only

    optimizer_update_8bit_blockwise(
        "adam", grad.to(param.dtype), param, m_codes, v_codes, beta1, beta2, 0.0, 0.0, eps, step, lr,
        map_values(param.device, signed=True), map_values(param.device, signed=False), m_scale, v_scale, weight_decay,
    )  # fmt: skip


@_adamw_int8.register_fake
def _adamw_int8_fake(
    param: Tensor,
    grad: Tensor,
    m_codes: Tensor,
    m_scale: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    pass


def adamw_int8_(
    param: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update ``param`` and its 8-bit moments in place.

    Args:
        param: (P,) float32, contiguous.
        grad: (P,) float32 or bfloat16.
        moments: m_codes, m_scale, v_codes, v_scale; G = ceil(P / 256) groups, codes
            uint8 (256 * G,), scales float32 (G,).
        lr: Learning rate of this step.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, multiplied by ``lr``.
        step: Number of this update, from 1.
    """
    _adamw_int8(param, grad, *moments, lr, *betas, eps, weight_decay, step)

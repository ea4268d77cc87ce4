"""AdamW with 8-bit moments as an in-place op: a library or Triton on CUDA, a compiled loop on the CPU, nothing on meta.

On CUDA bitsandbytes runs where it can be imported, else Triton, else the reference.
"""

import ctypes
import math
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from hybridkernels.adamw_int8.cpu_build import find_compiler, load_cpu_kernel
from hybridkernels.adamw_int8.dynamic_map import BORDERS, QUANT_GROUP_SIZE, map_values
from hybridkernels.adamw_int8.reference import adamw_int8_reference
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import cuda_backend

_SLICE_GROUPS = 2**12
"""The reference makes a dozen float32 temporaries: 4 MiB each."""


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
    update_plain(param, grad, (m_codes, m_scale, v_codes, v_scale), (lr, beta1, beta2, eps, weight_decay), step)


def update_plain(
    param: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor, Tensor, Tensor],
    settings: tuple[float, float, float, float, float],
    step: int,
) -> None:
    """Update whole groups by the compiled loop where there is one, else and a short group by the reference."""
    _, beta1, beta2, _, _ = settings
    hyper = torch.tensor([*settings, 1 - beta1**step, math.sqrt(1 - beta2**step), 0.0])
    if param.is_cuda:  # from pinned memory, for the host not to wait
        hyper = hyper.pin_memory().to(param.device, non_blocking=True)
    m_codes, m_scale, v_codes, v_scale = moments
    groups = [m_codes.view(-1, QUANT_GROUP_SIZE), m_scale, v_codes.view(-1, QUANT_GROUP_SIZE), v_scale]
    whole = param.numel() // QUANT_GROUP_SIZE
    end = whole * QUANT_GROUP_SIZE
    if whole:
        body = [
            param[:end].view(whole, -1),
            grad[:end].contiguous().view(whole, -1),
            *(part[:whole] for part in groups),
        ]
        if param.is_cuda or not _compiled_update(body, hyper):
            for parts in zip(*(torch.split(tensor, _SLICE_GROUPS) for tensor in body), strict=True):
                adamw_int8_reference(*[*parts, hyper])
    if end < param.numel():
        padding = (0, QUANT_GROUP_SIZE - (param.numel() - end))
        tail = [torch.nn.functional.pad(part[end:], padding)[None] for part in (param, grad)]
        adamw_int8_reference(*[*tail, *(part[whole:] for part in groups), hyper])
        param[end:].copy_(tail[0][0, : param.numel() - end])


def _loads_bitsandbytes() -> bool:
    """Return whether the library's compiled part is there; without it a stand-in fails at the first update."""
    if find_spec("bitsandbytes") is None:
        return False
    try:
        from bitsandbytes.cextension import CudaBNBNativeLibrary, lib  # noqa: PLC0415  an extra: CUDA only
    except Exception:  # noqa: BLE001  drivers and libraries fail in many ways; another kernel runs
        return False
    return isinstance(lib, CudaBNBNativeLibrary)


@cache
def _cuda_providers() -> tuple[str, ...]:
    """Return what can run on this machine's card, in the order to take."""
    library = ("bitsandbytes",) if _loads_bitsandbytes() else ()
    return (*library, *(("triton",) if cuda_backend() == "triton" else ()), "torch")


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
    provider = chosen_provider("adamw_int8", _cuda_providers(), param.device)
    moments = (m_codes, m_scale, v_codes, v_scale)
    if provider == "torch":
        update_plain(param, grad, moments, (lr, beta1, beta2, eps, weight_decay), step)
        return
    if provider == "triton":
        from hybridkernels.adamw_int8.triton_kernel import adamw_int8_triton  # noqa: PLC0415  Triton is optional

        adamw_int8_triton(
            (param,), grad, moments, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, step=step
        )
        return
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

"""AdamW with 8-bit moments as in-place ops: of float32 weights, and of weights that have no float32 copy.

On CUDA bitsandbytes runs where it can be imported (for float32 weights), else Triton, else the reference; on the CPU a
compiled loop. Weights of fewer bits are updated in float32 and rounded stochastically, with the same random words
everywhere. P parameters, G = ceil(P / 256) groups; ``state`` is the four tensors of moments, lr, both betas, eps,
weight decay and step.
"""

import ctypes
import math
from functools import cache
from importlib.util import find_spec
from typing import Any, Unpack

import torch
from torch import Tensor

from hybridkernels.adamw_int8.cpu_build import find_compiler, load_cpu_kernel
from hybridkernels.adamw_int8.dynamic_map import BORDERS, QUANT_GROUP_SIZE, map_values
from hybridkernels.adamw_int8.reference import Settings, adamw_int8_reference, load_weight, store_weight
from hybridkernels.define_op import define_op
from hybridkernels.int8_quantize.philox import random_seed, random_words
from hybridkernels.int8_quantize.reference import num_groups
from hybridkernels.provider import chosen_provider, takes_triton
from hybridkernels.triton_launch import cuda_backend

Moments = tuple[Tensor, Tensor, Tensor, Tensor]
"""m_codes, m_scale, v_codes, v_scale: codes uint8 (256 * G,), scales float32 (G,)."""


_STATE = ("m_codes", "m_scale", "v_codes", "v_scale")
_SCHEMA = (
    "Tensor grad, Tensor(c!) m_codes, Tensor(d!) m_scale, Tensor(e!) v_codes, Tensor(f!) v_scale, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, SymInt step"
)
_SLICE_GROUPS = 2**12
"""The reference makes a dozen float32 temporaries: 4 MiB each."""
_SLICE_ELEMENTS = 2**18
"""A multiple of the group size. Float32 values and int64 random words of a slice stay in the processor's cache."""
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cpu_backend() -> str:
    """Return ``compiled`` where a C compiler is found, else ``reference`` (the same update, about 100x slower)."""
    return "compiled" if find_compiler() else "reference"


def _compiled_update(tensors: list[Tensor], hyper: Tensor) -> bool:
    """Update whole groups in place; False where there is no kernel for this machine or dtype."""
    library, (param_GS, grad_GS, *_) = load_cpu_kernel(), tensors
    if library is None or grad_GS.dtype not in {torch.float32, torch.bfloat16}:
        return False
    borders = torch.tensor(BORDERS[True] + BORDERS[False])
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, borders, hyper)]
    is_narrow, num_groups_here = ctypes.c_int(grad_GS.dtype == torch.bfloat16), ctypes.c_int64(len(param_GS))
    library.adamw_int8(*pointers[:2], is_narrow, *pointers[2:6], num_groups_here, *pointers[6:])
    return True


def _update(param: Tensor, grad: Tensor, *state: Any) -> None:
    """Update whole groups by the compiled loop where there is one, else and a short group by the reference."""
    m_codes, m_scale, v_codes, v_scale, *settings, step = state
    hyper = torch.tensor([*settings, 1 - settings[1] ** step, math.sqrt(1 - settings[2] ** step), 0.0])
    if param.is_cuda:  # from pinned memory, for the host not to wait
        hyper = hyper.pin_memory().to(param.device, non_blocking=True)
    groups = [m_codes.view(-1, QUANT_GROUP_SIZE), m_scale, v_codes.view(-1, QUANT_GROUP_SIZE), v_scale]
    whole = param.numel() // QUANT_GROUP_SIZE
    end = whole * QUANT_GROUP_SIZE
    if whole:
        body = [param[:end].view(whole, -1), grad[:end].contiguous().view(whole, -1)]
        body += [part[:whole] for part in groups]
        if param.is_cuda or not _compiled_update(body, hyper):
            for parts in zip(*(torch.split(tensor, _SLICE_GROUPS) for tensor in body), strict=True):
                adamw_int8_reference(parts[0], parts[1], parts[2:], hyper)
    if end < param.numel():
        padding = (0, QUANT_GROUP_SIZE - (param.numel() - end))
        param_tail, grad_tail = (torch.nn.functional.pad(part[end:], padding)[None] for part in (param, grad))
        adamw_int8_reference(param_tail, grad_tail, [part[whole:] for part in groups], hyper)
        param[end:].copy_(param_tail[0, : param.numel() - end])


def _loads_bitsandbytes() -> bool:
    """Return whether the library's compiled part is there; without it a stub fails at the first update."""
    if find_spec("bitsandbytes") is None:
        return False
    try:
        from bitsandbytes.cextension import CudaBNBNativeLibrary, lib  # noqa: PLC0415  an extra: CUDA only
    except Exception:  # noqa: BLE001  drivers and libraries fail in many ways; another kernel runs
        return False
    return isinstance(lib, CudaBNBNativeLibrary)


@cache
def _cuda_providers() -> tuple[str, ...]:
    """Return the implementations that can run on this machine's card, in the order to take."""
    library = ("bitsandbytes",) if _loads_bitsandbytes() else ()
    return (*library, *(("triton",) if cuda_backend() == "triton" else ()), "torch")


def _update_cuda(param: Tensor, grad: Tensor, *state: Any) -> None:
    provider = chosen_provider("adamw_int8", _cuda_providers(), param.device)
    if provider == "torch":
        _update(param, grad, *state)
    elif provider == "triton":
        _triton_update((param,), grad, *state)
    else:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise  # noqa: PLC0415  an extra: CUDA only

        m_codes, m_scale, v_codes, v_scale, lr, beta1, beta2, eps, weight_decay, step = state
        signed, unsigned = (map_values(param.device, signed=signed) for signed in (True, False))
        optimizer_update_8bit_blockwise(
            "adam", grad.to(param.dtype), param, m_codes, v_codes, beta1, beta2, 0.0, 0.0, eps, step, lr,
            signed, unsigned, m_scale, v_scale, weight_decay,
        )  # fmt: skip


def _triton_update(weight: tuple[Tensor, ...], grad: Tensor, *state: Any, seed: Tensor | None = None) -> None:
    from hybridkernels.adamw_int8.triton_kernel import adamw_int8_triton  # noqa: PLC0415  Triton is optional

    lr, *betas, eps, weight_decay, step = state[4:]
    settings = Settings(lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, step=step)
    adamw_int8_triton(weight, grad, state[:4], seed=seed, **settings)


def _update_rounded(values: Tensor, scales: Tensor | None, grad: Tensor, *state_seed: Any) -> None:
    weight, (*state, seed) = (values,) if scales is None else (values, scales), state_seed
    seed = random_seed(values.device) if seed is None else seed
    if values.is_cuda and takes_triton("adamw_int8_rounded", values.device):
        _triton_update(weight, grad, *state, seed=seed)
        return
    for start in range(0, len(grad), _SLICE_ELEMENTS):
        end = min(start + _SLICE_ELEMENTS, len(grad))
        groups = slice(start // QUANT_GROUP_SIZE, num_groups(end))
        whole = slice(start, groups.stop * QUANT_GROUP_SIZE)
        part = tuple(tensor[elements] for tensor, elements in zip(weight, (slice(start, end), groups), strict=False))
        moments = (tensor[elements] for tensor, elements in zip(state[:4], (whole, groups) * 2, strict=True))
        value = load_weight(part)
        _update(value, grad[start:end], *moments, *state[4:])
        store_weight(value, part, random_words(seed, end - start, start))


_OF_FLOATS = f"(Tensor(a!) param, {_SCHEMA}) -> ()"
_ROUNDED = f"(Tensor(a!) values, Tensor(b!)? scales, {_SCHEMA}, Tensor? seed) -> ()"
_adamw_int8 = define_op("adamw_int8_", _update, cuda=_update_cuda, mutates=("param", *_STATE), schema=_OF_FLOATS)
_adamw_int8_rounded = define_op(
    "adamw_int8_rounded_", _update_rounded, mutates=("values", "scales", *_STATE), schema=_ROUNDED
)


def adamw_int8_(param: Tensor, grad: Tensor, moments: Moments, **settings: Unpack[Settings]) -> None:
    """Update ``param``, (P,) float32, contiguous, and its 8-bit moments by ``grad``, (P,) float32 or bfloat16."""
    _adamw_int8(param, grad, *moments, *_in_order(settings))


def adamw_int8_rounded_(
    weight: tuple[Tensor, ...],
    grad: Tensor,
    moments: Moments,
    *,
    seed: Tensor | None = None,
    **settings: Unpack[Settings],
) -> None:
    """Update a weight without a master, and its 8-bit moments, in place.

    The updated value is rounded up or down with probabilities that keep its mean: bfloat16 to one of its two
    neighbours, int8 to one of two codes under a new scale per group, absmax / 127, as ``int8_quantize`` defines them.

    Args:
        weight: One bfloat16 tensor (P,), or int8 codes (P,) and float32 scales (G,); contiguous.
        grad: (P,) float32, bfloat16 or float16.
        moments: As of ``adamw_int8_``.
        seed: (1,) int64 on the weight's device; an equal one gives equal random numbers on every device. None draws
            one from the device's global generator.

    Raises:
        ValueError: a dtype, size or layout is not supported.

    Memory: on CUDA the seed's 8 bytes, and a copy of a gradient that is not contiguous; without Triton some 30 MiB of
    temporaries more, unseen by the ledger.
    """
    _check(weight, grad, moments, seed)
    values, scales = weight if len(weight) == 2 else (weight[0], None)
    _adamw_int8_rounded(values, scales, grad, *moments, *_in_order(settings), seed)


def _in_order(settings: Settings) -> tuple[float, ...]:
    """Return the settings as the ops take them."""
    return settings["lr"], *settings["betas"], settings["eps"], settings["weight_decay"], settings["step"]


def _check(weight: tuple[Tensor, ...], grad: Tensor, moments: Moments, seed: Tensor | None) -> None:
    elements, groups = grad.numel(), num_groups(grad.numel())
    stored = torch.bfloat16 if len(weight) == 1 else torch.int8
    codes, scales = ((torch.uint8,), groups * QUANT_GROUP_SIZE), ((torch.float32,), groups)
    wanted: dict[str, tuple[Tensor | None, tuple[torch.dtype, ...], int]] = {
        "weight": (weight[0], (stored,), elements),
        "weight scales": (weight[1] if len(weight) == 2 else None, *scales),
        "grad": (grad, _GRAD_DTYPES, elements),
        "m codes": (moments[0], *codes), "m scales": (moments[1], *scales),
        "v codes": (moments[2], *codes), "v scales": (moments[3], *scales),
        "seed": (seed, (torch.int64,), 1),
    }  # fmt: skip
    faults = [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        f"{'' if tensor.is_contiguous() else ', not contiguous'}; allowed: "
        f"{' or '.join(str(dtype) for dtype in dtypes)} {(size,)} on {grad.device}, contiguous"
        for name, (tensor, dtypes, size) in wanted.items()
        if tensor is not None
        and (
            tensor.dtype not in dtypes
            or (tensor.shape, tensor.device) != ((size,), grad.device)
            or not (tensor is grad or tensor.is_contiguous())
        )
    ]
    if faults:
        raise ValueError("adamw_int8_rounded_: " + "; ".join(faults))

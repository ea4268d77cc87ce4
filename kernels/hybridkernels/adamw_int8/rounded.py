"""AdamW with 8-bit moments for weights that have no float32 copy: updated and rounded stochastically in one op.

One Triton kernel on CUDA; elsewhere the float32 update and a rounding with the same random words, slice by slice. P
parameters, G = ceil(P / 256) groups.
"""

import torch
from torch import Tensor

from hybridkernels.adamw_int8.op import update_plain
from hybridkernels.adamw_int8.reference import load_weight, store_weight
from hybridkernels.int8_quantize.philox import random_seed, random_words
from hybridkernels.int8_quantize.reference import GROUP_SIZE, num_groups
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import cuda_backend

_SLICE_ELEMENTS = 2**18
"""A multiple of the group size. Float32 values and int64 random words of a slice stay in the processor's cache."""
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op(
    "hybridkernels::adamw_int8_rounded_",
    mutates_args=("values", "scales", "m_codes", "m_scale", "v_codes", "v_scale"),
    device_types=("cpu", "cuda"),
)
def _adamw_int8_rounded(
    values: Tensor,
    scales: Tensor | None,
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
    seed: Tensor | None,
) -> None:
    weight = (values,) if scales is None else (values, scales)
    moments = (m_codes, m_scale, v_codes, v_scale)
    update = _triton_update if _takes_triton(values.device) else _torch_update
    drawn = random_seed(values.device) if seed is None else seed
    update(weight, grad, moments, (lr, beta1, beta2, eps, weight_decay), step, drawn)


@_adamw_int8_rounded.register_fake
def _adamw_int8_rounded_fake(
    values: Tensor,
    scales: Tensor | None,
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
    seed: Tensor | None,
) -> None:
    pass


_Moments = tuple[Tensor, Tensor, Tensor, Tensor]
_Settings = tuple[float, float, float, float, float]


def _takes_triton(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    available = ("triton", "torch") if cuda_backend() == "triton" else ("torch",)
    return chosen_provider("adamw_int8_rounded", available, device) == "triton"


def _triton_update(
    weight: tuple[Tensor, ...], grad: Tensor, moments: _Moments, settings: _Settings, step: int, seed: Tensor
) -> None:
    from hybridkernels.adamw_int8.triton_kernel import adamw_int8_triton  # noqa: PLC0415  Triton is optional

    lr, beta1, beta2, eps, weight_decay = settings
    adamw_int8_triton(
        weight, grad, moments, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, step=step, seed=seed
    )


def _torch_update(
    weight: tuple[Tensor, ...], grad: Tensor, moments: _Moments, settings: _Settings, step: int, seed: Tensor
) -> None:
    for start in range(0, len(grad), _SLICE_ELEMENTS):
        end = min(start + _SLICE_ELEMENTS, len(grad))
        groups = slice(start // GROUP_SIZE, num_groups(end))
        whole = slice(start, groups.stop * GROUP_SIZE)
        part = tuple(tensor[elements] for tensor, elements in zip(weight, (slice(start, end), groups), strict=False))
        part_moments = tuple(tensor[elements] for tensor, elements in zip(moments, (whole, groups) * 2, strict=True))
        m_codes, m_scale, v_codes, v_scale = part_moments
        value = load_weight(part)
        update_plain(value, grad[start:end], (m_codes, m_scale, v_codes, v_scale), settings, step)
        store_weight(value, part, random_words(seed, end - start, start))


def adamw_int8_rounded_(
    weight: tuple[Tensor, ...],
    grad: Tensor,
    moments: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    seed: Tensor | None = None,
) -> None:
    """Update a weight that is all there is of its value, and its 8-bit moments, in place.

    The updated value is rounded up or down with the odds that keep its mean: bfloat16 to one of its two neighbours,
    int8 to one of two codes under a new scale per group, absmax / 127, as ``int8_quantize`` defines them.

    Args:
        weight: One bfloat16 tensor (P,), or int8 codes (P,) and float32 scales (G,); contiguous.
        grad: (P,) float32, bfloat16 or float16.
        moments: m_codes, m_scale, v_codes, v_scale; codes uint8 (256 * G,), scales float32 (G,).
        lr: Learning rate of this step.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, multiplied by ``lr``.
        step: Number of this update, from 1.
        seed: (1,) int64 on the weight's device; an equal one gives equal random numbers on every device. None draws
            one from the device's global generator.

    Raises:
        ValueError: a dtype, size or layout is another than these.

    Memory: on CUDA the seed's 8 bytes, and a copy of a gradient that is not contiguous; without Triton some 30 MiB of
    temporaries more, unseen by the ledger.
    """
    _check(weight, grad, moments, seed)
    values, scales = weight if len(weight) == 2 else (weight[0], None)
    _adamw_int8_rounded(values, scales, grad, *moments, lr, *betas, eps, weight_decay, step, seed)


def _check(weight: tuple[Tensor, ...], grad: Tensor, moments: _Moments, seed: Tensor | None) -> None:
    elements, groups = grad.numel(), num_groups(grad.numel())
    stored = torch.bfloat16 if len(weight) == 1 else torch.int8
    wanted: list[tuple[str, Tensor, tuple[torch.dtype, ...], tuple[int]]] = [
        ("weight", weight[0], (stored,), (elements,))
    ]
    if len(weight) == 2:
        wanted.append(("weight scales", weight[1], (torch.float32,), (groups,)))
    wanted.append(("grad", grad, _GRAD_DTYPES, (elements,)))
    for name, codes, scale in (("m", *moments[:2]), ("v", *moments[2:])):
        wanted.append((f"{name} codes", codes, (torch.uint8,), (groups * GROUP_SIZE,)))
        wanted.append((f"{name} scales", scale, (torch.float32,), (groups,)))
    if seed is not None:
        wanted.append(("seed", seed, (torch.int64,), (1,)))
    faults = [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        f"{'' if tensor.is_contiguous() else ', not contiguous'}; allowed: "
        f"{' or '.join(str(dtype) for dtype in dtypes)} {shape} on {grad.device}, contiguous"
        for name, tensor, dtypes, shape in wanted
        if not (
            tensor.dtype in dtypes
            and tensor.shape == shape
            and tensor.device == grad.device
            and (tensor is grad or tensor.is_contiguous())
        )
    ]
    if faults:
        raise ValueError("adamw_int8_rounded_: " + "; ".join(faults))

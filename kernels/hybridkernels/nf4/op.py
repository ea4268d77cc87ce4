"""NF4 as in-place ops: plain torch in slices, Triton on CUDA for the way back, nothing on meta. P values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkernels.nf4.reference import (
    GROUP_SIZE,
    Nf4Sizes,
    decode_scales,
    encode_scales,
    nearest,
    padded,
    quantiles,
    relative_to_largest,
)
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import cuda_backend

_SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Multiples of the group size; what a slice needs besides stays small."""
_SLICE_SCRATCH = 17
"""Bytes a value: its magnitude, its share of the largest, its index in 32 and 8 bits and two halves of a byte, or 16
bytes of index and value on the way back."""


def nf4_workspace_bytes(num_elements: int) -> int:
    """Return the CUDA bytes that quantizing takes besides its arguments, the groups' scales included."""
    sizes = Nf4Sizes.of(num_elements)
    return min(num_elements, _SLICE_ELEMENTS["cuda"]) * _SLICE_SCRATCH + sizes.scale_codes * 4 * 4


def _slices(count: int, device: torch.device) -> Iterator[slice]:
    step = _SLICE_ELEMENTS[device.type]
    yield from (slice(start, min(start + step, count)) for start in range(0, count, step))


@torch.library.custom_op(
    "hybridkernels::nf4_quantize", mutates_args=("codes", "scale_codes", "scales", "mean"), device_types=("cpu", "cuda")
)
def _nf4_quantize(values: Tensor, codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor) -> None:
    flat = values.view(-1)
    largest_G = torch.empty(scale_codes.shape, dtype=torch.float32, device=values.device)
    for part in _slices(flat.numel(), flat.device):
        relative_P, found_G = relative_to_largest(padded(flat[part].float(), GROUP_SIZE), GROUP_SIZE)
        first = part.start // GROUP_SIZE
        largest_G[first : first + found_G.numel()] = found_G
        index = nearest(relative_P, quantiles(flat.device)).to(torch.uint8)
        pairs = index[: -(-(part.stop - part.start) // 2) * 2].view(-1, 2)
        codes[part.start // 2 : part.start // 2 + pairs.shape[0]] = (pairs[:, 0] << 4) | pairs[:, 1]
    for target, found in zip((scale_codes, scales, mean), encode_scales(largest_G), strict=True):
        target.copy_(found)


@_nf4_quantize.register_fake
def _nf4_quantize_fake(values: Tensor, codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor) -> None:
    pass


@torch.library.custom_op("hybridkernels::nf4_dequantize", mutates_args=("out",), device_types="cpu")
def _nf4_dequantize(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out: Tensor) -> None:
    _dequantize_slices(codes, scale_codes, scales, mean, out)


def _dequantize_slices(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out: Tensor) -> None:
    flat, table = out.view(-1), quantiles(out.device)
    scales_G = decode_scales(scale_codes, scales, mean)
    for part in _slices(flat.numel(), flat.device):
        bytes_ = codes[part.start // 2 : -(-part.stop // 2)]
        index = torch.stack([bytes_ >> 4, bytes_ & 15], dim=1).view(-1)[: part.stop - part.start]
        groups = scales_G[part.start // GROUP_SIZE : -(-part.stop // GROUP_SIZE)]
        wide_P = groups.repeat_interleave(GROUP_SIZE)[: index.numel()]
        flat[part] = table[index.int()].mul_(wide_P)


@_nf4_dequantize.register_kernel("cuda")
def _nf4_dequantize_cuda(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out: Tensor) -> None:
    available = ("triton", "torch") if cuda_backend() == "triton" else ("torch",)
    if chosen_provider("nf4_dequantize", available, out.device) != "triton":
        _dequantize_slices(codes, scale_codes, scales, mean, out)
        return
    from hybridkernels.nf4.triton_kernel import nf4_dequantize_triton  # noqa: PLC0415  Triton is optional

    nf4_dequantize_triton(codes, scale_codes, scales, mean, out)


@_nf4_dequantize.register_fake
def _nf4_dequantize_fake(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out: Tensor) -> None:
    pass


def nf4_quantize(values_P: Tensor, codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor) -> None:
    """Write 4-bit codes of values, the 8-bit codes of their groups' scales, the scales of those and their mean.

    Args:
        values_P: P values of any shape, contiguous, float32, bfloat16 or float16; arithmetic is float32.
        codes: uint8, (ceil(P / 2),), overwritten, as all that follow; sizes as ``Nf4Sizes.of(P)``.
        scale_codes: uint8, (ceil(P / 64),).
        scales: float32, one of 256 groups.
        mean: float32, (1,).

    Raises:
        ValueError: a dtype, size or layout is another than these.
    """
    _check(values_P, codes, scale_codes, scales, mean)
    _nf4_quantize(values_P, codes, scale_codes, scales, mean)


def nf4_dequantize(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out_P: Tensor) -> None:
    """Write the values of codes: a float32 product, rounded once to the dtype of ``out_P``.

    Args:
        codes: As ``nf4_quantize`` writes them, and so on.
        scale_codes: uint8.
        scales: float32.
        mean: float32.
        out_P: float32, bfloat16 or float16, P elements of any shape, contiguous; overwritten.

    Raises:
        ValueError: a dtype, size or layout is another than these.
    """
    _check(out_P, codes, scale_codes, scales, mean)
    _nf4_dequantize(codes, scale_codes, scales, mean, out_P)


def _check(values_P: Tensor, codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor) -> None:
    sizes = Nf4Sizes.of(values_P.numel())
    faults = [] if values_P.dtype.is_floating_point and values_P.is_contiguous() else [f"values are {values_P.dtype}"]
    for name, tensor, dtype, size in (
        ("codes", codes, torch.uint8, sizes.codes),
        ("scale_codes", scale_codes, torch.uint8, sizes.scale_codes),
        ("scales", scales, torch.float32, sizes.scales),
        ("mean", mean, torch.float32, 1),
    ):
        if tensor.dtype != dtype or tensor.shape != (size,) or not tensor.is_contiguous():
            faults.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; allowed: {dtype} ({size},), contiguous")
    if faults:
        raise ValueError("nf4: " + "; ".join(faults))

"""NF4 as in-place ops: plain torch in slices, Triton on CUDA for the way back, nothing on meta. P values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, triton_or_fallback
from hybridkernels.nf4.reference import GROUP_SIZE, Nf4Sizes, decode_scales, encode_codes, encode_scales, values_of

_SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Multiples of the group size; what a slice needs besides stays small."""


def _slices(count: int, device: torch.device) -> Iterator[tuple[slice, slice, slice]]:
    """Yield values, bytes of codes and groups that belong together."""
    step = _SLICE_ELEMENTS[device.type]
    for start in range(0, count, step):
        end = min(start + step, count)
        yield slice(start, end), slice(start // 2, -(-end // 2)), slice(start // GROUP_SIZE, -(-end // GROUP_SIZE))


def _quantize(values: Tensor, codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor) -> None:
    flat = values.view(-1)
    largest_G = torch.empty(scale_codes.shape, dtype=torch.float32, device=values.device)
    for part, bytes_, groups in _slices(flat.numel(), flat.device):
        codes[bytes_], largest_G[groups] = encode_codes(flat[part])
    for target, value in zip((scale_codes, scales, mean), encode_scales(largest_G), strict=True):
        target.copy_(value)


def _dequantize(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out: Tensor) -> None:
    flat, scales_G = out.view(-1), decode_scales(scale_codes, scales, mean)
    for part, bytes_, groups in _slices(flat.numel(), flat.device):
        flat[part] = values_of(codes[bytes_], scales_G[groups], part.stop - part.start)


_nf4_quantize = define_op("nf4_quantize", _quantize, mutates=("codes", "scale_codes", "scales", "mean"))
_dequantize_cuda = triton_or_fallback(_dequantize, "nf4.nf4_dequantize_triton")
_nf4_dequantize = define_op("nf4_dequantize", _dequantize, cuda=_dequantize_cuda, mutates=("out",))


def nf4_quantize(values_P: Tensor, codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor) -> None:
    """Write 4-bit codes of values, the 8-bit codes of their groups' scales, the scales of those and their mean.

    Args:
        values_P: P values of any shape, contiguous, float32, bfloat16 or float16; arithmetic is float32.
        codes: uint8, (ceil(P / 2),), overwritten, as all that follow; sizes as ``Nf4Sizes.of(P)``.
        scale_codes: uint8, (ceil(P / 64),).
        scales: float32, one of 256 groups.
        mean: float32, (1,).

    Raises:
        ValueError: a dtype, size or layout is not supported.
    """
    _check(values_P, codes, scale_codes, scales, mean)
    _nf4_quantize(values_P, codes, scale_codes, scales, mean)


def nf4_dequantize(codes: Tensor, scale_codes: Tensor, scales: Tensor, mean: Tensor, out_P: Tensor) -> None:
    """Write the values of codes: a float32 product, rounded once to the dtype of ``out_P``.

    ``out_P`` is float32, bfloat16 or float16; shapes, layouts and errors are those of ``nf4_quantize``.
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

"""Quantizing to 8 bits and back as in-place ops: plain torch in slices on the CPU, Triton on CUDA, nothing on meta.

P values, G = ceil(P / 256) groups; within a slice R groups (rows) of S = 256 values, or one short group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, triton_or_fallback
from hybridkernels.int8_quantize.reference import GROUP_SIZE, LARGEST_CODE, SMALLEST_SCALE, num_groups

_SLICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Multiples of the group size. On the CPU a slice and its scratch stay in the second-level cache."""
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _slices(num_buffers: int, scales_G: Tensor, *tensors_P: Tensor) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield matching slices as rows of whole groups, then the short group as one row.

    The scales come first; the second list holds float32 buffers of that shape, made once per call.
    """
    device, num_elements = scales_G.device, tensors_P[0].numel()
    step, whole = _SLICE_ELEMENTS[device.type], num_elements - num_elements % GROUP_SIZE
    buffers = [torch.empty(min(num_elements, step), dtype=torch.float32, device=device) for _ in range(num_buffers)]
    ends = [*(min(start + step, whole) for start in range(0, whole, step)), *([num_elements] * (whole < num_elements))]
    flat = [tensor.view(-1) for tensor in tensors_P]
    for start, end in zip([0, *ends], ends, strict=False):
        rows, first = num_groups(end - start), start // GROUP_SIZE
        sliced = [scales_G[first : first + rows], *(tensor[start:end].view(rows, -1) for tensor in flat)]
        yield sliced, [buffer[: end - start].view(rows, -1) for buffer in buffers]


def _quantize(values: Tensor, codes: Tensor, scales: Tensor, stochastic: bool, static: bool) -> None:
    for (scales_R, values_RS, codes_RS), buffers_RS in _slices(3 if stochastic else 2, scales, values, codes):
        steps_RS, other_RS = buffers_RS[:2]
        wide_RS = values_RS if values_RS.dtype == torch.float32 else steps_RS.copy_(values_RS)
        absmax_R = torch.abs(wide_RS, out=other_RS).amax(1)
        if static:
            scales_R.masked_fill_(absmax_R.isfinite().logical_not_(), torch.nan)
        else:
            # A tensor, not a number: torch on CUDA multiplies by the rounded inverse of a number.
            torch.div(absmax_R, absmax_R.new_full((), LARGEST_CODE), out=scales_R)
            scales_R.masked_fill_(scales_R < SMALLEST_SCALE, 0.0)
        inverse_R = torch.reciprocal(scales_R, out=absmax_R)
        inverse_R.masked_fill_((scales_R >= SMALLEST_SCALE).logical_not_(), 0.0)
        torch.mul(wide_RS, inverse_R[:, None], out=steps_RS)
        steps_RS.clamp_(-LARGEST_CODE, LARGEST_CODE).nan_to_num_(nan=0.0)
        if not stochastic:
            codes_RS.copy_(steps_RS.round_())
            continue
        # floor + (fraction > uniform): exact, where floor(value + uniform) would round the sum.
        floor_RS, uniform_RS = torch.floor(steps_RS, out=other_RS), buffers_RS[2].uniform_()
        steps_RS.sub_(floor_RS).sub_(uniform_RS).ceil_()
        codes_RS.copy_(steps_RS.add_(floor_RS))


def _dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    for (scales_R, codes_RS, out_RS), buffers_RS in _slices(int(out.dtype != torch.float32), scales, codes, out):
        wide_RS = buffers_RS[0] if buffers_RS else out_RS
        wide_RS.copy_(codes_RS).mul_(scales_R[:, None])
        if buffers_RS:
            out_RS.copy_(wide_RS)


_quantize_cuda = triton_or_fallback(_quantize, "int8_quantize.int8_quantize_triton")
_dequantize_cuda = triton_or_fallback(_dequantize, "int8_quantize.int8_dequantize_triton")
_int8_quantize = define_op("int8_quantize", _quantize, cuda=_quantize_cuda, mutates=("codes", "scales"))
_int8_dequantize = define_op("int8_dequantize", _dequantize, cuda=_dequantize_cuda, mutates=("out",))


def int8_quantize(
    values_P: Tensor, codes_P: Tensor, scales_G: Tensor, *, stochastic: bool, static: bool = False
) -> None:
    """Write codes in [-127, 127] and one scale per group of 256 consecutive values; ``code * scale`` is the value.

    A group whose scale would be below 2^-126 (all values below 1.5e-36) gets scale 0 and codes 0. A group that holds
    an infinity or a NaN gets a scale that is infinite or NaN, in static mode too, and codes of which no product with
    it is finite: the fault survives ``int8_dequantize``. Float32's very largest values may come back infinite.

    Args:
        values_P: P values of any shape, contiguous, float32, bfloat16 or float16; arithmetic is float32.
        codes_P: int8, as many elements, contiguous; overwritten.
        scales_G: float32, (ceil(P / 256),), contiguous; overwritten, unless ``static``.
        stochastic: Round up with the probability of the fraction, drawn from the device's global generator, so that
            the mean is kept; the error is below one scale. False rounds to nearest even; it is at most half a scale.
        static: Use ``scales_G`` (finite, 0 or more) as given; larger values are clamped to +-127 scales.

    Raises:
        ValueError: a dtype, size or layout is not supported.
    """
    _check(values_P, codes_P, scales_G)
    _int8_quantize(values_P, codes_P, scales_G, stochastic, static)


def int8_dequantize(codes_P: Tensor, scales_G: Tensor, out_P: Tensor) -> None:
    """Write ``code * scale``, a float32 product rounded once to the dtype of ``out_P``.

    ``out_P`` is float32, bfloat16 or float16; values beyond the range of float16 become infinite. Shapes, layouts and
    errors are those of ``int8_quantize``.
    """
    _check(out_P, codes_P, scales_G)
    _int8_dequantize(codes_P, scales_G, out_P)


def _check(values_P: Tensor, codes_P: Tensor, scales_G: Tensor) -> None:
    count, groups = values_P.numel(), num_groups(values_P.numel())
    codes_fit = codes_P.dtype == torch.int8 and codes_P.numel() == count
    scales_fit = scales_G.dtype == torch.float32 and scales_G.shape == (groups,)
    faults = [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}; "
        f"allowed: {allowed}, contiguous"
        for name, tensor, allowed, fits in (
            ("values", values_P, "float32, bfloat16 or float16", values_P.dtype in _FLOAT_DTYPES),
            ("codes", codes_P, f"int8 of {count} elements", codes_fit),
            ("scales", scales_G, f"float32 of shape ({groups},)", scales_fit),
        )
        if not (fits and tensor.is_contiguous())
    ]
    if faults:
        raise ValueError("; ".join(faults))

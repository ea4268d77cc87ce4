"""Quantizing to 8 bits and back as in-place ops: plain torch in slices on the CPU, Triton on CUDA, nothing on meta.

P values, G = ceil(P / 256) groups; within a slice R groups (rows) of S = 256 values, or one short group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkernels.int8_quantize.reference import GROUP_SIZE, LARGEST_CODE, SMALLEST_SCALE, num_groups
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import cuda_backend

_SLICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Multiples of the group size. On the CPU a slice and its scratch stay in the second-level cache."""
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUP_SCRATCH_BYTES = 16
"""Largest magnitude, inverse scale and masks of one group."""
_SEED_BYTES = 8


def quantize_workspace_bytes(num_elements: int, *, stochastic: bool, fused: bool = True) -> int:
    """Return the CUDA bytes that ``int8_quantize`` holds besides its arguments while it runs.

    Args:
        num_elements: P.
        stochastic: Whether it rounds stochastically.
        fused: For the Triton kernel: the seed of its random numbers. False gives the plain torch path's scratch.
    """
    if fused:
        return _SEED_BYTES if stochastic else 0
    elements = min(num_elements, _SLICE_ELEMENTS["cuda"])
    return elements * 4 * (3 if stochastic else 2) + num_groups(elements) * _GROUP_SCRATCH_BYTES


def dequantize_workspace_bytes(num_elements: int, dtype: torch.dtype, *, fused: bool = True) -> int:
    """Return the CUDA bytes that ``int8_dequantize`` to ``dtype`` holds besides its arguments while it runs."""
    if fused or dtype == torch.float32:
        return 0
    return min(num_elements, _SLICE_ELEMENTS["cuda"]) * 4


class _Scratch:
    """Float32 buffers of one slice, made once per call."""

    def __init__(self, like: Tensor, count: int) -> None:
        elements = min(like.numel(), _SLICE_ELEMENTS[like.device.type])
        self._buffers = [torch.empty(elements, dtype=torch.float32, device=like.device) for _ in range(count)]

    def rows(self, like_RS: Tensor) -> list[Tensor]:
        """Return the buffers' beginnings in the shape of ``like_RS``."""
        return [buffer[: like_RS.numel()].view(like_RS.shape) for buffer in self._buffers]


def _slices(*tensors_P: Tensor, scales_G: Tensor) -> Iterator[list[Tensor]]:
    """Give matching slices as rows of whole groups, then the short group as one row; the scales come last."""
    num_elements = tensors_P[0].numel()
    step = _SLICE_ELEMENTS[scales_G.device.type]
    whole = num_elements - num_elements % GROUP_SIZE
    bounds = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    if whole < num_elements:
        bounds.append((whole, num_elements))
    flat = [tensor.view(-1) for tensor in tensors_P]
    for start, end in bounds:
        first = start // GROUP_SIZE
        rows = num_groups(end - start)
        yield [*(tensor[start:end].view(rows, -1) for tensor in flat), scales_G[first : first + rows]]


def _quantize_slice(
    values_RS: Tensor, codes_RS: Tensor, scales_R: Tensor, buffers_RS: list[Tensor], *, static: bool
) -> None:
    """Quantize one slice; two buffers round to nearest, a third one makes the rounding stochastic."""
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
    if len(buffers_RS) == 2:
        codes_RS.copy_(steps_RS.round_())
        return
    # floor + (fraction > uniform): exact, where floor(value + uniform) would round the sum.
    floor_RS, uniform_RS = torch.floor(steps_RS, out=other_RS), buffers_RS[2].uniform_()
    steps_RS.sub_(floor_RS).sub_(uniform_RS).ceil_()
    codes_RS.copy_(steps_RS.add_(floor_RS))


def _takes_triton(op: str, device: torch.device) -> bool:
    available = ("triton", "torch") if cuda_backend() == "triton" else ("torch",)
    return chosen_provider(op, available, device) == "triton"


@torch.library.custom_op("hybridkernels::int8_quantize", mutates_args=("codes", "scales"), device_types="cpu")
def _int8_quantize(values: Tensor, codes: Tensor, scales: Tensor, stochastic: bool, static: bool) -> None:
    _quantize_slices(values, codes, scales, stochastic=stochastic, static=static)


def _quantize_slices(values: Tensor, codes: Tensor, scales: Tensor, *, stochastic: bool, static: bool) -> None:
    scratch = _Scratch(values, 3 if stochastic else 2)
    for values_RS, codes_RS, scales_R in _slices(values, codes, scales_G=scales):
        _quantize_slice(values_RS, codes_RS, scales_R, scratch.rows(values_RS), static=static)


@_int8_quantize.register_kernel("cuda")
def _int8_quantize_cuda(values: Tensor, codes: Tensor, scales: Tensor, stochastic: bool, static: bool) -> None:
    if not _takes_triton("int8_quantize", values.device):
        _quantize_slices(values, codes, scales, stochastic=stochastic, static=static)
        return
    from hybridkernels.int8_quantize.triton_kernel import int8_quantize_triton  # noqa: PLC0415  Triton is optional

    int8_quantize_triton(values, codes, scales, stochastic=stochastic, static=static)


@_int8_quantize.register_fake
def _int8_quantize_fake(values: Tensor, codes: Tensor, scales: Tensor, stochastic: bool, static: bool) -> None:
    pass


@torch.library.custom_op("hybridkernels::int8_dequantize", mutates_args=("out",), device_types="cpu")
def _int8_dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    _dequantize_slices(codes, scales, out)


def _dequantize_slices(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    scratch = _Scratch(out, 0 if out.dtype == torch.float32 else 1)
    for codes_RS, out_RS, scales_R in _slices(codes, out, scales_G=scales):
        for wide_RS in scratch.rows(out_RS):
            out_RS.copy_(wide_RS.copy_(codes_RS).mul_(scales_R[:, None]))
        if out.dtype == torch.float32:
            out_RS.copy_(codes_RS).mul_(scales_R[:, None])


@_int8_dequantize.register_kernel("cuda")
def _int8_dequantize_cuda(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    if not _takes_triton("int8_dequantize", codes.device):
        _dequantize_slices(codes, scales, out)
        return
    from hybridkernels.int8_quantize.triton_kernel import int8_dequantize_triton  # noqa: PLC0415  Triton is optional

    int8_dequantize_triton(codes, scales, out)


@_int8_dequantize.register_fake
def _int8_dequantize_fake(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    pass


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
        stochastic: Round up with the odds of the fraction, drawn from the device's global generator, so that the mean
            is kept; the error is below one scale. False rounds to nearest even; the error is at most half a scale.
        static: Use ``scales_G`` (finite, 0 or more) as given; larger values are clamped to +-127 scales.

    Raises:
        ValueError: a dtype, size or layout is another than these.
    """
    _check(values_P, codes_P, scales_G)
    _int8_quantize(values_P, codes_P, scales_G, stochastic, static)


def int8_dequantize(codes_P: Tensor, scales_G: Tensor, out_P: Tensor) -> None:
    """Write ``code * scale``, a float32 product rounded once to the dtype of ``out_P``.

    Args:
        codes_P: P int8 codes of any shape, contiguous.
        scales_G: float32, (ceil(P / 256),), contiguous.
        out_P: float32, bfloat16 or float16, as many elements, contiguous; overwritten. Values beyond the range of
            float16 become infinite.

    Raises:
        ValueError: a dtype, size or layout is another than these.
    """
    _check(out_P, codes_P, scales_G)
    _int8_dequantize(codes_P, scales_G, out_P)


def _check(values_P: Tensor, codes_P: Tensor, scales_G: Tensor) -> None:
    groups = num_groups(values_P.numel())
    faults = [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}; "
        f"allowed: {allowed}, contiguous"
        for name, tensor, allowed, fits in (
            ("values", values_P, "float32, bfloat16 or float16", values_P.dtype in _FLOAT_DTYPES),
            (
                "codes", codes_P, f"int8 of {values_P.numel()} elements",
                codes_P.dtype == torch.int8 and codes_P.numel() == values_P.numel(),
            ),
            (
                "scales", scales_G, f"float32 of shape ({groups},)",
                scales_G.dtype == torch.float32 and scales_G.shape == (groups,),
            ),
        )
        if not (fits and tensor.is_contiguous())
    ]  # fmt: skip
    if faults:
        raise ValueError("; ".join(faults))

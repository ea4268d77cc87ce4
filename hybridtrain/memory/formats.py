# ruff: noqa: ARG002  a format ignores what of the protocol it has no use for
"""Storage formats of float32 values: of optimizer state, and of weights with their master weights.

A format loads flat slices of P elements, which start at a multiple of 256, as float32, and stores them. Stochastic
rounding draws from the device's global random stream, which the caller seeds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, dequantize, quantize
from hybridkernels.int8_quantize import GROUP_SIZE, int8_dequantize, int8_quantize, num_groups, random_bits
from hybridkernels.int8_quantize.reference import LARGEST_CODE, SMALLEST_SCALE
from hybridkernels.nf4 import Nf4Sizes, nf4_dequantize, nf4_quantize
from hybridkernels.scaled_matmul import quantize_rows
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.plan.memory_plan import DynamicRange, PhasePlan
from hybridtrain.plan.placement import Codec

SLICE_ELEMENTS = 1 << 23
"""Elements processed at a time: 32 MiB per tensor reach the full bus rate with small temporaries. Slices have this size
in every placement where numbers are drawn, so that these do not depend on it."""
SMALLEST_INT8_TENSOR = 4096
"""Smallest tensor with 8-bit state, as in bitsandbytes: norms and biases stay float32."""
_STATIC_ROOM = 2.0
_QUIET_NAN = 0x7FC00000
_SIGNED_ZERO_CODE, _UNSIGNED_ZERO_CODE = 127, 0
"""Codes of the value zero in the dynamic maps."""


def parts(count: int, height: int | None = None) -> Iterator[slice]:
    """Yield the slices of ``count`` elements, each of ``height``; None: ``SLICE_ELEMENTS``."""
    height = height or SLICE_ELEMENTS
    yield from (slice(start, min(start + height, count)) for start in range(0, count, height))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: int = 0
    """Stored value of the number zero."""


# ---- optimizer state


@dataclass(frozen=True, slots=True)
class PlainState:
    """State as one floating-point tensor, stochastically rounded below 32 bits (1710.03740)."""

    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """Name of the format in a checkpoint, one of ``STATE_FORMATS``."""
        return str(self.dtype).removeprefix("torch.")

    def specs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Return the stored tensors of a parameter of this shape."""
        return (TensorSpec(shape, self.dtype),)

    def part(self, index: int, part: slice) -> slice:
        """Return the range of stored tensor ``index`` for a range of the parameter's elements."""
        return part

    def load(self, stored: Sequence[Tensor], count: int) -> Tensor:
        """Return the (count,) float32 values: the stored tensor itself where it is float32."""
        return stored[0].float()

    def store(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Store values that the caller changed after ``load``."""
        if self.dtype != torch.float32:
            round_stochastically(value_P, stored[0])
        elif value_P is not stored[0]:
            stored[0].copy_(value_P)


@dataclass(frozen=True, slots=True)
class DynamicInt8State:
    """8-bit codes of the dynamic map (Dettmers et al., 2110.02861) and one float32 scale per group of 256."""

    signed: bool

    @property
    def name(self) -> str:
        """Name of the format, with that of its map."""
        return "int8_signed" if self.signed else "int8_unsigned"

    def specs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Return codes, uint8, and scales, float32, of whole groups."""
        groups = -(-torch.Size(shape).numel() // QUANT_GROUP_SIZE)
        zero = _SIGNED_ZERO_CODE if self.signed else _UNSIGNED_ZERO_CODE
        return TensorSpec((groups * QUANT_GROUP_SIZE,), torch.uint8, zero), TensorSpec((groups,), torch.float32)

    def part(self, index: int, part: slice) -> slice:
        """Return whole groups."""
        groups = slice(part.start // QUANT_GROUP_SIZE, -(-part.stop // QUANT_GROUP_SIZE))
        return groups if index else slice(groups.start * QUANT_GROUP_SIZE, groups.stop * QUANT_GROUP_SIZE)

    def load(self, stored: Sequence[Tensor], count: int) -> Tensor:
        """Decode by table lookup."""
        codes, scales = stored
        return dequantize(codes.view(-1, QUANT_GROUP_SIZE), scales, signed=self.signed).view(-1)[:count]

    def store(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Encode to nearest with a new scale per group."""
        codes, scales = stored
        padded_P = value_P
        if value_P.numel() < codes.numel():
            padded_P = value_P.new_zeros(codes.numel())
            padded_P[: value_P.numel()].copy_(value_P)
        new_codes, new_scales = quantize(padded_P.view(-1, QUANT_GROUP_SIZE), signed=self.signed)
        codes.copy_(new_codes.view(-1))
        scales.copy_(new_scales)


StateFormat = PlainState | DynamicInt8State
"""A format of state with one value per element of a parameter."""
STATE_FORMATS: dict[str, StateFormat] = {
    storage.name: storage
    for storage in (PlainState(), PlainState(torch.bfloat16), DynamicInt8State(True), DynamicInt8State(False))
}  # fmt: skip
"""State formats by name."""


def state_format(codec: Codec, num_elements: int, *, signed: bool) -> StateFormat:
    """Return the format of a plan's codec for a tensor of this size; raises ``ValueError`` for a codec that cannot."""
    match codec:
        case Codec.INT8_BLOCKS if num_elements >= SMALLEST_INT8_TENSOR:
            return DynamicInt8State(signed)
        case Codec.INT8_BLOCKS | Codec.FLOAT32 | Codec.ABSENT:
            return PlainState()
        case Codec.BFLOAT16:
            return PlainState(to_torch_dtype(codec))
    allowed = f"{Codec.FLOAT32}, {Codec.BFLOAT16}, {Codec.INT8_BLOCKS}"
    raise ValueError(f"optim_state.codec: {codec} cannot hold optimizer state; allowed: {allowed}")


def round_stochastically(value_P: Tensor, target_P: Tensor) -> None:
    """Write fp32 values to bfloat16: add 16 random bits below the kept ones, then cut. A NaN's bits may change."""
    # CUDA's NaN has every lower bit set: a carry out of them would make it -0.0, and a fault would vanish.
    value_P.view(torch.int32).clamp_(max=_QUIET_NAN)
    noise_P = random_bits(value_P)
    upper_P = noise_P.add_(value_P.view(torch.int32)).bitwise_right_shift_(16)
    target_P.view(torch.int16).copy_(upper_P)


# ---- codes


@dataclass(frozen=True, slots=True)
class Int8Codes:
    """8-bit codes from -127 to 127, evenly spaced, and a float32 scale per 256 of them or per row."""

    is_symmetric: bool = True
    """Whether ranges are symmetric about zero; otherwise each 256 codes also have a float32 zero point."""
    shared_by: DynamicRange = DynamicRange.GROUP
    """What shares a range. A row's scales are (rows, 1); that of a whole matrix is repeated per 256 codes."""

    @property
    def name(self) -> str:
        """Name of the format in a checkpoint."""
        shared_by = "" if self.shared_by is DynamicRange.GROUP else f"_{self.shared_by}"
        return f"int8{'' if self.is_symmetric else '_affine'}{shared_by}"

    def specs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Return codes, scales, and zero points if asymmetric, of a matrix."""
        num_elements = prod(shape)
        by_row = self.shared_by is DynamicRange.ROW
        scales = (num_elements // shape[-1], 1) if by_row else (num_groups(num_elements),)
        groups = TensorSpec(scales, torch.float32)
        return TensorSpec((num_elements,), torch.int8), *([groups] if self.is_symmetric else [groups, groups])

    def encode(
        self, value_P: Tensor, stored: Sequence[Tensor], *, stochastic: bool = False, static: bool = False
    ) -> None:
        """Encode (P,) float32 values; new ranges unless static."""
        codes, scales, *middles = stored
        if self.shared_by is DynamicRange.ROW:
            assert not any((stochastic, static, middles)), "rows of codes beside a master or frozen"
            found, scales_R = quantize_rows(value_P.view(scales.numel(), -1), "int8")
            codes.copy_(found.view(-1))
            scales.copy_(scales_R[:, None])
            return
        of_tensor = self.shared_by is DynamicRange.TENSOR
        if middles:
            if not static:
                middles[0].copy_(_middles(value_P, of_tensor))
            value_P = value_P.clone()
            _add_to_groups(value_P, middles[0], -1.0)
        if of_tensor and not static:
            scale = torch.linalg.vector_norm(value_P, torch.inf) / LARGEST_CODE
            scales.copy_(torch.where(scale < SMALLEST_SCALE, 0.0, scale))
            static = True
        int8_quantize(value_P, codes, scales, stochastic=stochastic, static=static)

    def widen(self, stored: Sequence[Tensor], out_P: Tensor) -> None:
        """Dequantize in float32."""
        codes, scales, *middles = stored
        if self.shared_by is DynamicRange.ROW:
            torch.mul(codes.view(scales.numel(), -1), scales, out=out_P.view(scales.numel(), -1))
            return
        if not middles or out_P.dtype == torch.float32:
            int8_dequantize(codes, scales, out_P)
            if middles:
                _add_to_groups(out_P, middles[0], 1.0)
            return
        for part in parts(codes.numel()):
            value_P = torch.empty(part.stop - part.start, dtype=torch.float32, device=out_P.device)
            self.widen(weight_part(tuple(stored), part), value_P)
            out_P[part].copy_(value_P)


def _middles(value_P: Tensor, of_tensor: bool) -> Tensor:
    """Return the middle between the least and the largest value of each 256, (G,), or of all of them, ()."""
    if of_tensor:
        low, high = torch.aminmax(value_P)
        return low.mul(0.5).add(high, alpha=0.5)
    whole = value_P.numel() - value_P.numel() % GROUP_SIZE
    ranges = [torch.aminmax(value_P[:whole].view(-1, GROUP_SIZE), dim=1)]
    if whole < value_P.numel():
        ranges.append(torch.aminmax(value_P[whole:].view(1, -1), dim=1))
    return torch.cat([low.mul(0.5).add(high, alpha=0.5) for low, high in ranges])


def _add_to_groups(value_P: Tensor, added_G: Tensor, alpha: float) -> None:
    """Add ``alpha`` times a number of each 256 to them."""
    whole = value_P.numel() - value_P.numel() % GROUP_SIZE
    value_P[:whole].view(-1, GROUP_SIZE).add_(added_G[: whole // GROUP_SIZE, None], alpha=alpha)
    value_P[whole:].add_(added_G[whole // GROUP_SIZE :], alpha=alpha)


class Nf4Codes:
    """4-bit codes of normal quantiles with scales in 8 bits (2305.14314): 4.13 bits per value."""

    def specs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Return codes, codes of scales, their scales and the mean scale, of a matrix."""
        sizes = Nf4Sizes.of(prod(shape))
        codes, scale_codes = (TensorSpec((size,), torch.uint8) for size in (sizes.codes, sizes.scale_codes))
        return codes, scale_codes, TensorSpec((sizes.scales,), torch.float32), TensorSpec((1,), torch.float32)

    def encode(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Encode to the nearest quantiles."""
        codes, scale_codes, scales, mean = stored
        nf4_quantize(value_P, codes, scale_codes, scales, mean)

    def widen(self, stored: Sequence[Tensor], out_P: Tensor) -> None:
        """Dequantize by table lookup."""
        codes, scale_codes, scales, mean = stored
        nf4_dequantize(codes, scale_codes, scales, mean, out_P)


CodeFormat = Int8Codes | Nf4Codes
"""A format of matrices with fewer bits than the compute dtype."""
CODE_FORMATS: dict[Codec, CodeFormat] = {Codec.INT8_BLOCKS: Int8Codes(), Codec.NF4: Nf4Codes()}


def code_format(plan: PhasePlan) -> CodeFormat | None:
    """Return the format in which a plan stores matrices as codes; None where it stores values."""
    if plan.weight.codec is Codec.INT8_BLOCKS:
        return Int8Codes(plan.symmetric, plan.dynamic_range)
    return CODE_FORMATS.get(plan.weight.codec)


# ---- weights


class HasDtype(Protocol):
    """A tensor on any tier."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""


StoredWeight = tuple[Tensor, ...]
"""Stored tensors of a weight: its values, or int8 codes with a float32 scale per 256, and a zero point if
asymmetric."""


class WeightFormat:
    """Converts a stored weight and its master weight to the fp32 value that an update changes, and back."""

    in_place = False
    """Whether ``load`` returns a stored tensor itself, without a temporary."""
    reads_weight = True
    """Whether ``load`` reads the stored weight; otherwise updates need not fetch it."""
    master_dtype: torch.dtype | None = None
    """Dtype of the master weight; None: there is none."""
    rounds_stochastically = False
    """Whether there is no master, so that ``store`` (or the update itself) rounds stochastically."""
    is_coded = False
    """Whether it is stored as codes and scales."""
    needs_whole = False
    """Whether ``create`` and ``store`` need the whole weight, whose elements share a range."""
    saved_as = "float32"
    """What a checkpoint stores: the most exact values; codes if there are none; both if codes are kept too."""

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Write fp32 ``initial`` to ``weight``, rounded to nearest; return the master weight, or None."""
        weight[0].copy_(initial)
        return None

    def load(self, weight: StoredWeight, master_P: Tensor | None) -> Tensor:
        """Return the fp32 value, (P,)."""
        return weight[0].float()

    def store(self, value_P: Tensor, weight: StoredWeight, master_P: Tensor | None, *, nearest: bool = False) -> None:
        """Store an updated fp32 value; ``nearest``: round to nearest instead of stochastically."""


class ExactWeight(WeightFormat):
    """fp32 weight, updated in place."""

    in_place = True


class StochasticWeight(WeightFormat):
    """No master: each update is rounded stochastically, which preserves the mean (1710.03740)."""

    rounds_stochastically = True
    saved_as = "bfloat16"

    def store(self, value_P: Tensor, weight: StoredWeight, master_P: Tensor | None, *, nearest: bool = False) -> None:
        """Round stochastically, or to nearest."""
        if nearest:
            weight[0].copy_(value_P)
        else:
            round_stochastically(value_P, weight[0])


class Split16Master(WeightFormat):
    """bfloat16 weight (upper 16 bits, rounded to nearest) plus an int16 with the rest of the fp32 master.

    Exact ties round away from zero, not to even as in torch: 16 bits represent one side of a tie only.
    """

    master_dtype = torch.int16

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Split ``initial``; return the lower half."""
        master_weight = torch.empty(initial.shape, dtype=torch.int16, device=initial.device)
        self.store(initial, weight, master_weight)
        return master_weight

    def load(self, weight: StoredWeight, master_P: Tensor | None) -> Tensor:
        """Join both halves exactly."""
        assert master_P is not None, "a split16 weight without a master"
        bits_P = weight[0].view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits_P.add_(master_P).view(torch.float32)

    def store(self, value_P: Tensor, weight: StoredWeight, master_P: Tensor | None, *, nearest: bool = False) -> None:
        """Split the value."""
        assert master_P is not None, "a split16 weight without a master"
        bits_P = value_P.view(torch.int32)
        upper_P = bits_P.add(1 << 15).bitwise_right_shift_(16)
        weight[0].view(torch.int16).copy_(upper_P)
        master_P.copy_(bits_P - upper_P.bitwise_left_shift_(16))


class Int8Weight(WeightFormat):
    """int8 weight without a master: each update is rounded stochastically to the grid.

    Args:
        codes: Format of the codes.
        static_scales: Keep the initial ranges, which are twice as wide as the initial values need.
    """

    is_coded = True

    def __init__(self, codes: Int8Codes, *, static_scales: bool) -> None:
        self.codes = codes
        self.needs_whole = codes.shared_by is not DynamicRange.GROUP
        self._is_static = static_scales
        self.rounds_stochastically = codes == Int8Codes() and not static_scales  # the op takes new scales
        self.saved_as = f"{codes.name}{'_static' if static_scales else ''}"

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Round to nearest once."""
        self.codes.encode(initial.view(-1), weight)
        if self._is_static:
            weight[1].mul_(_STATIC_ROOM)
            self.codes.encode(initial.view(-1), weight, static=True)
        return None

    def load(self, weight: StoredWeight, master_P: Tensor | None) -> Tensor:
        """Dequantize exactly."""
        value_P = torch.empty(weight[0].shape, dtype=torch.float32, device=weight[0].device)
        self.codes.widen(weight, value_P)
        return value_P

    def store(self, value_P: Tensor, weight: StoredWeight, master_P: Tensor | None, *, nearest: bool = False) -> None:
        """Round to the grid of a new range, or of the static one."""
        self.codes.encode(value_P.view(-1), weight, stochastic=not nearest, static=self._is_static)


class _OfMaster(WeightFormat):
    """fp32 master weight; the stored weight is its rounding to nearest."""

    in_place = True
    reads_weight = False
    master_dtype = torch.float32

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        super().create(initial, weight)
        return initial

    def load(self, weight: StoredWeight, master_P: Tensor | None) -> Tensor:
        assert master_P is not None, "a weight without its float32 master"
        return master_P

    def store(self, value_P: Tensor, weight: StoredWeight, master_P: Tensor | None, *, nearest: bool = False) -> None:
        super().store(value_P, weight, master_P, nearest=True)


class Float32Master(_OfMaster, StochasticWeight):
    """fp32 master weight; the stored weight is its rounding to nearest."""

    rounds_stochastically = False
    saved_as = "float32"


class Int8OfMaster(_OfMaster, Int8Weight):
    """fp32 master weight; the int8 codes are its rounding to nearest."""

    def __init__(self, codes: Int8Codes, *, static_scales: bool) -> None:
        super().__init__(codes, static_scales=static_scales)
        self.rounds_stochastically = False
        self.saved_as = f"float32_{self.saved_as}"


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Weight formats of a plan: one for values, one for codes."""

    values: WeightFormat
    codes: WeightFormat

    def of(self, weight: Sequence[HasDtype]) -> WeightFormat:
        """Return the format of a stored weight: int8 tensors are codes."""
        return self.codes if weight[0].dtype == torch.int8 else self.values

    @property
    def reads_weight(self) -> bool:
        """Whether an update must fetch the stored weight."""
        return self.values.reads_weight or self.codes.reads_weight


def weight_formats(plan: PhasePlan) -> WeightFormats:
    """Return the formats of a plan's weight and master cells; raises ``ValueError`` for a pair that would lose updates.

    Embedding, head, vectors and adapters are stored in the compute dtype even if matrices are int8.
    """
    master, codes = plan.master.codec, code_format(plan)
    if plan.adapter_rank or not isinstance(codes, Int8Codes):
        values = _value_format(plan.compute_dtype if plan.adapter_rank else plan.weight.codec, master)
        return WeightFormats(values, values)
    exact = plan.compute_dtype is Codec.FLOAT32
    values = ExactWeight() if exact else _value_format(plan.compute_dtype, master)
    make = Int8OfMaster if master is Codec.FLOAT32 else Int8Weight
    return WeightFormats(values, make(codes, static_scales=plan.static_scales))


_VALUE_FORMATS: dict[tuple[Codec, Codec], WeightFormat] = {
    (Codec.FLOAT32, Codec.ABSENT): ExactWeight(),
    (Codec.BFLOAT16, Codec.FLOAT32): Float32Master(),
    (Codec.BFLOAT16, Codec.SPLIT16): Split16Master(),
    (Codec.BFLOAT16, Codec.ABSENT): StochasticWeight(),
    (Codec.FLOAT16, Codec.FLOAT32): Float32Master(),
}
"""Formats by codec of the weight and of the master."""


def _value_format(weight: Codec, master: Codec) -> WeightFormat:
    if (weight, master) not in _VALUE_FORMATS:
        raise ValueError(
            f"master.codec: {master} cannot accompany {weight} weights; allowed: absent with float32 weights, "
            f"float32, split16 or absent with bfloat16 weights, float32 with float16 weights"
        )
    return _VALUE_FORMATS[weight, master]


def weight_part(weight: StoredWeight, part: slice) -> StoredWeight:
    """Return a range of a stored weight's elements; for codes it must start at a multiple of 256."""
    values, *scales = weight
    if part == slice(0, values.numel()) and values.dim() == 1:
        return weight
    if any(scale.dim() > 1 for scale in scales):  # of rows, which a range may cut: a master has the values
        return (values.view(-1)[part],)
    groups = slice(part.start // GROUP_SIZE, -(-part.stop // GROUP_SIZE))
    return values.view(-1)[part], *(scale[groups] for scale in scales)

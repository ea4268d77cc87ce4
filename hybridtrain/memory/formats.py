# ruff: noqa: ARG002  a format ignores what of the protocol it has no use for
"""How exact float32 values are stored: optimizer state by itself, a weight together with what completes it.

One file for every format. A format works on flat slices of P elements that begin at a multiple of 256, loads them as
float32 and stores them back; nothing else in the project knows what is inside. Stochastic rounding draws from the
device's global random stream, which the caller seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, dequantize, quantize
from hybridkernels.int8_quantize import GROUP_SIZE, int8_dequantize, int8_quantize, num_groups
from hybridkernels.nf4 import Nf4Sizes, nf4_dequantize, nf4_quantize
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.plan.placement import Codec

SLICE_ELEMENTS = 1 << 23
"""Elements worked on at a time: at 32 MiB a tensor the bus is at its full rate, and temporaries stay small. Slices that
share random numbers have this size wherever they live, so that placement changes no number."""
SMALLEST_INT8_TENSOR = 4096
"""Elements below which state stays float32, as in bitsandbytes: norms and biases are cheap to keep exact."""
_STATIC_ROOM = 2.0
_QUIET_NAN = 0x7FC00000
_SIGNED_ZERO_CODE, _UNSIGNED_ZERO_CODE = 127, 0
"""Codes of the value zero in the dynamic maps."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one stored tensor looks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: int = 0
    """Stored value of the number zero."""


# ---- optimizer state


class StateFormat(Protocol):
    """Stores state that has one value per element of a parameter."""

    @property
    def name(self) -> str:
        """Of the format in a saved state, one of ``STATE_FORMATS``."""
        ...

    def specs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Return the stored tensors of a parameter of this shape."""
        ...

    def part(self, index: int, part: slice) -> slice:
        """Return the range of stored tensor ``index`` that belongs to a range of the parameter's elements."""
        ...

    def load(self, stored: Sequence[Tensor], count: int) -> Tensor:
        """Return the (count,) float32 values: the stored tensor itself where it is float32."""
        ...

    def store(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Write values that ``load`` returned and the caller changed."""
        ...


@dataclass(frozen=True, slots=True)
class PlainState:
    """One tensor of floating point values; fewer than 32 bits are rounded stochastically (1710.03740)."""

    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """Of the element type."""
        return str(self.dtype).removeprefix("torch.")

    def specs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Return one tensor of the parameter's shape."""
        return (TensorSpec(shape, self.dtype),)

    def part(self, index: int, part: slice) -> slice:
        """Return the same range."""
        return part

    def load(self, stored: Sequence[Tensor], count: int) -> Tensor:
        """Widen."""
        return stored[0].float()

    def store(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Round, or do nothing where the stored tensor itself was changed."""
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
        """With the map that codes are looked up in."""
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
        """Look the codes up."""
        codes, scales = stored
        return dequantize(codes.view(-1, QUANT_GROUP_SIZE), scales, signed=self.signed).view(-1)[:count]

    def store(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Take the nearest code of each value under a new scale per group."""
        codes, scales = stored
        padded_P = value_P
        if value_P.numel() < codes.numel():
            padded_P = value_P.new_zeros(codes.numel())
            padded_P[: value_P.numel()].copy_(value_P)
        new_codes, new_scales = quantize(padded_P.view(-1, QUANT_GROUP_SIZE), signed=self.signed)
        codes.copy_(new_codes.view(-1))
        scales.copy_(new_scales)


STATE_FORMATS: dict[str, StateFormat] = {
    storage.name: storage
    for storage in (PlainState(), PlainState(torch.bfloat16), DynamicInt8State(True), DynamicInt8State(False))
}  # fmt: skip
"""By name."""


def state_format(codec: Codec, num_elements: int, *, signed: bool) -> StateFormat:
    """Return the format of a plan's codec for a tensor of this size; raises ``ValueError`` for one that holds none."""
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
    noise_P = torch.randint(0, 1 << 16, value_P.shape, dtype=torch.int32, device=value_P.device)
    upper_P = noise_P.add_(value_P.view(torch.int32)).bitwise_right_shift_(16)
    target_P.view(torch.int16).copy_(upper_P)


# ---- codes


class CodeFormat(Protocol):
    """How matrices are stored in fewer bits than they are computed with."""

    def specs(self, num_elements: int) -> tuple[TensorSpec, ...]:
        """Return the stored tensors of a matrix of this many elements."""
        ...

    def encode(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Write the nearest codes of (P,) float32 values, all of a matrix."""
        ...

    def widen(self, stored: Sequence[Tensor], out_P: Tensor) -> None:
        """Write the values that codes stand for, (P,), in the dtype of ``out_P``."""
        ...


class Int8Codes:
    """Symmetric 8-bit codes and a float32 scale per 256 of them."""

    def specs(self, num_elements: int) -> tuple[TensorSpec, ...]:
        """Return codes and scales."""
        return TensorSpec((num_elements,), torch.int8), TensorSpec((num_groups(num_elements),), torch.float32)

    def encode(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Round to nearest."""
        codes, scales = stored
        int8_quantize(value_P, codes, scales, stochastic=False)

    def widen(self, stored: Sequence[Tensor], out_P: Tensor) -> None:
        """Multiply."""
        codes, scales = stored
        int8_dequantize(codes, scales, out_P)


class Nf4Codes:
    """4-bit codes of normal quantiles with scales in 8 bits (2305.14314): 4.13 bits a value."""

    def specs(self, num_elements: int) -> tuple[TensorSpec, ...]:
        """Return codes, codes of scales, their scales and the mean scale."""
        sizes = Nf4Sizes.of(num_elements)
        codes, scale_codes = (TensorSpec((size,), torch.uint8) for size in (sizes.codes, sizes.scale_codes))
        return codes, scale_codes, TensorSpec((sizes.scales,), torch.float32), TensorSpec((1,), torch.float32)

    def encode(self, value_P: Tensor, stored: Sequence[Tensor]) -> None:
        """Take the nearest quantiles."""
        codes, scale_codes, scales, mean = stored
        nf4_quantize(value_P, codes, scale_codes, scales, mean)

    def widen(self, stored: Sequence[Tensor], out_P: Tensor) -> None:
        """Look up and multiply."""
        codes, scale_codes, scales, mean = stored
        nf4_dequantize(codes, scale_codes, scales, mean, out_P)


CODE_FORMATS: dict[Codec, CodeFormat] = {Codec.INT8_BLOCKS: Int8Codes(), Codec.NF4: Nf4Codes()}


# ---- weights


class Typed(Protocol):
    """A tensor, on the device or below it."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...


StoredWeight = tuple[Tensor, ...]
"""What is stored of a weight: its values, or int8 codes and one float32 scale per 256 of them."""


class WeightFormat(Protocol):
    """Turns what is stored of a weight, and its companion, into the fp32 value that an update changes, and back."""

    in_place: bool
    """``load`` returns a stored tensor itself, so nothing temporary is made."""
    reads_weight: bool
    """``load`` looks at the stored weight; without that it need not be fetched for an update."""
    companion_dtype: torch.dtype | None
    """Of what is kept beside the weight; None: nothing is."""
    rounds_stochastically: bool
    """The weight is all there is, so ``store`` rounds by chance; an update may do so itself."""
    is_coded: bool
    """Stored as codes and scales."""
    saved_as: str
    """What of it a saved state holds: the widest values, codes where there are none, both where codes are kept too."""

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Write fp32 ``initial`` into ``weight``; return the companion to keep, or None."""
        ...

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Return the fp32 value, (P,)."""
        ...

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Write an updated fp32 value back; ``nearest``: where it would be rounded stochastically, round to nearest."""
        ...


class _ValueFormat:
    """A weight stored as values."""

    in_place = False
    reads_weight = True
    companion_dtype: torch.dtype | None = None
    rounds_stochastically = False
    is_coded = False
    saved_as = "float32"


class ExactWeight(_ValueFormat):
    """The weight is fp32 itself."""

    in_place = True

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Copy; nothing is kept beside the weight."""
        weight[0].copy_(initial)
        return None

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Return the weight."""
        return weight[0]

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Do nothing: the weight was updated in place."""


class Float32Master(_ValueFormat):
    """A separate fp32 copy; the weight is its rounding to nearest."""

    in_place = True
    reads_weight = False
    companion_dtype: torch.dtype | None = torch.float32

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Keep ``initial`` itself."""
        weight[0].copy_(initial)
        return initial

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Return the copy."""
        assert companion_P is not None, "a float32 master is always kept"
        return companion_P

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Round the copy into the weight."""
        weight[0].copy_(value_P)


class Split16Master(_ValueFormat):
    """The bfloat16 weight holds the upper 16 bits, rounded to nearest; an int16 holds what the lower ones add.

    Exact ties round away from zero, where torch's own cast rounds to even: 16 bits hold one side of a tie only.
    """

    companion_dtype: torch.dtype | None = torch.int16

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Split ``initial``; keep the lower half."""
        companion = torch.empty(initial.shape, dtype=torch.int16, device=initial.device)
        self.store(initial, weight, companion)
        return companion

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Join both halves; exact."""
        assert companion_P is not None, "a split master is always kept"
        bits_P = weight[0].view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits_P.add_(companion_P).view(torch.float32)

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Split the value."""
        assert companion_P is not None, "a split master is always kept"
        bits_P = value_P.view(torch.int32)
        upper_P = bits_P.add(1 << 15).bitwise_right_shift_(16)
        weight[0].view(torch.int16).copy_(upper_P)
        companion_P.copy_(bits_P - upper_P.bitwise_left_shift_(16))


class StochasticWeight(_ValueFormat):
    """The weight is all there is: each update is rounded up or down with the odds that keep its mean (1710.03740)."""

    rounds_stochastically = True
    saved_as = "bfloat16"

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Round to nearest once."""
        weight[0].copy_(initial)
        return None

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Widen the weight."""
        return weight[0].float()

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Round up or down."""
        if nearest:
            weight[0].copy_(value_P)
        else:
            round_stochastically(value_P, weight[0])


class Int8Weight:
    """int8 codes are all there is: each update is rounded stochastically onto their grid.

    Args:
        static_scales: Keep the scales of the first values, which get twice the room that those need.
    """

    in_place = False
    reads_weight = True
    companion_dtype: torch.dtype | None = None
    is_coded = True

    def __init__(self, *, static_scales: bool) -> None:
        self.is_static = static_scales
        self.rounds_stochastically = not static_scales  # the op takes new scales
        self.saved_as = "int8_static" if static_scales else "int8"

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Round to nearest once."""
        codes, scales = weight
        int8_quantize(initial.view(-1), codes, scales, stochastic=False)
        if self.is_static:
            scales.mul_(_STATIC_ROOM)
            int8_quantize(initial.view(-1), codes, scales, stochastic=False, static=True)
        return None

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Widen the codes; exact."""
        codes, scales = weight
        value_P = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        int8_dequantize(codes, scales, value_P)
        return value_P

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Round onto the grid, which a new scale per group spans unless scales are static."""
        int8_quantize(value_P, *weight, stochastic=not nearest, static=self.is_static)


class Int8OfMaster(Int8Weight):
    """A separate fp32 copy; the int8 codes are its rounding to nearest."""

    reads_weight = False
    companion_dtype: torch.dtype | None = torch.float32

    def __init__(self, *, static_scales: bool) -> None:
        super().__init__(static_scales=static_scales)
        self.rounds_stochastically = False
        self.saved_as = f"float32_{self.saved_as}"

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Keep ``initial`` itself."""
        super().create(initial, weight)
        return initial

    def load(self, weight: StoredWeight, companion_P: Tensor | None) -> Tensor:
        """Return the copy."""
        assert companion_P is not None, "a float32 master is always kept"
        return companion_P

    def store(
        self, value_P: Tensor, weight: StoredWeight, companion_P: Tensor | None, *, nearest: bool = False
    ) -> None:
        """Round the copy into the codes."""
        int8_quantize(value_P, *weight, stochastic=False, static=self.is_static)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of one plan: one for weights stored as values, one for those stored as codes."""

    values: WeightFormat
    codes: WeightFormat

    def of(self, weight: Sequence[Typed]) -> WeightFormat:
        """Return the one that suits how a weight is stored: codes are int8."""
        return self.codes if weight[0].dtype == torch.int8 else self.values

    @property
    def reads_weight(self) -> bool:
        """Whether an update must fetch what is stored."""
        return self.values.reads_weight or self.codes.reads_weight


def adapter_formats(master: Codec, compute_dtype: Codec) -> WeightFormats:
    """Return the formats of what is trained beside frozen weights: values of the compute dtype."""
    values = ExactWeight() if compute_dtype is Codec.FLOAT32 else _value_format(compute_dtype, master)
    return WeightFormats(values, values)


def weight_formats(weight: Codec, master: Codec, compute_dtype: Codec, *, static_scales: bool = False) -> WeightFormats:
    """Return the formats for a plan's weight and master cells; raises ``ValueError`` for a pair that loses updates.

    Embedding, head and vectors are stored in the compute dtype even where matrices are int8.
    """
    if weight is not Codec.INT8_BLOCKS:
        values = _value_format(weight, master)
        return WeightFormats(values, values)
    codes: dict[Codec, WeightFormat] = {
        Codec.FLOAT32: Int8OfMaster(static_scales=static_scales),
        Codec.ABSENT: Int8Weight(static_scales=static_scales),
    }
    if master not in codes:
        raise ValueError(f"master.codec: {master} cannot accompany int8 weights; allowed: float32, absent")
    exact = compute_dtype is Codec.FLOAT32
    return WeightFormats(ExactWeight() if exact else _value_format(compute_dtype, master), codes[master])


def _value_format(weight: Codec, master: Codec) -> WeightFormat:
    if weight is Codec.FLOAT32 and master is Codec.ABSENT:
        return ExactWeight()
    if weight is Codec.BFLOAT16:
        formats: dict[Codec, WeightFormat] = {
            Codec.FLOAT32: Float32Master(),
            Codec.SPLIT16: Split16Master(),
            Codec.ABSENT: StochasticWeight(),
        }
        if master in formats:
            return formats[master]
    if weight is Codec.FLOAT16 and master is Codec.FLOAT32:
        return Float32Master()
    raise ValueError(
        f"master.codec: {master} cannot accompany {weight} weights; allowed: absent with float32 weights, "
        f"float32, split16 or absent with bfloat16 weights, float32 with float16 weights"
    )


def weight_part(weight: StoredWeight, part: slice) -> StoredWeight:
    """Return a range of a stored weight's elements; of codes it must begin at a multiple of 256."""
    values, *scales = weight
    if part == slice(0, values.numel()) and values.dim() == 1:
        return weight
    groups = slice(part.start // GROUP_SIZE, -(-part.stop // GROUP_SIZE))
    return values.view(-1)[part], *(scale[groups] for scale in scales)

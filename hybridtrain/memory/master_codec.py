# ruff: noqa: ARG002  a codec ignores what of the protocol it has no use for
"""How the exact value of a weight is kept beside the weight the forward pass reads. P elements of one flat slice."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE, int8_dequantize, int8_quantize
from hybridtrain.plan.placement import Codec

_STATIC_ROOM = 2.0
_QUIET_NAN = 0x7FC00000

StoredWeight = tuple[Tensor, ...]
"""What is stored of a weight: its values, or int8 codes and one float32 scale per 256 of them."""


def weight_part(weight: StoredWeight, part: slice) -> StoredWeight:
    """Return a range of a stored weight's elements; of codes it must begin at a multiple of 256."""
    if len(weight) == 1:
        return (weight[0].view(-1)[part],)
    codes, scales = weight
    return codes[part], scales[part.start // GROUP_SIZE : -(-part.stop // GROUP_SIZE)]


class MasterCodec(Protocol):
    """Turns a stored weight and its companion into the fp32 value that the update changes, and back."""

    in_place: bool
    """``load`` returns a stored tensor itself, so nothing temporary is made."""
    reads_weight: bool
    """``load`` looks at the stored weight; without that it need not be fetched for an update."""
    companion_dtype: torch.dtype | None
    """Of what is kept beside the weight; None: nothing is."""
    rounds_stochastically: bool
    """The weight is all there is, so ``store`` rounds by chance; an update may do so itself."""

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


class ExactWeight:
    """The weight is fp32 itself."""

    in_place = True
    reads_weight = True
    companion_dtype: torch.dtype | None = None
    rounds_stochastically = False

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


class Float32Master:
    """A separate fp32 copy; the weight is its rounding to nearest."""

    in_place = True
    reads_weight = False
    companion_dtype: torch.dtype | None = torch.float32
    rounds_stochastically = False

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


class Split16Master:
    """The bfloat16 weight holds the upper 16 bits, rounded to nearest; an int16 holds what the lower ones add.

    Exact ties round away from zero, where torch's own cast rounds to even: 16 bits hold one side of a tie only.
    """

    in_place = False
    reads_weight = True
    companion_dtype: torch.dtype | None = torch.int16
    rounds_stochastically = False

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


class StochasticWeight:
    """The weight is all there is: each update is rounded up or down with the odds that keep its mean (1710.03740).

    The random bits come from the device's global stream, which the caller seeds.
    """

    in_place = False
    reads_weight = True
    companion_dtype: torch.dtype | None = None
    rounds_stochastically = True

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


def round_stochastically(value_P: Tensor, target_P: Tensor) -> None:
    """Write fp32 values to bfloat16: add 16 random bits below the kept ones, then cut. A NaN's bits may change."""
    # CUDA's NaN has every lower bit set: a carry out of them would make it -0.0, and a fault would vanish.
    value_P.view(torch.int32).clamp_(max=_QUIET_NAN)
    noise_P = torch.randint(0, 1 << 16, value_P.shape, dtype=torch.int32, device=value_P.device)
    upper_P = noise_P.add_(value_P.view(torch.int32)).bitwise_right_shift_(16)
    target_P.view(torch.int16).copy_(upper_P)


class Int8Weight:
    """int8 codes are all there is: each update is rounded stochastically onto their grid."""

    in_place = False
    reads_weight = True
    companion_dtype: torch.dtype | None = None

    def __init__(self, *, static_scales: bool) -> None:
        self.is_static = static_scales
        self.rounds_stochastically = not static_scales  # the op takes new scales

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Round to nearest once; static scales get twice the room that the first values need."""
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


class Int8OfMaster:
    """A separate fp32 copy; the int8 codes are its rounding to nearest."""

    in_place = False
    reads_weight = False
    companion_dtype: torch.dtype | None = torch.float32
    rounds_stochastically = False

    def __init__(self, *, static_scales: bool) -> None:
        self.is_static = static_scales

    def create(self, initial: Tensor, weight: StoredWeight) -> Tensor | None:
        """Keep ``initial`` itself."""
        Int8Weight(static_scales=self.is_static).create(initial, weight)
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
class MasterCodecs:
    """The codecs of one plan: one for weights stored as values, one for those stored as codes."""

    values: MasterCodec
    codes: MasterCodec

    def of(self, weight: StoredWeight) -> MasterCodec:
        """Return the one that suits how ``weight`` is stored."""
        return self.values if len(weight) == 1 else self.codes

    @property
    def reads_weight(self) -> bool:
        """Whether an update must fetch what is stored."""
        return self.values.reads_weight or self.codes.reads_weight


def master_codecs(weight: Codec, master: Codec, compute_dtype: Codec, *, static_scales: bool = False) -> MasterCodecs:
    """Return the codecs for a plan's weight and master cells; raises ``ValueError`` for a pair that loses updates.

    Embedding, head and vectors are stored in the compute dtype even where matrices are int8.
    """
    if weight is not Codec.INT8_BLOCKS:
        values = _value_codec(weight, master)
        return MasterCodecs(values, values)
    codes: dict[Codec, MasterCodec] = {
        Codec.FLOAT32: Int8OfMaster(static_scales=static_scales),
        Codec.ABSENT: Int8Weight(static_scales=static_scales),
    }
    if master not in codes:
        raise ValueError(f"master.codec: {master} cannot accompany int8 weights; allowed: float32, absent")
    exact = compute_dtype is Codec.FLOAT32
    return MasterCodecs(ExactWeight() if exact else _value_codec(compute_dtype, master), codes[master])


def _value_codec(weight: Codec, master: Codec) -> MasterCodec:
    if weight is Codec.FLOAT32 and master is Codec.ABSENT:
        return ExactWeight()
    if weight is Codec.BFLOAT16:
        codecs: dict[Codec, MasterCodec] = {
            Codec.FLOAT32: Float32Master(),
            Codec.SPLIT16: Split16Master(),
            Codec.ABSENT: StochasticWeight(),
        }
        if master in codecs:
            return codecs[master]
    raise ValueError(
        f"master.codec: {master} cannot accompany {weight} weights; allowed: absent with float32 weights, "
        f"float32, split16 or absent with bfloat16 weights"
    )

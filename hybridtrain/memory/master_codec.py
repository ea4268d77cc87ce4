"""How the exact value of a weight is kept beside the weight the forward pass reads. P elements of one flat slice."""

from typing import Protocol

import torch
from torch import Tensor

from hybridtrain.plan.tensor_class import Codec


class MasterCodec(Protocol):
    """Turns a stored weight and its companion into the fp32 value that the update changes, and back."""

    in_place: bool
    """``load`` returns a stored tensor itself, so nothing temporary is made."""

    def create(self, initial: Tensor, weight: Tensor) -> Tensor | None:
        """Write fp32 ``initial`` into ``weight``; return the companion to keep, or None."""
        ...

    def load(self, weight_P: Tensor, companion_P: Tensor | None) -> Tensor:
        """Return the fp32 value, (P,)."""
        ...

    def store(self, value_P: Tensor, weight_P: Tensor, companion_P: Tensor | None) -> None:
        """Write an updated fp32 value back."""
        ...


class ExactWeight:
    """The weight is fp32 itself."""

    in_place = True

    def create(self, initial: Tensor, weight: Tensor) -> Tensor | None:
        """Copy; nothing is kept beside the weight."""
        weight.copy_(initial)
        return None

    def load(self, weight_P: Tensor, companion_P: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the weight."""
        return weight_P

    def store(self, value_P: Tensor, weight_P: Tensor, companion_P: Tensor | None) -> None:
        """Do nothing: the weight was updated in place."""


class Float32Master:
    """A separate fp32 copy; the weight is its rounding to nearest."""

    in_place = True

    def create(self, initial: Tensor, weight: Tensor) -> Tensor | None:
        """Keep ``initial`` itself."""
        weight.copy_(initial)
        return initial

    def load(self, weight_P: Tensor, companion_P: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the copy."""
        assert companion_P is not None, "a float32 master is always kept"
        return companion_P

    def store(self, value_P: Tensor, weight_P: Tensor, companion_P: Tensor | None) -> None:  # noqa: ARG002
        """Round the copy into the weight."""
        weight_P.copy_(value_P)


class Split16Master:
    """The bfloat16 weight holds the upper 16 bits, rounded to nearest; an int16 holds what the lower ones add.

    Exact ties round away from zero, where torch's own cast rounds to even: 16 bits hold one side of a tie only.
    """

    in_place = False

    def create(self, initial: Tensor, weight: Tensor) -> Tensor | None:
        """Split ``initial``; keep the lower half."""
        companion = torch.empty(initial.shape, dtype=torch.int16, device=initial.device)
        self.store(initial, weight, companion)
        return companion

    def load(self, weight_P: Tensor, companion_P: Tensor | None) -> Tensor:
        """Join both halves; exact."""
        assert companion_P is not None, "a split master is always kept"
        bits_P = weight_P.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits_P.add_(companion_P).view(torch.float32)

    def store(self, value_P: Tensor, weight_P: Tensor, companion_P: Tensor | None) -> None:
        """Split the value."""
        assert companion_P is not None, "a split master is always kept"
        bits_P = value_P.view(torch.int32)
        upper_P = bits_P.add(1 << 15).bitwise_right_shift_(16)
        weight_P.view(torch.int16).copy_(upper_P)
        companion_P.copy_(bits_P - upper_P.bitwise_left_shift_(16))


class StochasticWeight:
    """The weight is all there is: each update is rounded up or down with the odds that keep its mean (1710.03740).

    The random bits come from the device's global stream, which the caller seeds.
    """

    in_place = False

    def create(self, initial: Tensor, weight: Tensor) -> Tensor | None:
        """Round to nearest once."""
        weight.copy_(initial)
        return None

    def load(self, weight_P: Tensor, companion_P: Tensor | None) -> Tensor:  # noqa: ARG002
        """Widen the weight."""
        return weight_P.float()

    def store(self, value_P: Tensor, weight_P: Tensor, companion_P: Tensor | None) -> None:  # noqa: ARG002
        """Add 16 random bits below the kept ones, then cut."""
        noise_P = torch.randint(0, 1 << 16, value_P.shape, dtype=torch.int32, device=value_P.device)
        upper_P = noise_P.add_(value_P.view(torch.int32)).bitwise_right_shift_(16)
        weight_P.view(torch.int16).copy_(upper_P)


def master_codec(weight: Codec, master: Codec) -> MasterCodec:
    """Return the codec for a plan's weight and master cells; raises ``ValueError`` for a pair that loses updates."""
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

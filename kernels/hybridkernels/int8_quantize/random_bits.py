"""Random bits for stochastic rounding to 16 bits, from the device's global generator."""

from torch import Tensor, empty, int32, int64, randint

from hybridkernels.define_op import define_op

_BITS = 16


def _cpu(_on: Tensor, count: int) -> Tensor:
    # torch draws one number after the other on the CPU, in int64 as fast as in int32.
    words = empty(count + count % 2, dtype=int32)
    words.view(int64).random_(-(1 << 63), None)
    return words[:count].bitwise_and_((1 << _BITS) - 1)


def _cuda(on: Tensor, count: int) -> Tensor:
    return randint(0, 1 << _BITS, (count,), dtype=int32, device=on.device)


_random_bits = define_op("random_bits", _cpu, cuda=_cuda, fake=lambda on, count: on.new_empty(count, dtype=int32))


def random_bits(like: Tensor) -> Tensor:
    """Return uniform int32 in [0, 2^16) of the shape and on the device of ``like``, of which no value is read."""
    bits: Tensor = _random_bits(like.view(-1)[:0], like.numel())
    return bits.view(like.shape)

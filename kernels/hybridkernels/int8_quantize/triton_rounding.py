"""Parts of kernels that write 8-bit codes or stochastically rounded values. R groups (rows) of S = 256 elements.

Random words are those of ``philox.random_words``; codes and scales are those of ``int8_quantize_reference`` to the bit.
"""

import triton
import triton.language as tl

from hybridkernels.int8_quantize import philox, reference

GROUP = tl.constexpr(reference.GROUP_SIZE)
_LARGEST_CODE = tl.constexpr(float(reference.LARGEST_CODE))
_SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)
_NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)
_UNUSED_BITS = tl.constexpr(32 - philox.UNIFORM_BITS)
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22 it leaves the integer nearest to it, ties to even, in the low bits: a conversion
instruction has a quarter of an addition's throughput."""


@triton.jit
def group_rows(first_row, ROWS: tl.constexpr):
    """Return the numbers of the rows, (R,), and of their elements, (R, S), in 64 bits."""
    rows = first_row.to(tl.int64) + tl.arange(0, ROWS)
    return rows, rows[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def random_words(seed, first_row, ROWS: tl.constexpr):
    """Return the (R, S) random uint32 words of whole rows; one Philox counter gives four neighbours theirs."""
    rows = first_row.to(tl.int64) + tl.arange(0, ROWS)
    counters = rows[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
    word0, word1, word2, word3 = tl.randint4x(seed, counters, _NUM_ROUNDS)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3)).to(tl.uint32, bitcast=True)


@triton.jit
def group_absmax(values):
    """Return the (R,) largest magnitudes of float32 (R, S); NaN where a row holds one.

    Floats without a sign are ordered as their bits are, NaN last, so an integer maximum keeps what a float one drops.
    """
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def dynamic_scales(absmax):
    """Return absmax / 127, correctly rounded; 0 below the smallest normal number."""
    scales = tl.math.div_rn(absmax, tl.full(absmax.shape, _LARGEST_CODE, tl.float32))
    return tl.where(scales < _SMALLEST_SCALE, 0.0, scales)


@triton.jit
def group_codes(values, scales, words, STOCHASTIC: tl.constexpr):
    """Return the (R, S) int8 codes of float32 values; ``words`` are read in stochastic rounding only."""
    usable = (scales >= _SMALLEST_SCALE) & (scales < float("inf"))
    inverse = tl.math.div_rn(tl.full(scales.shape, 1.0, tl.float32), tl.where(usable, scales, 1.0))
    steps = tl.where(usable[:, None], values, 0.0) * inverse[:, None]
    # A usable scale may be given, so that some value of its row is beyond 127 of them, but then none is NaN.
    steps = tl.minimum(tl.maximum(steps, -_LARGEST_CODE), _LARGEST_CODE)
    if STOCHASTIC:
        floor = tl.floor(steps)
        # The upper bits of a word behind the point of a number in [1, 2).
        uniform = ((words >> _UNUSED_BITS) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        steps = tl.where(steps - floor > uniform, floor + 1.0, floor)
    return (steps + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def bfloat16_stochastic(values, words):
    """Return float32 values as bfloat16, up or down so that the mean is kept: 16 random bits are added, then cut.

    NaN stays NaN, whose bits the sum could wrap into those of zero.
    """
    bits = values.to(tl.uint32, bitcast=True) + (words >> 16)
    upper = tl.where(values == values, bits >> 16, 0x7FC0)  # noqa: PLR0124  false of NaN alone
    return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)

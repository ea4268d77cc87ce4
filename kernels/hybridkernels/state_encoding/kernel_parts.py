"""Parts of the Triton kernels in triton_kernel.py: sums over one chunk of moments, and features of one state."""

import triton
import triton.language as tl

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE
from hybridkernels.state_encoding import reference

FLOAT32, BFLOAT16, CODES = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""Kinds of stored values, as bits; 0 where there are none."""
MATRIX_WIDTH = 32
"""Columns of a history's matrix: its ratios and slopes, then its means, then zeros."""

_GROUP_SIZE = tl.constexpr(QUANT_GROUP_SIZE)
_LEVEL_STEPS = tl.constexpr(reference.LEVEL_STEPS)
_SMALLEST, _LARGEST = tl.constexpr(reference.SMALLEST), tl.constexpr(reference.LARGEST)
_LIMIT = tl.constexpr(reference.LIMIT)


@triton.jit
def _values_of(
    address, scale_address, kind, map_ptr, start, count, KINDS: tl.constexpr, CHUNK: tl.constexpr, IS_FULL: tl.constexpr
):
    """Return a chunk of stored values by groups of 256, float32, zeros from ``count`` on and where there are none.

    KINDS are those of the whole launch. A chunk that is full is loaded without a mask: nothing is known of the mask of
    another, so that its elements are loaded one by one.
    """
    groups = tl.arange(0, CHUNK // _GROUP_SIZE)
    offsets = groups[:, None] * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)[None, :]
    inside = None if IS_FULL else offsets < count
    values = tl.zeros([CHUNK // _GROUP_SIZE, _GROUP_SIZE], tl.float32)
    if FLOAT32 & KINDS and kind == FLOAT32:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + start
        values = tl.load(pointer + offsets, mask=inside, other=None if IS_FULL else 0.0)
    if BFLOAT16 & KINDS and kind == BFLOAT16:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + start
        values = tl.load(pointer + offsets, mask=inside, other=None if IS_FULL else 0.0).to(tl.float32)
    if CODES & KINDS and kind == CODES:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16) + start
        codes = tl.load(pointer + offsets, mask=inside, other=None if IS_FULL else 0).to(tl.int32)
        scale_ptr = scale_address.to(tl.pointer_type(tl.float32)) + start // _GROUP_SIZE
        has_group = None if IS_FULL else groups * _GROUP_SIZE < count
        scale = tl.load(scale_ptr + groups, mask=has_group, other=None if IS_FULL else 0.0)
        values = tl.load(map_ptr + codes) * scale[:, None]
        if not IS_FULL:  # code 0 is a number of the signed map
            values = tl.where(inside, values, 0.0)
    return values


@triton.jit
def sums_of_chunk(
    row, start, count, signed_map, unsigned_map, slots, KINDS: tl.constexpr, CHUNK: tl.constexpr, IS_FULL: tl.constexpr
):
    """Return the sums of one chunk in their places, (8,), float32, see ``moment_statistics``; ``row`` is a table's."""
    m = _values_of(
        tl.load(row + 2), tl.load(row + 5), tl.load(row + 8), signed_map, start, count, KINDS, CHUNK, IS_FULL
    )
    v = _values_of(
        tl.load(row + 3), tl.load(row + 6), tl.load(row + 9), unsigned_map, start, count, KINDS, CHUNK, IS_FULL
    )
    slow = _values_of(
        tl.load(row + 4), tl.load(row + 7), tl.load(row + 10), signed_map, start, count, KINDS, CHUNK, IS_FULL
    )
    sums = tl.where(slots == 1, tl.sum(m), 0.0) + tl.where(slots == 2, tl.sum(m * m), 0.0)
    sums += tl.where(slots == 3, tl.sum(v), 0.0) + tl.where(slots == 4, tl.sum(v * v), 0.0)
    return sums + tl.where(slots == 5, tl.sum(slow * slow), 0.0) + tl.where(slots == 6, tl.sum(m * slow), 0.0)


@triton.jit
def two_sum(total, error, value):
    """Add to a sum whose rounding errors are kept: Knuth's exact sum of two numbers, which no order of them spoils."""
    added = total + value
    taken = added - total
    return added, error + ((total - (added - taken)) + (value - taken))


@triton.jit
def part_of(sums, slots, SLOT: tl.constexpr):
    """Return one of the sums."""
    return tl.sum(tl.where(slots == SLOT, sums, 0.0), 0)


@triton.jit
def write_history(
    values_ptr, matrix_ptr, features_ptr, GAIN: tl.constexpr, LOG_GAIN: tl.constexpr, STEPS: tl.constexpr,
    LINEAR: tl.constexpr, WINDOWS: tl.constexpr, MATRIX_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a history's level, its LINEAR ratios and slopes and the deviations in its WINDOWS."""
    steps, columns = tl.arange(0, STEPS), tl.arange(0, MATRIX_WIDTH)
    value_S = tl.load(values_ptr + steps)
    value_S = tl.where(value_S != value_S, _LARGEST, value_S)  # noqa: PLR0124  NaN
    log_S = tl.log(tl.minimum(tl.maximum(value_S, _SMALLEST), _LARGEST))
    level = tl.sum(tl.where(steps >= STEPS - _LEVEL_STEPS, log_S, 0.0), 0) / _LEVEL_STEPS
    near_S = log_S - level  # so that squares do not cancel
    matrix_SP = tl.load(matrix_ptr + steps[:, None] * MATRIX_WIDTH + columns[None, :])
    product_P = tl.sum(near_S[:, None] * matrix_SP, 0)
    square_P = tl.sum((near_S * near_S)[:, None] * matrix_SP, 0)
    deviation_P = 0.5 * tl.log(tl.maximum(square_P - product_P * product_P, 1e-8)) + LOG_GAIN
    feature_P = tl.where(columns < LINEAR, product_P * GAIN, deviation_P)
    tl.store(features_ptr, _bounded(level))
    tl.store(features_ptr + 1 + columns, _bounded(feature_P), mask=columns < LINEAR + WINDOWS)


@triton.jit
def write_scalars(m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine, scalars_ptr, phases_ptr, features_ptr):
    """Write the features of moments, rates and phases; a factor of 0 stands for what is not known."""
    small = 1e-20
    log_root = tl.log(tl.sqrt(tl.maximum(v_mean, 0.0)) + small)
    known = (v_mean > 0).to(tl.float32)
    tl.store(features_ptr, _bounded((tl.log(m_rms + small) - log_root) * known))
    tl.store(features_ptr + 1, _bounded(log_root / 4 * known))
    tl.store(features_ptr + 2, _bounded((tl.log(v_rms + small) - tl.log(v_mean + small)) / 2 * known))
    tl.store(features_ptr + 3, _bounded(m_mean / (m_rms + small) * known))
    has_slow = (slow_rms > 0).to(tl.float32)
    tl.store(features_ptr + 4, _bounded((tl.log(slow_rms + small) - log_root) * known * has_slow))
    tl.store(features_ptr + 5, _bounded(slow_cosine))
    lr, first_power = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    second_power, position = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    effective = lr * tl.sqrt(_at_least(1 - second_power, 1e-6)) / _at_least(1 - first_power, 1e-6)
    tl.store(features_ptr + 6, _bounded((tl.log(_at_least(lr, _SMALLEST)) + 7) / 2))
    tl.store(features_ptr + 7, _bounded((tl.log(_at_least(effective, _SMALLEST)) + 7) / 2))
    tl.store(features_ptr + 8, _bounded(first_power))
    tl.store(features_ptr + 9, _bounded(second_power))
    tl.store(features_ptr + 10, _bounded(position))
    phases = tl.arange(0, 4)
    tl.store(features_ptr + 11 + phases, _bounded(tl.load(phases_ptr + phases)))


@triton.jit
def _at_least(x, floor):
    """Return max(x, floor); NaN stays NaN."""
    return tl.where(x < floor, floor, x)


@triton.jit
def _bounded(x):
    x = tl.where(x != x, 0.0, x)  # noqa: PLR0124  NaN
    return tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT)

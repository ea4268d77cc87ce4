"""State encoding in one launch: programs stride over the chunks of all moments, the last to finish makes the features.

Every moment is read once, 16 bytes per thread at a time. Sums are float32 within a chunk of 2048 elements, where they
are added as a tree, and beyond it pairs of float32, value and rounding error: as good as float64, which consumer cards
do at a 64th of the speed. Each program writes its pair; the last to finish, known by an integer counter, adds
them in float64 in the order of the programs: results do not depend on which one that was.

Legend: reference.py.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, map_values
from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.state_encoding import reference
from hybridkernels.state_encoding.moments import NUM_COLUMNS, Moments, aligned, moment_table
from hybridkernels.triton_launch import multiprocessors

CHUNK, TAIL = 2048, 256
"""Elements: of a chunk, 16 a thread, which is one 16-byte load of codes, two of bfloat16 and four of float32; of the
parts of what is left of a tensor."""
NUM_WARPS = 4
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Resident ones, by registers; 32 to 96 KiB are on their way to a multiprocessor at once."""
RUN_TIME = ("num_pieces", "num_elements", "num_slow", "num_states", "num_programs")
"""Integers for whose values no kernel of their own is built."""
_PARTIALS = 16
"""Of one program: 8 sums and their rounding errors."""
_FLOAT32, _BFLOAT16, _CODES = map(tl.constexpr, (1, 2, 4))
"""Kinds of stored values, as bits; 0 where there are none."""
_WIDTH = tl.constexpr(32)
"""Columns of a history's matrix: its ratios and slopes, then its means, then zeros."""
_COLUMNS, _GROUP_SIZE, _LEVEL_STEPS = map(tl.constexpr, (NUM_COLUMNS, QUANT_GROUP_SIZE, reference.LEVEL_STEPS))
_LOSS_STEPS, _NORM_STEPS = map(tl.constexpr, (reference.LOSS_STEPS, reference.GRAD_NORM_STEPS))
_LOSS_WINDOWS, _NORM_WINDOWS = (tl.constexpr(reference.num_windows(steps)) for steps in (256, 64))
_LOSS_LINEAR, _NORM_LINEAR = (tl.constexpr(reference.num_linear(steps)) for steps in (256, 64))
_NUM_FEATURES, _NUM_MOMENTS = map(tl.constexpr, (reference.NUM_FEATURES, reference.NUM_MOMENT_STATISTICS))
_NUM_SCALARS, _NUM_PHASES = map(tl.constexpr, (reference.NUM_SCALARS, reference.NUM_PHASES))
_SMALLEST, _LARGEST, _LIMIT = map(tl.constexpr, (reference.SMALLEST, reference.LARGEST, reference.LIMIT))
_GAIN, _LOG_GAIN = map(tl.constexpr, (reference.RATIO_GAIN, math.log(reference.RATIO_GAIN)))
_SMALLEST_SIZE, _MOMENTS_AT = map(tl.constexpr, (reference.SMALLEST_SIZE, reference.FIRST_MOMENT_FEATURE))


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
    if _FLOAT32 & KINDS and kind == _FLOAT32:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + start
        values = tl.load(pointer + offsets, mask=inside, other=None if IS_FULL else 0.0)
    if _BFLOAT16 & KINDS and kind == _BFLOAT16:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + start
        values = tl.load(pointer + offsets, mask=inside, other=None if IS_FULL else 0.0).to(tl.float32)
    if _CODES & KINDS and kind == _CODES:
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
def _sums_of_chunk(
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
def _two_sum(total, error, value):
    """Add to a sum whose rounding errors are kept: Knuth's exact sum of two numbers, which no order of them spoils."""
    added = total + value
    taken = added - total
    return added, error + ((total - (added - taken)) + (value - taken))


@triton.jit
def _part_of(sums, slots, SLOT: tl.constexpr):
    """Return one of the sums."""
    return tl.sum(tl.where(slots == SLOT, sums, 0.0), 0)


@triton.jit
def _write_history(
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
def _write_scalars(m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine, scalars_ptr, phases_ptr, features_ptr):
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


@triton.jit
def _write_state(losses, norms, loss_matrix, norm_matrix, features):
    """Write the features of one state's histories."""
    _write_history(losses, loss_matrix, features, _GAIN, _LOG_GAIN, _LOSS_STEPS, _LOSS_LINEAR, _LOSS_WINDOWS, _WIDTH)
    norm_features = features + 1 + _LOSS_LINEAR + _LOSS_WINDOWS
    _write_history(norms, norm_matrix, norm_features, 1.0, 0.0, _NORM_STEPS, _NORM_LINEAR, _NORM_WINDOWS, _WIDTH)


@triton.jit
def encode_state_kernel(losses, norms, moments, scalars, phases, loss_matrix, norm_matrix, features):
    """Write the features of one state of N; grid (N,)."""
    state = tl.program_id(0).to(tl.int64)
    own = features + state * _NUM_FEATURES
    _write_state(losses + state * _LOSS_STEPS, norms + state * _NORM_STEPS, loss_matrix, norm_matrix, own)
    moments += state * _NUM_MOMENTS
    _write_scalars(
        tl.load(moments), tl.load(moments + 1), tl.load(moments + 2), tl.load(moments + 3), tl.load(moments + 4),
        tl.load(moments + 5), scalars + state * _NUM_SCALARS, phases + state * _NUM_PHASES, own + _MOMENTS_AT,
    )  # fmt: skip


@triton.jit
def _sum_moments(
    table, num_pieces, num_programs, signed_map, unsigned_map,
    KINDS: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Return this program's sums and their rounding errors, both (8,)."""
    program, slots = tl.program_id(0), tl.arange(0, 8)
    total, error = tl.zeros([8], tl.float32), tl.zeros([8], tl.float32)
    for piece in range(num_pieces):
        row = table + piece * _COLUMNS
        numel, before = tl.load(row), tl.load(row + 1)
        num_full = numel // CHUNK
        # Chunks of all pieces are dealt out in turn; ``before`` of them were dealt out already.
        first = (program + num_programs - before % num_programs) % num_programs
        for chunk in range(first, num_full, num_programs):
            sums = _sums_of_chunk(row, chunk * CHUNK, CHUNK, signed_map, unsigned_map, slots, KINDS, CHUNK, True)
            total, error = _two_sum(total, error, sums)
        if num_full % num_programs == first:
            # The rest, element by element and so in smaller parts: fewer registers.
            for start in range(num_full * CHUNK, numel, TAIL):
                sums = _sums_of_chunk(row, start, numel - start, signed_map, unsigned_map, slots, KINDS, TAIL, False)
                total, error = _two_sum(total, error, sums)
    return total, error


@triton.jit
def _add_partials(partials, num_programs, BLOCK: tl.constexpr, PARTIALS: tl.constexpr):
    """Return the sums over all programs in their order: (8,), float64."""
    programs, slots = tl.arange(0, BLOCK), tl.arange(0, 8)
    sums = tl.zeros([8], tl.float64)
    for start in range(0, num_programs, BLOCK):
        rows = (start + programs)[:, None]
        # Past the first-level cache, which may hold what was there before.
        place = partials + rows * PARTIALS + slots[None, :]
        total = tl.load(place, mask=rows < num_programs, other=0.0, cache_modifier=".cg")
        error = tl.load(place + 8, mask=rows < num_programs, other=0.0, cache_modifier=".cg")
        error = tl.where(error != error, 0.0, error)  # noqa: PLR0124  NaN, which an infinite total has for its error
        sums += tl.sum(total.to(tl.float64) + error.to(tl.float64), 0)
    return sums


@triton.jit
def _write_states(sums, losses, norms, scalars, phases, loss_matrix, norm_matrix, features, num_states):
    """Write the features of all states from one set of sums."""
    slots = tl.arange(0, 8)
    count = tl.maximum(_part_of(sums, slots, 0), 1.0)
    m_square, slow_square = _part_of(sums, slots, 2), _part_of(sums, slots, 5)
    size = tl.sqrt(m_square * slow_square)
    cosine = tl.where(size > _SMALLEST_SIZE, _part_of(sums, slots, 6) / tl.maximum(size, _SMALLEST_SIZE), 0.0)
    m_mean, v_mean = (
        (_part_of(sums, slots, 1) / count).to(tl.float32),
        (_part_of(sums, slots, 3) / count).to(tl.float32),
    )
    m_rms, v_rms = tl.sqrt(m_square / count), tl.sqrt(_part_of(sums, slots, 4) / count)
    slow_rms = tl.sqrt(slow_square / count)
    for state in range(num_states):
        own = features + state * _NUM_FEATURES
        _write_state(losses + state * _LOSS_STEPS, norms + state * _NORM_STEPS, loss_matrix, norm_matrix, own)
        _write_scalars(
            m_mean, m_rms.to(tl.float32), v_mean, v_rms.to(tl.float32), slow_rms.to(tl.float32), cosine.to(tl.float32),
            scalars + state * _NUM_SCALARS, phases + state * _NUM_PHASES, own + _MOMENTS_AT,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUN_TIME)
def training_state_kernel(
    table, signed_map, unsigned_map, partials, counter, sums_out, losses, norms, scalars, phases, loss_matrix,
    norm_matrix, features, num_pieces, num_elements, num_slow, num_states, num_programs,
    KINDS: tl.constexpr, HAS_STATES: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """Write the sums over all moments and, with HAS_STATES, the features of N states; grid (num_programs,)."""
    slots = tl.arange(0, 8)
    total, error = _sum_moments(table, num_pieces, num_programs, signed_map, unsigned_map, KINDS, CHUNK, TAIL)
    own = partials + tl.program_id(0) * PARTIALS
    tl.store(own + slots, total)
    tl.store(own + 8 + slots, error)
    tl.debug_barrier()  # all of the program has written before it counts itself
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_programs - 1:
        sums = _add_partials(partials, num_programs, BLOCK, PARTIALS)
        sums += tl.where(slots == 0, num_elements.to(tl.float64), 0.0)
        sums += tl.where(slots == 7, num_slow.to(tl.float64), 0.0)
        tl.store(sums_out + slots, sums)
        if HAS_STATES:
            _write_states(sums, losses, norms, scalars, phases, loss_matrix, norm_matrix, features, num_states)


def encode_state_triton(
    loss_history_NS: Tensor, grad_norm_history_NS: Tensor, moments_NM: Tensor, scalars_NC: Tensor, phases_NH: Tensor
) -> Tensor:
    """Return the features of N states, (N, F), float32; see ``encode_state``."""
    num_states, device = loss_history_NS.shape[0], loss_history_NS.device
    features = torch.empty(num_states, reference.NUM_FEATURES, device=device)
    if num_states:  # CUDA refuses an empty grid
        inputs = _plain(loss_history_NS, grad_norm_history_NS, moments_NM, scalars_NC, phases_NH)
        with torch.cuda.device_of(loss_history_NS):
            encode_state_kernel[(num_states,)](*inputs, *kernel_matrices(device), features, num_warps=NUM_WARPS)
    return features


def moment_statistics_triton(moments: Sequence[Moments]) -> Tensor:
    """Return the sums over all moments, (8,), float64; see ``moment_statistics``."""
    return _launch(moments, None)[1]


def encode_training_state_triton(
    moments: Sequence[Moments], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,
    phases_NH: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the features of N states and the sums; see ``encode_training_state``."""
    return _launch(moments, (loss_history_NS, grad_norm_history_NS, scalars_NC, phases_NH))


def kernel_constants(kinds: int, *, has_states: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments; ``kinds`` are those of a table."""
    return {"KINDS": kinds, "HAS_STATES": has_states, "CHUNK": CHUNK, "TAIL": TAIL, "BLOCK": 64, "PARTIALS": _PARTIALS}


def _launch(moments: Sequence[Moments], states: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
    moments = aligned(moments)
    table, device = moment_table(moments, CHUNK), moments[0].device
    num_states = 0 if states is None else states[0].shape[0]
    features = torch.empty(num_states, reference.NUM_FEATURES, device=device)
    sums = torch.empty(8, dtype=torch.float64, device=device)
    num_programs = max(1, min(table.num_chunks, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)))
    partials = torch.empty(num_programs, _PARTIALS, device=device)
    signed_map, unsigned_map = (map_values(device, signed=signed) for signed in (True, False))
    # Without states, tensors that no one reads.
    inputs = (features,) * 4 if states is None else _plain(*states)
    finished = torch.zeros(1, dtype=torch.int32, device=device)  # of this launch alone: streams and graphs overlap
    with torch.cuda.device_of(sums):
        training_state_kernel[(num_programs,)](
            table.rows, signed_map, unsigned_map, partials, finished, sums, *inputs,
            *kernel_matrices(device), features, len(moments), table.num_elements, table.num_slow, num_states,
            num_programs, **kernel_constants(table.kinds, has_states=num_states > 0), num_warps=NUM_WARPS,
        )  # fmt: skip
    return features, sums


def _plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.float().contiguous() for tensor in tensors)


@cache
def kernel_matrices(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each history's matrix to ratios, slopes and means: (S, 32), the columns past them zero."""
    both = []
    for steps in (reference.LOSS_STEPS, reference.GRAD_NORM_STEPS):
        columns = torch.cat(reference.history_matrices(steps, device), 1)
        both.append(torch.nn.functional.pad(columns, (0, _WIDTH.value - columns.shape[1])).contiguous())
    return both[0], both[1]


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return features alone, and sums with and without them by kinds of moments.

    Kinds are those of all moments of a model: with an 8-bit optimizer small tensors stay float32, and histories have a
    codec of their own.
    """
    kinds = {"fp32": 1, "bf16": 2, "fp32_and_bf16": 3, "fp32_and_codes": 5, "all": 7}
    types = {"table": "*i64", "counter": "*i32", "sums_out": "*fp64", **dict.fromkeys(RUN_TIME, "i32")}
    alone = CompileCase.of("state_encoding/encode_state", encode_state_kernel, {}, {}, num_warps=NUM_WARPS)
    return [alone] + [
        CompileCase.of(
            f"state_encoding/{'training_state' if has_states else 'moment_statistics'}/{name}",
            training_state_kernel,
            types,
            kernel_constants(bits, has_states=has_states),
            unaligned=frozenset(RUN_TIME),
            num_warps=NUM_WARPS,
        )
        for name, bits in kinds.items()
        for has_states in (False, True)
    ]

"""State encoding in one launch: programs stride over the chunks of all moments, the last to finish makes the features.

Every moment is read once, 16 bytes a thread at a time. Sums are float32 within a chunk of 2048 elements, where they are
added as a tree, and beyond it pairs of float32, value and rounding error: as good as float64, which consumer cards do
at a 64th of the speed. Each program writes its pair; the one that finishes last, which an integer counter tells, adds
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

from hybridkernels.adamw_int8.dynamic_map import map_values
from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.state_encoding import kernel_parts, reference
from hybridkernels.state_encoding.kernel_parts import part_of, sums_of_chunk, two_sum, write_history, write_scalars
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
_COLUMNS = tl.constexpr(NUM_COLUMNS)
_LOSS_STEPS, _NORM_STEPS = tl.constexpr(reference.LOSS_STEPS), tl.constexpr(reference.GRAD_NORM_STEPS)
_WIDTH = tl.constexpr(kernel_parts.MATRIX_WIDTH)
_NUM_FEATURES, _NUM_MOMENTS = tl.constexpr(reference.NUM_FEATURES), tl.constexpr(reference.NUM_MOMENT_STATISTICS)
_NUM_SCALARS, _NUM_PHASES = tl.constexpr(reference.NUM_SCALARS), tl.constexpr(reference.NUM_PHASES)
_SMALLEST_SIZE = tl.constexpr(reference.SMALLEST_SIZE)
_GAIN, _LOG_GAIN = tl.constexpr(reference.RATIO_GAIN), tl.constexpr(math.log(reference.RATIO_GAIN))
_LOSS_WINDOWS, _NORM_WINDOWS = (tl.constexpr(reference.num_windows(steps)) for steps in (256, 64))
_LOSS_LINEAR, _NORM_LINEAR = (tl.constexpr(reference.num_linear(steps)) for steps in (256, 64))
_MOMENTS_AT = tl.constexpr(reference.FIRST_MOMENT_FEATURE)


@triton.jit
def _write_state(losses, norms, loss_matrix, norm_matrix, features):
    """Write the features of one state's histories."""
    write_history(losses, loss_matrix, features, _GAIN, _LOG_GAIN, _LOSS_STEPS, _LOSS_LINEAR, _LOSS_WINDOWS, _WIDTH)
    norm_features = features + 1 + _LOSS_LINEAR + _LOSS_WINDOWS
    write_history(norms, norm_matrix, norm_features, 1.0, 0.0, _NORM_STEPS, _NORM_LINEAR, _NORM_WINDOWS, _WIDTH)


@triton.jit
def encode_state_kernel(losses, norms, moments, scalars, phases, loss_matrix, norm_matrix, features):
    """Write the features of one state of N; grid (N,)."""
    state = tl.program_id(0).to(tl.int64)
    own = features + state * _NUM_FEATURES
    _write_state(losses + state * _LOSS_STEPS, norms + state * _NORM_STEPS, loss_matrix, norm_matrix, own)
    moments += state * _NUM_MOMENTS
    write_scalars(
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
            found = sums_of_chunk(row, chunk * CHUNK, CHUNK, signed_map, unsigned_map, slots, KINDS, CHUNK, True)
            total, error = two_sum(total, error, found)
        if num_full % num_programs == first:
            # The rest, element by element and so in smaller parts: fewer registers.
            for start in range(num_full * CHUNK, numel, TAIL):
                found = sums_of_chunk(row, start, numel - start, signed_map, unsigned_map, slots, KINDS, TAIL, False)
                total, error = two_sum(total, error, found)
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
    count = tl.maximum(part_of(sums, slots, 0), 1.0)
    m_square, slow_square = part_of(sums, slots, 2), part_of(sums, slots, 5)
    size = tl.sqrt(m_square * slow_square)
    cosine = tl.where(size > _SMALLEST_SIZE, part_of(sums, slots, 6) / tl.maximum(size, _SMALLEST_SIZE), 0.0)
    m_mean, v_mean = (part_of(sums, slots, 1) / count).to(tl.float32), (part_of(sums, slots, 3) / count).to(tl.float32)
    m_rms, v_rms = tl.sqrt(m_square / count), tl.sqrt(part_of(sums, slots, 4) / count)
    slow_rms = tl.sqrt(slow_square / count)
    for state in range(num_states):
        own = features + state * _NUM_FEATURES
        _write_state(losses + state * _LOSS_STEPS, norms + state * _NORM_STEPS, loss_matrix, norm_matrix, own)
        write_scalars(
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
        both.append(torch.nn.functional.pad(columns, (0, kernel_parts.MATRIX_WIDTH - columns.shape[1])).contiguous())
    return both[0], both[1]


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return features alone, and sums with and without them by kinds of moments.

    Kinds are those of all moments of a model: with an 8-bit optimizer small tensors stay float32, and histories have a
    codec of their own.
    """
    kernel, names = training_state_kernel, {False: "moment_statistics", True: "training_state"}
    kinds = {"fp32": 1, "bf16": 2, "fp32_and_bf16": 3, "fp32_and_codes": 5, "all": 7}
    types = {"table": "*i64", "counter": "*i32", "sums_out": "*fp64", **dict.fromkeys(RUN_TIME, "i32")}
    cases = {
        f"{names[has_states]}/{name}": kernel_constants(bits, has_states=has_states)
        for name, bits in kinds.items()
        for has_states in (False, True)
    }
    alone = CompileCase(
        name="state_encoding/encode_state",
        kernel=encode_state_kernel,
        arguments=dict.fromkeys(encode_state_kernel.arg_names, "*fp32"),
        num_warps=NUM_WARPS,
    )
    return [alone] + [
        CompileCase(
            name=f"state_encoding/{name}",
            kernel=kernel,
            arguments={key: types.get(key, "*fp32") for key in kernel.arg_names if key not in constants},
            constants=constants,
            unaligned=frozenset(RUN_TIME),
            num_warps=NUM_WARPS,
        )
        for name, constants in cases.items()
    ]

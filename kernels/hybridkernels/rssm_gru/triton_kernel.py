"""Rollout of several ticks in one launch: a program computes one member and a few rows.

Rows are independent, so programs never wait for each other. What a tick reads is the member's weights, 2.3 MiB at the
predictor's sizes, from the second-level cache: they arrive through asynchronous copies, some tiles ahead of the
arithmetic. The row's state goes through global memory that only its program touches, and stays in the first-level
cache. Products are fp32 multiply-adds: a few rows would leave tensor cores idle, and TF32 would draw other classes.

A tick is a row of parts, each a function: what one writes for another to read lies in global memory, and between two
of them is a barrier. Pointers to weights are the member's own, pointers to states those of the program's first row;
``count`` rows follow each other.

Legend: reference.py. R rows of a program; I inputs and O outputs of an affine map.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.rssm_gru.reference import UNIFORM_SHARE
from hybridkernels.triton_launch import multiprocessors

NUM_WARPS = 8
NUM_STAGES = 3
TILES = {1: 8192, 4: 4096}
"""Elements of a weight tile by rows of a program: two tiles of 32 or 16 KiB are on their way at once; more of either
would spill registers. One row while each finds a multiprocessor of its own, then more, which share what is read."""


def row_block(num_members: int, num_rows: int, num_multiprocessors: int) -> int:
    """Return the rows of one program."""
    return min(TILES) if num_members * num_rows <= num_multiprocessors else max(TILES)


RUN_TIME = (
    "action_stride_s", "action_stride_e", "action_stride_b", "action_stride_a", "num_ticks", "num_members", "num_rows",
)  # fmt: skip
"""Integers for whose values no kernel of their own is built."""


@triton.jit
def _copy_rows(from_ptr, to_ptr, count, WIDTH: tl.constexpr):
    """Copy ``count`` rows of a power of two of elements."""
    columns = tl.arange(0, WIDTH)
    for row in range(count):
        tl.store(to_ptr + row * WIDTH + columns, tl.load(from_ptr + row * WIDTH + columns))


@triton.jit
def _affine(
    in_ptr, out_ptr, weight_ptr, bias_ptr, count,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDEST: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write in_RI @ weight_IO + bias_O to out_RO; all are contiguous, and WIDEST divides OUTPUTS."""
    BLOCK: tl.constexpr = min(WIDEST, TILE // INPUTS)
    rows, inputs = tl.arange(0, ROWS)[:, None], tl.arange(0, INPUTS)
    in_RI = tl.load(in_ptr + rows * INPUTS + inputs[None, :], mask=rows < count, other=0.0)
    for first in tl.range(0, OUTPUTS, BLOCK, num_stages=STAGES):
        outputs = first + tl.arange(0, BLOCK)
        weight_IO = tl.load(weight_ptr + inputs[:, None] * OUTPUTS + outputs[None, :])
        out_RO = tl.sum(in_RI[:, :, None] * weight_IO[None, :, :], 1) + tl.load(bias_ptr + outputs)[None, :]
        tl.store(out_ptr + rows * OUTPUTS + outputs[None, :], out_RO, mask=rows < count)


@triton.jit
def _mix(
    classes_ptr, actions_ptr, action_stride_b, action_stride_a, features_ptr, mixed_ptr, count, is_seen,
    mix_weight, mix_bias, action_weight, action_bias, seen_weight, seen_bias,
    CATEGORICALS: tl.constexpr, CLASSES: tl.constexpr, ACTIONS: tl.constexpr, FEATURES: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the GRU's input; FEATURES is 0 where nothing is ever seen."""
    widths, features = tl.arange(0, WIDTH), tl.arange(0, FEATURE_BLOCK)
    for row in range(count):
        mixed_D = _row_sum(classes_ptr + row * CATEGORICALS, mix_weight, CATEGORICALS, CLASSES, WIDTH)
        mixed_D += tl.load(mix_bias + widths) + tl.load(action_bias + widths)
        for number in tl.static_range(ACTIONS):
            action = tl.load(actions_ptr + row * action_stride_b + number * action_stride_a)
            mixed_D += action * tl.load(action_weight + number * WIDTH + widths)
        if FEATURES:
            inside = (features < FEATURES) & is_seen  # nothing is read in later ticks
            seen_F = tl.load(features_ptr + row * FEATURES + features, mask=inside, other=0.0)
            rows_FD = seen_weight + features[:, None] * WIDTH + widths[None, :]
            mixed_D += tl.sum(seen_F[:, None] * tl.load(rows_FD, mask=inside[:, None], other=0.0), 0)
            mixed_D += tl.load(seen_bias + widths, mask=(widths >= 0) & is_seen, other=0.0)
        tl.store(mixed_ptr + row * WIDTH + widths, mixed_D * _sigmoid(mixed_D))


@triton.jit
def _gate(input_gates_ptr, hidden_gates_ptr, hidden_ptr, count, HIDDEN: tl.constexpr):
    """Replace the hidden state by the next."""
    units = tl.arange(0, HIDDEN)
    for row in range(count):
        from_input = input_gates_ptr + row * 3 * HIDDEN + units
        from_hidden = hidden_gates_ptr + row * 3 * HIDDEN + units
        reset = _sigmoid(tl.load(from_input) + tl.load(from_hidden))
        update = _sigmoid(tl.load(from_input + HIDDEN) + tl.load(from_hidden + HIDDEN))
        new = _tanh(tl.load(from_input + 2 * HIDDEN) + reset * tl.load(from_hidden + 2 * HIDDEN))
        hidden = tl.load(hidden_ptr + row * HIDDEN + units)
        tl.store(hidden_ptr + row * HIDDEN + units, new + update * (hidden - new))


@triton.jit
def _draw(
    logits_ptr, uniforms_ptr, classes_ptr, count, CATEGORICALS: tl.constexpr, CLASSES: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """Write the classes that the uniform numbers fall to."""
    categoricals = tl.arange(0, CATEGORICALS)
    classes = tl.arange(0, CLASSES)[None, :]
    for row in range(count):
        logits_KC = tl.load(logits_ptr + (row * CATEGORICALS + categoricals)[:, None] * CLASSES + classes)
        power_KC = tl.exp(logits_KC - tl.max(logits_KC, 1)[:, None])
        share_K = (1.0 - UNIFORM) / tl.sum(power_KC, 1)
        cumulative_KC = tl.cumsum(power_KC * share_K[:, None] + UNIFORM / CLASSES, 1)
        uniforms_K = tl.load(uniforms_ptr + row * CATEGORICALS + categoricals)
        drawn_K = tl.sum((cumulative_KC < uniforms_K[:, None]).to(tl.int32), 1)
        drawn_K = tl.minimum(drawn_K, CLASSES - 1)  # rounding may leave the last sum below 1
        tl.store(classes_ptr + row * CATEGORICALS + categoricals, drawn_K.to(tl.int64))


@triton.jit
def _answer(
    classes_ptr, before_ptr, sample_weight, head_weight, head_bias, means_ptr, log_variances_ptr, count,
    CATEGORICALS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write means and log-variances; ``before`` holds what the hidden state adds to the head's hidden layer."""
    widths = tl.arange(0, WIDTH)
    for row in range(count):
        before_D = _row_sum(classes_ptr + row * CATEGORICALS, sample_weight, CATEGORICALS, CLASSES, WIDTH)
        before_D += tl.load(before_ptr + row * WIDTH + widths)
        hidden_D = before_D * _sigmoid(before_D)
        mean = tl.sum(hidden_D * tl.load(head_weight + 2 * widths), 0) + tl.load(head_bias)
        log_variance = tl.sum(hidden_D * tl.load(head_weight + 2 * widths + 1), 0) + tl.load(head_bias + 1)
        tl.store(means_ptr + row, mean)
        tl.store(log_variances_ptr + row, log_variance)


@triton.jit
def _row_sum(classes_ptr, weight_ptr, CATEGORICALS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the one-hot sample of one row times a matrix: the sum of one row of it per categorical."""
    categoricals, widths = tl.arange(0, CATEGORICALS), tl.arange(0, WIDTH)
    classes_K = tl.minimum(tl.maximum(tl.load(classes_ptr + categoricals), 0), CLASSES - 1).to(tl.int32)
    rows_K = categoricals * CLASSES + classes_K
    return tl.sum(tl.load(weight_ptr + rows_K[:, None] * WIDTH + widths[None, :]), 0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Return tanh(x) as 1 - 2 / (exp(2 x) + 1): to an ulp of 1 everywhere, and 1 where exp overflows."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit(do_not_specialize=RUN_TIME)
def rssm_rollout_kernel(
    initial_hidden, initial_classes, actions, uniforms, features,
    action_stride_s, action_stride_e, action_stride_b, action_stride_a,
    mix_weight, mix_bias, action_weight, action_bias, seen_weight, seen_bias, gru_input_weight, gru_input_bias,
    gru_hidden_weight, gru_hidden_bias, prior_weight, prior_bias, head_hidden_weight, head_hidden_bias, head_weight,
    head_bias,
    means, log_variances, hidden, classes, logits, scratch,
    num_ticks, num_members, num_rows,
    HIDDEN: tl.constexpr, CATEGORICALS: tl.constexpr, CLASSES: tl.constexpr, ACTIONS: tl.constexpr,
    FEATURES: tl.constexpr, FEATURE_BLOCK: tl.constexpr, WIDTH: tl.constexpr, UNIFORM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Follow the ticks of ROWS rows of one member; grid (E, ceil(B / ROWS)). All but the actions are contiguous.

    Hidden state, classes and logits are outputs and at once the state between ticks.
    """
    SAMPLE: tl.constexpr = CATEGORICALS * CLASSES
    GATES: tl.constexpr = 3 * HIDDEN
    member, first = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * ROWS
    count = tl.minimum(num_rows - first, ROWS).to(tl.int32)
    start, all_rows = member * num_rows + first, member * 0 + num_members * num_rows
    hidden += start * HIDDEN
    classes += start * CATEGORICALS
    logits += start * SAMPLE
    input_gates, hidden_gates = scratch + start * GATES, scratch + (all_rows + start) * GATES
    mixed = scratch + 2 * all_rows * GATES + start * WIDTH
    head_hidden_weight += member * (HIDDEN + SAMPLE) * WIDTH
    _copy_rows(initial_hidden + start * HIDDEN, hidden, count, HIDDEN)
    _copy_rows(initial_classes + start * CATEGORICALS, classes, count, CATEGORICALS)
    tl.debug_barrier()
    for tick in range(num_ticks):
        _mix(
            classes, actions + member * action_stride_e + first * action_stride_b, action_stride_b, action_stride_a,
            features + start * FEATURES, mixed, count, tick == 0,
            mix_weight + member * SAMPLE * WIDTH, mix_bias + member * WIDTH, action_weight + member * ACTIONS * WIDTH,
            action_bias + member * WIDTH, seen_weight + member * FEATURES * WIDTH, seen_bias + member * WIDTH,
            CATEGORICALS, CLASSES, ACTIONS, FEATURES, FEATURE_BLOCK, WIDTH,
        )  # fmt: skip
        tl.debug_barrier()
        weight, bias = gru_input_weight + member * WIDTH * GATES, gru_input_bias + member * GATES
        _affine(mixed, input_gates, weight, bias, count, ROWS, WIDTH, GATES, HIDDEN, TILE, STAGES)
        weight, bias = gru_hidden_weight + member * HIDDEN * GATES, gru_hidden_bias + member * GATES
        _affine(hidden, hidden_gates, weight, bias, count, ROWS, HIDDEN, GATES, HIDDEN, TILE, STAGES)
        tl.debug_barrier()
        _gate(input_gates, hidden_gates, hidden, count, HIDDEN)
        tl.debug_barrier()
        weight, bias = prior_weight + member * HIDDEN * SAMPLE, prior_bias + member * SAMPLE
        _affine(hidden, logits, weight, bias, count, ROWS, HIDDEN, SAMPLE, SAMPLE, TILE, STAGES)
        bias = head_hidden_bias + member * WIDTH
        _affine(hidden, mixed, head_hidden_weight, bias, count, ROWS, HIDDEN, WIDTH, WIDTH, TILE, STAGES)
        tl.debug_barrier()
        ticks_rows = all_rows * tick + start
        _draw(logits, uniforms + ticks_rows * CATEGORICALS, classes, count, CATEGORICALS, CLASSES, UNIFORM)
        tl.debug_barrier()
        _answer(
            classes, mixed, head_hidden_weight + HIDDEN * WIDTH, head_weight + member * 2 * WIDTH,
            head_bias + member * 2, means + ticks_rows, log_variances + ticks_rows, count, CATEGORICALS, CLASSES, WIDTH,
        )  # fmt: skip
        tl.debug_barrier()
        actions += action_stride_s


def kernel_constants(
    *, hidden: int, categoricals: int, classes: int, actions: int, features: int, width: int, rows: int
) -> dict[str, int | float]:
    """Return the compile-time arguments; ``features`` is 0 where nothing is seen."""
    return {
        "HIDDEN": hidden, "CATEGORICALS": categoricals, "CLASSES": classes, "ACTIONS": actions, "FEATURES": features,
        "FEATURE_BLOCK": triton.next_power_of_2(max(1, features)), "WIDTH": width, "UNIFORM": UNIFORM_SHARE,
        "ROWS": rows, "TILE": TILES[rows], "STAGES": NUM_STAGES,
    }  # fmt: skip


def rssm_rollout_triton(
    weights: Sequence[Tensor],
    hidden_EBH: Tensor,
    classes_EBK: Tensor,
    actions_SEBA: Tensor,
    uniforms_SEBK: Tensor,
    features_EBF: Tensor | None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return means, log-variances, hidden state, classes and logits; see ``rssm_rollout``.

    Weights are float32, in the order of ``op.WEIGHTS``; H, K, Z / K and D are powers of two of at least 16. ``rows``
    are those of a program; None: as many as suit the card.
    """
    (num_ticks, num_members, num_rows, num_actions), device = actions_SEBA.shape, hidden_EBH.device
    hidden, categoricals, (size, width) = hidden_EBH.shape[2], classes_EBK.shape[2], weights[0].shape[1:]
    means = torch.empty(num_ticks, num_members, num_rows, device=device)
    log_variances = torch.empty_like(means)
    hidden_out, classes_out = torch.empty_like(hidden_EBH.contiguous()), torch.empty_like(classes_EBK.contiguous())
    logits = torch.empty(num_members, num_rows, size, device=device)
    if means.numel():  # CUDA refuses an empty grid
        rows = rows or row_block(num_members, num_rows, multiprocessors(device))
        scratch = torch.empty(num_members * num_rows * (6 * hidden + width), device=device)
        features = hidden_EBH if features_EBF is None else features_EBF.contiguous()  # any tensor where none is read
        constants = kernel_constants(
            hidden=hidden, categoricals=categoricals, classes=size // categoricals, actions=num_actions,
            features=0 if features_EBF is None else features.shape[2], width=width, rows=rows,
        )  # fmt: skip
        with torch.cuda.device_of(hidden_EBH):
            rssm_rollout_kernel[(num_members, triton.cdiv(num_rows, rows))](
                hidden_EBH.contiguous(), classes_EBK.contiguous(), actions_SEBA, uniforms_SEBK.contiguous(), features,
                *actions_SEBA.stride(), *(weight.contiguous() for weight in weights),
                means, log_variances, hidden_out, classes_out, logits, scratch,
                num_ticks, num_members, num_rows, **constants, num_warps=NUM_WARPS,
            )  # fmt: skip
    return means, log_variances, hidden_out, classes_out, logits


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return the predictor's model by rows of a program, and by whether the first tick is seen."""
    sizes = {"hidden": 256, "categoricals": 32, "classes": 32, "actions": 4, "width": 64}  # of hybridtrain's rssm_cell
    types = dict.fromkeys(RUN_TIME, "i32") | dict.fromkeys(("initial_classes", "classes"), "*i64")
    return [
        CompileCase.of(
            f"rssm_gru/{rows}_rows/{'seen' if features else 'unseen'}",
            rssm_rollout_kernel,
            types,
            kernel_constants(**sizes, features=features, rows=rows),
            unaligned=frozenset(RUN_TIME),
            num_warps=NUM_WARPS,
        )
        for rows in TILES
        for features in (0, 51)
    ]

"""Parts of one tick for a few rows of one member, each a function of the Triton kernel in triton_kernel.py.

What a part writes for another to read lies in global memory; between two of them the kernel has a barrier. Pointers to
weights are the member's own, pointers to states those of the program's first row; ``count`` rows follow each other.

Legend: reference.py. R rows of a program; I inputs and O outputs of an affine map.
"""

import triton
import triton.language as tl


@triton.jit
def copy_rows(from_ptr, to_ptr, count, WIDTH: tl.constexpr):
    """Copy ``count`` rows of a power of two of elements."""
    columns = tl.arange(0, WIDTH)
    for row in range(count):
        tl.store(to_ptr + row * WIDTH + columns, tl.load(from_ptr + row * WIDTH + columns))


@triton.jit
def affine(
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
def mix(
    classes_ptr, actions_ptr, action_stride_b, action_stride_a, features_ptr, mixed_ptr, count, is_seen,
    mix_weight, mix_bias, action_weight, action_bias, seen_weight, seen_bias,
    CATEGORICALS: tl.constexpr, CLASSES: tl.constexpr, ACTIONS: tl.constexpr, FEATURES: tl.constexpr,
    FEATURE_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what the GRU takes in; FEATURES is 0 where nothing is ever seen."""
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
def gate(input_gates_ptr, hidden_gates_ptr, hidden_ptr, count, HIDDEN: tl.constexpr):
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
def draw(
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
def answer(
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

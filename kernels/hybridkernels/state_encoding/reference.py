"""State encoding in plain torch: two histories and some scalars to features of about unit size, and sums over moments.

Let x = ln(loss), oldest first, and the level = mean of the last 8 of x. Of every history the features are
    mean over steps [lag, lag + 8) back, less the level   (a lagged log-ratio)
    mean over the last w, less the level
    slope over the last w by least squares, times w       (what the trend makes of one window)
    ln of the standard deviation over the last w
and the level itself. Means and slopes are linear in x: one product with a constant matrix; the deviations are one more
with x^2. Values that are not finite count as the floor or ceiling of a float's logarithm, and every feature is clamped
to [-8, 8].

N states, S steps of a history, P features of one history, M moment statistics, C scalars, F features in all.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, map_values
from hybridkernels.state_encoding.moments import Moments, Stored

LOSS_STEPS, GRAD_NORM_STEPS = 256, 64
NUM_MOMENT_STATISTICS = 6
"""m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine; all zero where moments are not known."""
NUM_SCALARS = 4
"""lr, beta1^t, beta2^t, phase position in [0, 1]."""
NUM_PHASES = 4

LEVEL_STEPS = 8
_LAGS = {LOSS_STEPS: (8, 16, 32, 64, 128, 248), GRAD_NORM_STEPS: (8, 16, 32, 56)}
_WINDOWS = {LOSS_STEPS: (16, 32, 64, 128, 256), GRAD_NORM_STEPS: (16, 32, 64)}
SMALLEST, LARGEST = 1e-12, 1e12
LIMIT = 8.0
RATIO_GAIN = 10.0
"""Log-ratios of losses within a run are some hundredths; this brings them to unit size."""


def num_windows(steps: int) -> int:
    """Return the number of windows of a history of ``steps`` steps."""
    return len(_WINDOWS[steps])


def num_linear(steps: int) -> int:
    """Return the number of ratios and slopes of a history of ``steps`` steps."""
    return len(_LAGS[steps]) + 2 * len(_WINDOWS[steps])


FIRST_MOMENT_FEATURE = sum(1 + num_linear(steps) + num_windows(steps) for steps in (LOSS_STEPS, GRAD_NORM_STEPS))
"""Place of the first feature that is not of a history."""
NUM_FEATURES = FIRST_MOMENT_FEATURE + NUM_MOMENT_STATISTICS + NUM_SCALARS + 1 + NUM_PHASES


@lru_cache(maxsize=8)
def history_matrices(steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (S, lags + 2 windows) to ratios and slopes, and (S, windows) to means."""
    position_S = torch.arange(steps, dtype=torch.float64)
    back_S = steps - 1 - position_S
    level_S = (back_S < LEVEL_STEPS).double() / LEVEL_STEPS
    slopes, means = [], []
    ratios = [((back_S >= lag) & (back_S < lag + LEVEL_STEPS)).double() / LEVEL_STEPS - level_S for lag in _LAGS[steps]]
    for window in _WINDOWS[steps]:
        inside_S = (back_S < window).double()
        means.append(inside_S / window)
        ratios.append(means[-1] - level_S)
        centred_S = (position_S - (position_S * inside_S).sum() / window) * inside_S
        slopes.append(centred_S / centred_S.square().sum() * window)
    linear = torch.stack(ratios + slopes, 1).float().to(device)
    return linear, torch.stack(means, 1).float().to(device)


def _history_features(values_NS: Tensor, gain: float) -> Tensor:
    """Return (N, P): level, ratios and slopes times ``gain``, deviations."""
    log_NS = values_NS.float().nan_to_num(nan=LARGEST, posinf=LARGEST, neginf=SMALLEST).clamp(SMALLEST, LARGEST)
    log_NS = log_NS.log()
    linear, means = history_matrices(values_NS.shape[1], values_NS.device)
    level_N1 = log_NS[:, -LEVEL_STEPS:].mean(1, keepdim=True)
    # About the level, so that squares do not cancel.
    near_NS = log_NS - level_N1
    variance = (near_NS.square() @ means - (near_NS @ means).square()).clamp_min(1e-8)
    return torch.cat([level_N1, near_NS @ linear * gain, 0.5 * variance.log() + math.log(gain)], 1)


def _moment_features(moments_NM: Tensor) -> Tensor:
    """Return (N, 6): log sizes, signal-to-noise of the gradient, what the slow average adds; zeros when unknown."""
    m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine = moments_NM.float().unbind(1)
    root_v = v_mean.clamp_min(0).sqrt()
    known = (v_mean > 0).float()
    small = 1e-20
    features = [
        ((m_rms + small).log() - (root_v + small).log()) * known,
        (root_v + small).log() / 4 * known,
        ((v_rms + small).log() - (v_mean + small).log()) / 2 * known,
        m_mean / (m_rms + small) * known,
        ((slow_rms + small).log() - (root_v + small).log()) * known * (slow_rms > 0),
        slow_cosine,
    ]
    return torch.stack(features, 1)


def encode_state_reference(
    loss_history_NS: Tensor, grad_norm_history_NS: Tensor, moments_NM: Tensor, scalars_NC: Tensor, phases_NH: Tensor
) -> Tensor:
    """Return the features of N states, (N, F), float32, each in [-8, 8]; arguments are those of ``encode_state``."""
    lr, first_power, second_power, position = scalars_NC.float().unbind(1)
    # AdamW's bias corrections make lr sqrt(1 - b2^t) / (1 - b1^t) the effective rate.
    effective = lr * (1 - second_power).clamp_min(1e-6).sqrt() / (1 - first_power).clamp_min(1e-6)
    scalar_features = [
        (lr.clamp_min(SMALLEST).log() + 7) / 2, (effective.clamp_min(SMALLEST).log() + 7) / 2, first_power,
        second_power, position,
    ]  # fmt: skip
    features = [
        _history_features(loss_history_NS, RATIO_GAIN),
        _history_features(grad_norm_history_NS, 1.0),
        _moment_features(moments_NM),
        torch.stack(scalar_features, 1),
        phases_NH.float(),
    ]
    return torch.cat(features, 1).nan_to_num(nan=0.0).clamp(-LIMIT, LIMIT)


def moments_of_sums(sums: Tensor) -> Tensor:
    """Return the six statistics, see ``NUM_MOMENT_STATISTICS``, of the (8,) sums that ``moment_statistics`` returns."""
    count, m_sum, m_square, v_sum, v_square, slow_square, product, _ = sums.unbind()
    count = count.clamp_min(1.0)
    size = (m_square * slow_square).sqrt()
    cosine = torch.where(size > SMALLEST_SIZE, product / size.clamp_min(SMALLEST_SIZE), 0.0)
    means = [m_sum / count, (m_square / count).sqrt(), v_sum / count, (v_square / count).sqrt()]
    return torch.stack([*means, (slow_square / count).sqrt(), cosine])


SMALLEST_SIZE = 1e-30
"""Least product of two norms; below it there is no direction."""
_CHUNK = 2**15 - QUANT_GROUP_SIZE
"""Elements that stay in the second-level cache while several sums read them, in whole groups; from 2^15 on torch wakes
its threads for every sum, which made reading the moments of gpt2-small take 0.7 to 0.9 s on two shared cores, not
0.3."""


def moment_statistics_reference(moments: Sequence[Moments]) -> Tensor:
    """Return the sums over all moments, (8,), float64; see ``moment_statistics``.

    Sums are float32 within chunks of 32512 elements, which torch adds pairwise, and float64 across chunks.
    """
    device = moments[0].device
    total = torch.zeros(8, dtype=torch.float64, device=device)
    for piece in moments:
        total += _sums_of_piece(piece)
    return total


def _sums_of_piece(piece: Moments) -> Tensor:
    sums = torch.zeros(8, dtype=torch.float64, device=piece.device)
    sums[0], sums[7] = piece.num_elements, float(piece.slow is not None)
    for start in range(0, piece.num_elements, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, piece.num_elements))
        m, v = _values(piece.m, chunk, signed=True), _values(piece.v, chunk, signed=False)
        # Products that are summed, not torch.dot: MKL wakes its threads for that.
        parts = [m.sum(), m.square().sum(), v.sum(), v.square().sum()]
        if piece.slow is None:
            sums[1:5] += torch.stack(parts)
        else:
            slow = _values(piece.slow, chunk, signed=True)
            sums[1:7] += torch.stack([*parts, slow.square().sum(), (m * slow).sum()])
    return sums


def _values(stored: Stored, chunk: slice, *, signed: bool) -> Tensor:
    """Return a range of values as float32; ranges of codes begin with a group."""
    if isinstance(stored, Tensor):
        return stored.view(-1)[chunk].float()
    codes = stored.codes.view(-1)[chunk]
    groups = slice(chunk.start // QUANT_GROUP_SIZE, -(-chunk.stop // QUANT_GROUP_SIZE))
    scale = stored.scale.view(-1)[groups].repeat_interleave(QUANT_GROUP_SIZE)[: len(codes)]
    return map_values(codes.device, signed=signed)[codes.long()] * scale

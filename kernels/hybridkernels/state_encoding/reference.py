"""State encoding in plain torch: two histories and some scalars to features of about unit size.

Let x = ln(loss), oldest first, and the level = mean of the last 8 of x. Of every history the features are
    mean over steps [lag, lag + 8) back, less the level   (a lagged log-ratio)
    mean over the last w, less the level
    slope over the last w by least squares, times w       (what the trend makes of one window)
    ln of the standard deviation over the last w
and the level itself. Means and slopes are linear in x: one product with a constant matrix; the deviations are one more
with x^2. So one launch per batch suffices for a fused kernel. Values that are not finite count as the floor or ceiling
of a float's logarithm, and every feature is clamped to [-8, 8].

N states, S steps of a history, P features of one history, M moment statistics, C scalars, F features in all.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

LOSS_STEPS, GRAD_NORM_STEPS = 256, 64
NUM_MOMENT_STATISTICS = 6
"""m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine; all zero where moments are not known."""
NUM_SCALARS = 4
"""lr, beta1^t, beta2^t, phase position in [0, 1]."""
NUM_PHASES = 4

_LEVEL_STEPS = 8
_LAGS = {LOSS_STEPS: (8, 16, 32, 64, 128, 248), GRAD_NORM_STEPS: (8, 16, 32, 56)}
_WINDOWS = {LOSS_STEPS: (16, 32, 64, 128, 256), GRAD_NORM_STEPS: (16, 32, 64)}
_SMALLEST, _LARGEST = 1e-12, 1e12
_LIMIT = 8.0
_RATIO_GAIN = 10.0
"""Log-ratios of losses within a run are some hundredths; this brings them to unit size."""


def _num_history_features(steps: int) -> int:
    return 1 + len(_LAGS[steps]) + 3 * len(_WINDOWS[steps])


NUM_FEATURES = _num_history_features(LOSS_STEPS) + _num_history_features(GRAD_NORM_STEPS) + 6 + 5 + NUM_PHASES


@lru_cache(maxsize=8)
def _matrices(steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (S, lags + 2 windows) to ratios and slopes, and (S, windows) to means."""
    position_S = torch.arange(steps, dtype=torch.float64)
    back_S = steps - 1 - position_S
    level_S = (back_S < _LEVEL_STEPS).double() / _LEVEL_STEPS
    slopes, means = [], []
    ratios = [
        ((back_S >= lag) & (back_S < lag + _LEVEL_STEPS)).double() / _LEVEL_STEPS - level_S for lag in _LAGS[steps]
    ]
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
    log_NS = values_NS.float().nan_to_num(nan=_LARGEST, posinf=_LARGEST, neginf=_SMALLEST).clamp(_SMALLEST, _LARGEST)
    log_NS = log_NS.log()
    linear, means = _matrices(values_NS.shape[1], values_NS.device)
    level_N1 = log_NS[:, -_LEVEL_STEPS:].mean(1, keepdim=True)
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


def encode_state(
    loss_history_NS: Tensor, grad_norm_history_NS: Tensor, moments_NM: Tensor, scalars_NC: Tensor, phases_NH: Tensor
) -> Tensor:
    """Return the features of N states.

    Args:
        loss_history_NS: (N, 256), nats per token, oldest first; what is not yet known repeats the oldest.
        grad_norm_history_NS: (N, 64), likewise.
        moments_NM: (N, 6), see ``NUM_MOMENT_STATISTICS``.
        scalars_NC: (N, 4), see ``NUM_SCALARS``.
        phases_NH: (N, 4), one-hot.

    Returns:
        (N, F), float32, each in [-8, 8].

    Raises:
        ValueError: a shape is another.
    """
    num_states = loss_history_NS.shape[0]
    shapes = [tuple(t.shape) for t in (loss_history_NS, grad_norm_history_NS, moments_NM, scalars_NC, phases_NH)]
    widths = (LOSS_STEPS, GRAD_NORM_STEPS, NUM_MOMENT_STATISTICS, NUM_SCALARS, NUM_PHASES)
    if shapes != [(num_states, width) for width in widths]:
        raise ValueError(f"shapes: {shapes} must be (N, width) with widths {widths}; pad histories with their oldest")
    lr, first_power, second_power, position = scalars_NC.float().unbind(1)
    # AdamW's bias corrections make lr sqrt(1 - b2^t) / (1 - b1^t) the effective rate.
    effective = lr * (1 - second_power).clamp_min(1e-6).sqrt() / (1 - first_power).clamp_min(1e-6)
    scalar_features = [
        (lr.clamp_min(_SMALLEST).log() + 7) / 2, (effective.clamp_min(_SMALLEST).log() + 7) / 2, first_power,
        second_power, position,
    ]  # fmt: skip
    features = [
        _history_features(loss_history_NS, _RATIO_GAIN),
        _history_features(grad_norm_history_NS, 1.0),
        _moment_features(moments_NM),
        torch.stack(scalar_features, 1),
        phases_NH.float(),
    ]
    return torch.cat(features, 1).nan_to_num(nan=0.0).clamp(-_LIMIT, _LIMIT)


_CHUNK = 2**16
"""Elements that stay in the second-level cache while several sums read them."""


def moment_statistics(m: Tensor, v: Tensor, slow: Tensor | None = None) -> Tensor:
    """Return sums over one tensor's optimizer moments; sums of several tensors add.

    Reads every tensor once from memory, in chunks that stay in cache.

    Args:
        m: First moment, any shape and dtype, contiguous.
        v: Second moment, as many elements.
        slow: Slow gradient average, as many elements.

    Returns:
        (8,), float64, on the CPU: count, sum m, sum m^2, sum v, sum v^2, sum slow^2, sum m slow, and 1 if there was a
        slow average, else 0.
    """
    sums = torch.zeros(8, dtype=torch.float64)
    sums[0], sums[7] = m.numel(), float(slow is not None)
    total = torch.zeros(6, dtype=torch.float64, device=m.device)
    flat_m, flat_v, flat_slow = m.view(-1), v.view(-1), None if slow is None else slow.view(-1)
    for start in range(0, m.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        m_part, v_part = flat_m[chunk].float(), flat_v[chunk].float()
        parts = [m_part.sum(), m_part.dot(m_part), v_part.sum(), v_part.dot(v_part)]
        if flat_slow is None:
            total[:4] += torch.stack(parts)
        else:
            slow_part = flat_slow[chunk].float()
            total += torch.stack([*parts, slow_part.dot(slow_part), m_part.dot(slow_part)])
    sums[1:7] = total.cpu()
    return sums

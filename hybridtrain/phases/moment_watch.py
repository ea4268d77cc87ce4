"""Statistics of the optimizer's moments, for forecasters that encode the whole state of a training."""

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.state_encoding import Moments, moment_statistics
from hybridtrain.engine.step_result import StepResult
from hybridtrain.predictor.signal import MomentStatistics
from hybridtrain.predictor.state_encoder import moments_from_sums
from hybridtrain.trainer import Trainer


def read_moments(trainer: Trainer, done: StepResult) -> MomentStatistics | None:
    """Return means over all moments that are floating-point tensors on the device; None where there are none.

    Every moment is read once. Moments in 8 bits, factored ones and those below the device are left out.
    """
    if not math.isfinite(done.loss):  # a dry run
        return None
    found: list[Moments] = []
    with _disable_current_modes(), torch.no_grad():  # no part of the card's memory, no gradient
        for state in [state for _, states in trainer.states.items() for state in states]:
            kept = [tensor for slot in (*state.slots, *state.extra) for tensor in slot.tensors]
            tensors = [stored for stored in kept if isinstance(stored, Tensor) and stored.is_floating_point()]
            names = tuple(slot.spec.name for slot in state.slots)
            if names == ("exp_avg", "exp_avg_sq") and len(tensors) == len(kept):
                found.append(Moments(*tensors[:3]))
        return moments_from_sums(moment_statistics(found)) if found else None

"""Ring buffers of a run's recent scalars, encoded on demand. N = 1 here; the op takes more."""

import numpy as np
import torch
from torch import Tensor

from hybridkernels.state_encoding import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    encode_state,
    moments_of_sums,
)
from hybridtrain.phase import Phase
from hybridtrain.predictor.forecast import State
from hybridtrain.predictor.signal import MomentStatistics, TrainingSignal

_PHASES = tuple(Phase)


def moments_from_sums(sums: Tensor) -> MomentStatistics:
    """Return the means that the sums of ``moment_statistics`` stand for; (8,), float64, on any device."""
    m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine = moments_of_sums(sums).tolist()
    return MomentStatistics(
        m_mean=m_mean, m_rms=m_rms, v_mean=v_mean, v_rms=v_rms, slow_rms=slow_rms, slow_cosine=slow_cosine
    )


class _Ring:
    """The last values in a buffer twice their number, so that they always lie in one piece."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values = np.zeros(2 * size, dtype=np.float32)
        self._count = 0

    def push(self, value: float) -> None:
        if self._count == 0:
            self._values[:] = value
        slot = self._count % self._size
        self._values[slot] = self._values[slot + self._size] = value
        self._count += 1

    def latest(self) -> np.ndarray:
        """Return the values, oldest first; those not yet known repeat the first one."""
        start = self._count % self._size
        return self._values[start : start + self._size]

    def to_list(self) -> list[float]:
        return [float(value) for value in self.latest()]

    def load(self, values: object, count: object) -> None:
        assert isinstance(values, list)
        assert isinstance(count, int)
        self._count = count
        rolled = np.roll(np.array(values, dtype=np.float32), count % self._size)
        self._values = np.concatenate([rolled, rolled])

    @property
    def count(self) -> int:
        """How many values were ever pushed."""
        return self._count


class StateEncoder:
    """Keeps what the state encoding needs.

    Args:
        betas: Decay rates of the optimizer's moments, for the bias corrections.
        phase_steps: Length that makes the position within a phase 1.
    """

    def __init__(self, betas: tuple[float, float] = (0.9, 0.95), phase_steps: int = 100) -> None:
        self._betas = betas
        self._phase_steps = phase_steps
        self._losses, self._norms = _Ring(LOSS_STEPS), _Ring(GRAD_NORM_STEPS)
        self._step = 0
        self._lr = 0.0
        self._phase = Phase.WARMUP
        self._steps_in_phase = 0
        self._moments = [0.0] * NUM_MOMENT_STATISTICS

    def observe(self, signal: TrainingSignal) -> None:
        """Take in one true step; a gradient norm that is not known repeats the last one."""
        self._losses.push(signal.loss)
        if signal.grad_norm is not None:
            self._norms.push(signal.grad_norm)
        elif not self._norms.count:
            self._norms.push(1.0)
        self._steps_in_phase = self._steps_in_phase + 1 if signal.phase is self._phase else 0
        self._step, self._lr, self._phase = signal.step, signal.lr, signal.phase
        if signal.moments is not None:
            of = signal.moments
            self._moments = [of.m_mean, of.m_rms, of.v_mean, of.v_rms, of.slow_rms, of.slow_cosine]

    def encode(self) -> Tensor:
        """Return the features of the present state: (F,), float32."""
        scalars = [
            self._lr, self._betas[0] ** self._step, self._betas[1] ** self._step,
            min(1.0, self._steps_in_phase / self._phase_steps),
        ]  # fmt: skip
        assert len(scalars) == NUM_SCALARS
        one_hot = [float(phase is self._phase) for phase in _PHASES]
        assert len(one_hot) == NUM_PHASES
        return encode_state(
            torch.from_numpy(self._losses.latest())[None],
            torch.from_numpy(self._norms.latest())[None],
            torch.tensor([self._moments]),
            torch.tensor([scalars]),
            torch.tensor([one_hot]),
        )[0]

    def state_dict(self) -> State:
        """Return everything kept, as numbers and lists."""
        return {
            "losses": self._losses.to_list(), "num_losses": self._losses.count, "norms": self._norms.to_list(),
            "num_norms": self._norms.count, "step": self._step, "lr": self._lr, "phase": self._phase.value,
            "steps_in_phase": self._steps_in_phase, "moments": list(self._moments),
        }  # fmt: skip

    def load_state_dict(self, state: State) -> None:
        """Take up a saved state."""
        self._losses.load(state["losses"], state["num_losses"])
        self._norms.load(state["norms"], state["num_norms"])
        step, lr, position, moments = state["step"], state["lr"], state["steps_in_phase"], state["moments"]
        assert isinstance(step, int)
        assert isinstance(lr, float)
        assert isinstance(position, int)
        assert isinstance(moments, list)
        self._step, self._lr, self._steps_in_phase, self._moments = step, lr, position, list(moments)
        self._phase = Phase(str(state["phase"]))

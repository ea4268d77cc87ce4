"""The guard of a training run: skips batches after NaN, infinity or loss spikes."""

import json
import math
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from hybridtrain.config.encode import JsonMapping
from hybridtrain.engine.step import StepLimits
from hybridtrain.errors import ConfigError, DivergenceError, SpikeError
from hybridtrain.hybrid.cycle import LoadBatches
from hybridtrain.run.train_log import Say
from hybridtrain.trainer_config import GuardConfig

_KNOWN, _LEAST_KNOWN = 64, 8
"""Steps whose losses define a spike: at most, and at least."""
Action = Literal["stop", "skip", "roll_back"]


class RunGuard:
    """Decides on the action after a rejected step, logs it to ``report``, and saves its decisions."""

    def __init__(self, config: GuardConfig, report: Path, say: Say) -> None:
        self._config = config
        self._report = report
        self._say = say
        self._skipped: list[int] = []
        self._losses: deque[float] = deque(maxlen=_KNOWN)

    @property
    def rolls_back(self) -> bool:
        """Whether it may roll back, so that an initial checkpoint is needed."""
        return "roll_back" in {self._config.on_nan, self._config.on_spike}

    def batch_of(self, step: int) -> int:
        """Return the batch number of a step, both from 0, without skipped batches."""
        number = step
        for skipped in self._skipped:
            number += skipped <= number
        return number

    def limits(self) -> StepLimits | None:
        """Return the loss limits above which the next step is rejected."""
        limit = self._limit()
        return None if self._config.on_spike == "say" or limit is None else StepLimits(limit, math.inf)

    def note(self, step: int, loss: float) -> None:
        """Record the loss of an applied step, and report a spike."""
        if (limit := self._limit()) is not None and loss > limit:
            usual = median(self._losses)
            self._say(f"step {step}: loss {loss:.3f} is a spike; the median of earlier steps is {usual:.3f}")
        self._losses.append(loss)

    def decide(self, error: DivergenceError, step: int, batches: LoadBatches) -> Action:
        """Report a rejected step (from 0), record a skipped batch, and return the action."""
        step = step if error.step is None else error.step - 1
        wanted = self._config.on_spike if isinstance(error, SpikeError) else self._config.on_nan
        action: Action = "stop" if wanted == "say" else wanted
        if action == "skip" and error.is_applied:
            action = "roll_back"
        batch = self.batch_of(step)
        is_last = len(self._skipped) >= self._config.max_faults
        if is_last and action != "stop":
            self._say(
                f"{len(self._skipped)} batches were skipped already, the limit of guard.max_faults; fix the data, or "
                f"raise it"
            )
            action = "stop"
        digest = 0
        for content in batches(step):
            digest = zlib.crc32(content.token_ids_BT.tobytes(), digest)
        entry = {
            "step": step + 1, "batch": batch, "batch_crc32": digest, "action": action, "layers": list(error.layers),
            "message": str(error),
        }  # fmt: skip
        with self._report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if action != "stop":
            layers = f"; NaN or infinity in the gradients of {_shown(error.layers)}" if error.layers else ""
            self._say(f"{error}{layers}. Batch {batch} is skipped ({action}); see {self._report}")
            self._skipped = sorted([*self._skipped, batch])
        return action

    def state(self) -> JsonMapping:
        """Return the state to checkpoint."""
        return {"skipped_batches": list(self._skipped), "losses": list(self._losses)}

    def load(self, state: JsonMapping) -> None:
        """Restore the state; batches skipped since then stay skipped.

        Raises:
            ConfigError: the state is damaged.
        """
        skipped, losses = state.get("skipped_batches", []), state.get("losses", [])
        try:
            assert isinstance(skipped, list) and isinstance(losses, list)  # noqa: PT018  one fault
            self._skipped = sorted({*self._skipped, *(int(str(number)) for number in skipped)})
            self._losses = deque((float(str(loss)) for loss in losses), maxlen=_KNOWN)
        except (AssertionError, ValueError) as error:
            raise ConfigError("checkpoint of the guard", [f"{error}; use an older one, or start anew"]) from error

    def forget_ahead(self, step: int) -> None:
        """Forget skipped batches after a step, whose numbers now mean other rows."""
        number = self.batch_of(step)
        ahead = [skipped for skipped in self._skipped if skipped > number]
        if ahead:
            self._say(f"the batch size has changed: {len(ahead)} skipped batches ahead will be trained on")
            self._skipped = [skipped for skipped in self._skipped if skipped < number]

    def _limit(self) -> float | None:
        return None if len(self._losses) < _LEAST_KNOWN else median(self._losses) + self._config.spike_nats


def _shown(names: Sequence[str]) -> str:
    first = ", ".join(names[:3])
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else first

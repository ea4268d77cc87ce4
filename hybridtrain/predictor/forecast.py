"""What a loss forecaster says, and the protocol all of them follow.

A forecast is never of the next raw loss but of a block mean: the mean training loss over the last ``window`` steps of
the horizon. The learning rates of those steps are known in advance and given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hybridtrain.predictor.signal import TrainingSignal

State = dict[str, object]
"""Numbers, strings, None, tensors, and lists and dicts of them: what ``torch.load(weights_only=True)`` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForecast:
    """Of the mean loss over a window ending some steps ahead; everything but ``entropy`` in nats per token."""

    mean: float
    low: float
    """Lower end of the calibrated 90 % interval."""
    high: float
    aleatoric: float
    """Standard deviation that the model ascribes to noise in the data."""
    epistemic: float
    """Standard deviation over what the model could be: spread of an ensemble or of fits."""
    entropy: float | None
    """Of the categorical state, nats per categorical, 0 (sure) to ln of its classes; None where there is none."""


class LossForecaster(Protocol):
    """Learns online from one signal per true step."""

    kind: ClassVar[str]

    def observe(self, signal: TrainingSignal) -> None:
        """Take in one true step; signals come in order of their steps."""
        ...

    def forecast(self, future_lrs: Sequence[float], window: int) -> LossForecast | None:
        """Forecast the mean loss of the last ``window`` of the next ``len(future_lrs)`` steps.

        The forecast is remembered until its steps are seen: its error calibrates later intervals.

        Returns:
            None until enough was seen.

        Raises:
            ValueError: the window is empty or longer than the horizon.
        """
        ...

    def state_dict(self) -> State:
        """Return all that a resumed forecaster needs to go on bit-equal."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Take up ``state`` of a forecaster made with the same arguments."""
        ...

"""A run's memory and time on a card. Bytes are planned, times estimated."""

from collections.abc import Iterator
from dataclasses import dataclass

from hybridtrain.units import format_bytes, format_seconds
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory, Replay, StepMemory
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck, StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """A run on a card, replayed from its ledger."""

    card: Card
    trace: LedgerTrace
    uncapped: Replay
    """The replay without a cap: memory that the run needs."""
    capped: Replay
    """The replay under the card's cap, with cached segments released and requests retried."""
    time: StepTime
    """Time of the last step."""

    @property
    def fits_card(self) -> bool:
        """Whether every step fits under the card's cap; ``verdict`` also requires the margin."""
        return self.capped.oom is None

    @property
    def verdict(self) -> FitVerdict:
        """Whether it fits with the margin."""
        return self.card.verdict(self.device_used_bytes, fits=self.fits_card)

    @property
    def oom(self) -> OutOfMemory | None:
        """The request that ran out of memory, if any."""
        return self.capped.oom

    @property
    def steps(self) -> tuple[StepMemory, ...]:
        """Peaks per step: under the cap if the run fits, else without a cap."""
        return self.capped.steps if self.fits_card else self.uncapped.steps

    @property
    def peak(self) -> StepMemory:
        """The step with the most allocated bytes."""
        return max(self.steps, key=lambda step: step.allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest reserved bytes of any step."""
        return max(step.reserved_bytes for step in self.steps)

    @property
    def device_used_bytes(self) -> int:
        """Reserved bytes plus the CUDA context: what the process uses in nvidia-smi."""
        return self.peak_reserved_bytes + self.card.context_bytes

    @property
    def bound(self) -> Bottleneck:
        """The bottleneck of the estimated time."""
        return self.time.bound

    def by_class(self) -> dict[TensorClass, int]:
        """Return the peak's allocated bytes by class."""
        return self.peak.by_class

    def moments(self) -> Iterator[tuple[float, dict[TensorClass, int]]]:
        """Yield seconds and allocated bytes by class through the last step, once per allocation and release."""
        ops = iter(self.time.ops)
        timed = next(ops, None)
        clock = 0.0
        for event, by_class in self.uncapped.live_by_class:
            while timed is not None and timed.op.event <= event:
                if timed.op.lane is Lane.COMPUTE:
                    clock = timed.start_s
                timed = next(ops, None)
            yield clock, by_class

    def summary(self) -> str:
        """Return peak, holders and time in four lines; a fifth lists the card's figures without a source."""
        peak, used = self.peak, self.device_used_bytes
        outcome, note = self.card.told(self.verdict), self.card.note
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.by_class.items() if size)
        lines = (
            f"{self.card.name}: {outcome}, {format_bytes(used)} of {format_bytes(self.card.memory_bytes)} used",
            (
                f"peak in step {peak.step}, {peak.stage}: {format_bytes(peak.allocated_bytes)} allocated, "
                f"{format_bytes(self.peak_reserved_bytes)} reserved"
            ),
            f"held by {held}",
            f"a step takes {format_seconds(self.time.seconds)}, bottleneck: {self.bound}",
            *filter(None, [note]),
        )
        return "\n".join(lines)

"""The basis of a script's plan: versions, observations of the run, and differences from a real card."""

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace

_PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "torchao", "diffusers", "timm", "lightning",
    "pytorch_lightning", "torchtune", "litgpt", "deepspeed", "liger_kernel", "flash_attn", "xformers", "unsloth",
)  # fmt: skip
"""Packages whose version affects the bytes of a step."""
_PLACES_SHOWN = 3
_LIFE = 3
"""Steps for which a variable may keep a step's tensors: a loss keeps the previous batch."""
NUM_STEPS_OF_GROWTH = 2 + _LIFE
"""Steps needed to detect growth; the first creates the optimizer's state and does not count."""


@dataclass(slots=True, kw_only=True)
class CodeNotes:
    """Observations of running code."""

    refusals: list[str] = field(default_factory=list)
    """Refused operations: requests for memory, and sizes that depend on computed values. Afterwards the code may take
    another path than on a card."""
    compiled: list[str] = field(default_factory=list)
    """Places where the code requested compilation, and by what, that are planned as eager code, with the reason."""
    captured: list[str] = field(default_factory=list)
    """Places where the code requested compilation that are planned as compiled graphs."""
    uncounted: dict[str, str] = field(default_factory=dict)
    """Memory of ops on a card that is not counted, and the place of the first call."""
    approximated: dict[str, str] = field(default_factory=dict)
    """Deviations of the plan from a card, and their places."""
    num_saves: int = 0
    num_backwards: int = 0
    num_evaluations: int = 0
    """Forward passes without gradients."""


@dataclass(slots=True, kw_only=True)
class LedgerNotes(CodeNotes):
    """A ledger's observations of running code."""

    made_at: dict[int, str] = field(default_factory=dict)
    """Storage -> code place that allocated it, from the second step on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that each step leaks."""

    bytes_per_step: int
    places: tuple[str, ...]
    """``file:line`` of the largest allocations; empty for runs too short to record them."""

    def full_at(self, num_steps: int, free_bytes: int) -> int:
        """Return the approximate step at which memory is full, given the steps so far and the free bytes."""
        return num_steps + max(free_bytes, 0) // self.bytes_per_step


def find_growth(trace: LedgerTrace, places: Mapping[int, str]) -> Growth | None:
    """Find the bytes that each step leaks; None if there is no growth, or the run is too short.

    A step's allocations count if they outlive the next two steps and live bytes rise too, so that a queue of prefetched
    batches does not count.
    """
    if len(trace.steps) < NUM_STEPS_OF_GROWTH:
        return None
    live = [0, *trace.live_bytes()]
    released = {~entry: position for position, entry in enumerate(trace.events) if entry < 0}
    rises, left = [], Counter[str]()
    for step in range(1, len(trace.steps) - _LIFE):
        end = trace.steps[step + _LIFE].event
        events = trace.events[trace.steps[step].event : trace.steps[step + 1].event]
        stays = [e for e in events if e >= 0 and released.get(e, len(trace.events)) >= end]
        risen = live[trace.steps[step + 1].event] - live[trace.steps[step].event]
        rises.append(min(risen, sum(trace.sizes[index] for index in stays)))
        for index in stays:
            if index in places:
                left[places[index]] += trace.sizes[index]
    if min(rises) <= 0:
        return None
    shown = tuple(place for place, _ in left.most_common(_PLACES_SHOWN))
    return Growth(bytes_per_step=int(statistics.median(rises)), places=shown)


@dataclass(slots=True, kw_only=True)
class PlanBasis(CodeNotes):
    """Basis of a script's plan: observations and their limits, without duplicates."""

    versions: dict[str, str]
    """Versions of the packages in use that affect the memory of a step."""
    num_steps: int
    """Iterations in which every optimizer stepped."""
    has_state: bool
    """Whether a whole step ran with all optimizer state in memory."""
    growth: Growth | None

    @property
    def lower_bound(self) -> str:
        """The reason why the plan is a lower bound; empty: it is not."""
        if not self.num_steps:
            return "no step of a torch.optim optimizer ran, so optimizer state is missing"
        return "" if self.has_state else "no whole step ran with the optimizer's state in memory; run more steps"

    @property
    def upper_bound(self) -> str:
        """The reason why the plan is an upper bound; empty: it is not."""
        if not self.compiled:
            return ""
        return f"{_listed(self.compiled)} is planned as eager code, and compiled code needs less"

    def caveats(self, *, fits: bool) -> list[str]:
        """Return the caveats of a verdict: reasons why the plan is a bound, and differences from a real card."""
        found = []
        if self.lower_bound and fits:
            found.append(f"LOWER BOUND: {self.lower_bound}")
        if self.upper_bound:
            found.append(f"UPPER BOUND: {self.upper_bound}")
        found += [f"APPROXIMATE: {what} ({where})" for what, where in self.approximated.items()]
        if self.refusals:
            found.append(f"ON THIS PATH ONLY: the script caught an error of the virtual card ({self.refusals[0]})")
        return found

    def as_mapping(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self) | {"lower_bound": self.lower_bound, "upper_bound": self.upper_bound}

    def as_text(self) -> str:
        """Return one line of text."""
        seen = [
            _count(self.num_steps, "whole step") if self.num_steps else _count(self.num_backwards, "backward pass"),
            "evaluation" if self.num_evaluations else "no evaluation",
            "saving" if self.num_saves else "no saving",
        ]
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        code = "compiled code planned as its graphs" if self.captured else "eager code"
        if self.compiled:
            code = "compiled code planned as eager" + (" in part" if self.captured else "")
        missing = f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        return f"planned with {packages}; {code}; seen: {', '.join(seen)}{missing}"


def versions() -> dict[str, str]:
    """Return the versions of imported packages that affect memory."""
    loaded = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}
    return {name: str(getattr(module, "__version__", "unknown version")) for name, module in loaded.items()}


def growth_text(growth: Growth, num_steps: int, free_bytes: int) -> str:
    """Return a sentence on growing memory."""
    made = f", allocated at {_listed(growth.places)}" if growth.places else ""
    return (
        f"by {format_bytes(growth.bytes_per_step)} per step{made}; at this rate the card is full at about step "
        f"{growth.full_at(num_steps, free_bytes):,}"
    )


def _listed(places: Sequence[str]) -> str:
    rest = len(places) - _PLACES_SHOWN
    return ", ".join(places[:_PLACES_SHOWN]) + (f" and {rest} more places" if rest > 0 else "")


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number or 'no'} {what if number == 1 else plural}"

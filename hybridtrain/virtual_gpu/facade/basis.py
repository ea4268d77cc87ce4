"""The basis of a script's plan: versions, observations of the run, and differences from a real card."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace
from hybridtrain.virtual_gpu.allocator.allocator_config import round_size

_PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "torchao", "diffusers", "timm", "lightning",
    "pytorch_lightning", "torchtune", "litgpt", "deepspeed", "liger_kernel", "flash_attn", "xformers", "unsloth",
)  # fmt: skip
"""Packages whose version affects the bytes of a step."""
_PLACES_SHOWN = 3
_LIFE = 3
"""Steps for which a variable may keep a step's tensors: a loss keeps the previous batch."""
_LEAST_RISES = 3
"""Rises that make a growth; fewer may be a cache that is filled once."""
NUM_STEPS_OF_GROWTH = _LEAST_RISES + 2
"""Steps needed to detect growth of steps that are alike; the first creates the optimizer's state and does not count."""


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
    workspace_bytes: int = 0
    """Largest workspace of a convolution, counted by a rule (convolutions.py): cuDNN may take none."""
    approximated: dict[str, str] = field(default_factory=dict)
    """Deviations of the plan from a card, and their places."""
    inactive_checkpointing: str = ""
    """Place of a forward pass in eval mode although gradient checkpointing is enabled; empty: none."""
    num_saves: int = 0
    num_backwards: int = 0
    num_evaluations: int = 0
    """Forward passes without gradients."""


@dataclass(slots=True, kw_only=True)
class LedgerNotes(CodeNotes):
    """A ledger's observations of running code."""

    made_at: dict[int, str] = field(default_factory=dict)
    """Storage -> line of the script that allocated it, from the second step on."""
    allocated_at: dict[int, str] = field(default_factory=dict)
    """Storage -> line of the script or of a package that allocated it; of runs that note it."""


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

    Rises must go on to the end: a cache stops growing.
    """
    if len(trace.steps) < NUM_STEPS_OF_GROWTH:
        return None
    found = _changes(trace)
    rising = [step for step, rise in enumerate(found.rises) if rise > 0]
    if len(rising) < _LEAST_RISES:
        return None
    longest_pause = max(after - before for before, after in pairwise(rising))
    between = slice(rising[0] + 1, rising[-1] + 1)
    total = sum(found.rises[between])
    is_replaced = not found.are_alike and sum(found.counts[between]) <= 0
    if total <= 0 or is_replaced or len(found.rises) - 1 - rising[-1] >= longest_pause:
        return None
    left = Counter[str]()
    for index in found.left:
        left[places.get(index, "")] += trace.sizes[index]
    shown = [place for place, _ in left.most_common(_PLACES_SHOWN + 1) if place][:_PLACES_SHOWN]
    return Growth(bytes_per_step=max(1, total // (rising[-1] - rising[0])), places=tuple(shown))


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes of what is held, by step; the first step does not count."""

    are_alike: bool
    """Whether steps allocate and release the same bytes."""
    rises: list[int]
    """Bytes."""
    counts: list[int]
    """Storages."""
    left: list[int]
    """Storages that are still held."""


def _changes(trace: LedgerTrace) -> _Changes:
    lives = _lives(trace)
    last = len(trace.steps) - 1
    inside = Counter[int]()
    for size, (made, released) in zip(trace.sizes, lives, strict=True):
        if made == released:
            inside[made] += size
    # Where rows differ, what variables hold differs too: only what outlives two more steps counts then.
    are_alike = len({inside[step] for step in range(1, last)}) == 1
    life = 1 if are_alike else _LIFE
    rises, counts, left = [0] * (last + 1 - life), [0] * (last + 1 - life), []
    for index, (made, released) in enumerate(lives):
        if released < made + life:
            continue
        if 0 < made < len(rises) and released >= last:
            left.append(index)
        for step, sign in ((made, 1), (released, -1)):
            if 0 < step < len(rises):
                rises[step] += sign * round_size(trace.sizes[index])
                counts[step] += sign
    long = [index for index in left if lives[index][0] + _LIFE <= last]
    return _Changes(are_alike, rises, counts, long or left)


def _lives(trace: LedgerTrace) -> list[tuple[int, int]]:
    """Return the step in which each storage was allocated (-1: before the first), and in which it was released."""
    never = len(trace.steps)
    lives = [(-1, never)] * len(trace.sizes)
    starts, step = [mark.event for mark in trace.steps], -1
    for position, entry in enumerate(trace.events):
        while step + 1 < never and starts[step + 1] <= position:
            step += 1
        if entry >= 0:
            lives[entry] = (step, never)
        else:
            lives[~entry] = (lives[~entry][0], step)
    return lives


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
    ended_at: str = ""
    """Line whose request for memory ended the code; empty: none did."""

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
        if self.inactive_checkpointing:
            found.append(
                f"GRADIENT CHECKPOINTING IS INACTIVE: the model is in eval mode at {self.inactive_checkpointing}; call "
                "model.train() (from_pretrained returns eval mode)"
            )
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
            *(["too few steps to see growth"] if 1 < self.num_steps < NUM_STEPS_OF_GROWTH else []),
        ]
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        code = "compiled code planned as its graphs" if self.captured else "eager code"
        if self.compiled:
            code = "compiled code planned as eager" + (" in part" if self.captured else "")
        missing = f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        size = format_bytes(self.workspace_bytes)
        counted = (
            f"; a convolution's workspace counted as up to {size}, cuDNN may take none" if self.workspace_bytes else ""
        )
        return f"planned with {packages}; {code}; seen: {', '.join(seen)}{counted}{missing}"


def versions() -> dict[str, str]:
    """Return the versions of imported packages that affect memory."""
    loaded = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}
    return {name: str(getattr(module, "__version__", "unknown version")) for name, module in loaded.items()}


def growth_text(growth: Growth, num_steps: int, free_bytes: int | None) -> str:
    """Return a sentence on growing memory; without ``free_bytes`` the card is full."""
    made = f", allocated at {_listed(growth.places)}" if growth.places else ""
    rate = f"by {format_bytes(growth.bytes_per_step)} per step{made}"
    if free_bytes is None:
        return f"{rate}; a larger card only delays the error"
    return f"{rate}; at this rate the card is full at about step {growth.full_at(num_steps, free_bytes):,}"


def _listed(places: Sequence[str]) -> str:
    rest = len(places) - _PLACES_SHOWN
    return ", ".join(places[:_PLACES_SHOWN]) + (f" and {rest} more places" if rest > 0 else "")


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number or 'no'} {what if number == 1 else plural}"

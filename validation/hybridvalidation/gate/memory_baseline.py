"""Baseline of planned peaks in a repository, and exact changes from it, by holder."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybridtrain.config.rules import added_field
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridvalidation.gate.holders import change_text, moved_lines, unfold


class Verdict(StrEnum):
    """Comparison of a plan with its baseline."""

    EQUAL = "equal"
    GREW = "grew"
    SHRANK = "shrank"
    """Also fails: without approval a later loss would go unnoticed."""
    NEW = "new"
    """The baseline has no such plan."""
    FITS_NO_MORE = "no longer fits"
    NOT_COMPARED = "not compared"
    """There is no baseline file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Figures of one plan in a baseline."""

    test: str
    """Test that makes the plan."""
    card: str
    fits: bool
    peak_bytes: int
    """Planned ``torch.cuda.max_memory_allocated``."""
    by_module: Mapping[str, int]
    """Bytes at the peak by holder, ``class/module``; for ``layers.{0..31}`` the bytes of each block."""
    made_with: str
    """Versions of packages that affect a model's memory."""
    fits_barely: bool = added_field(False)
    """Whether it fits, but without the card's margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBaseline:
    """The baseline file."""

    plans: Mapping[str, PlanFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A plan of this run compared with its baseline, with its test's location."""

    name: str
    new: PlanFigures
    old: PlanFigures | None
    is_compared: bool = True
    """Whether there is a baseline file."""
    is_approved: bool = False
    """Whether it will be written to the baseline."""
    limit_bytes: int | None = None
    """Limit that the test states."""
    path: str = ""
    line: int = 1

    @property
    def verdict(self) -> Verdict:
        """Verdict on the plan, without tolerance, as planning is deterministic."""
        if not self.is_compared:
            return Verdict.NOT_COMPARED
        if self.old is None:
            return Verdict.NEW
        if self.old.fits and not self.new.fits:
            return Verdict.FITS_NO_MORE
        if self.old.peak_bytes == self.new.peak_bytes:
            return Verdict.EQUAL
        return Verdict.GREW if self.new.peak_bytes > self.old.peak_bytes else Verdict.SHRANK

    @property
    def is_unlike(self) -> bool:
        """Whether the test fails because of the baseline."""
        return not self.is_approved and self.verdict not in {Verdict.EQUAL, Verdict.NOT_COMPARED}

    @property
    def is_over(self) -> bool:
        """Whether the peak reaches the limit that the test states."""
        return self.limit_bytes is not None and self.new.peak_bytes >= self.limit_bytes

    @property
    def fails(self) -> bool:
        """Whether the test fails because of memory."""
        return self.is_over or self.is_unlike

    @property
    def words(self) -> str:
        """The verdict, with notes on limit and margin."""
        words = [self.verdict] if self.verdict is not Verdict.NOT_COMPARED or not self.is_over else []
        barely = [FitVerdict.BARELY] if self.new.fits_barely else []
        return ", ".join([*words, *(["over its limit"] if self.is_over else []), *barely])

    @property
    def peak(self) -> str:
        """The peak before and now, and the difference."""
        if self.old is None or self.old.peak_bytes == self.new.peak_bytes:
            return format_bytes(self.new.peak_bytes)
        return change_text(self.old.peak_bytes, self.new.peak_bytes)

    def moved(self) -> list[str]:
        """Return a line per holder, the largest changes."""
        return [] if self.old is None else moved_lines(unfold(self.old.by_module), unfold(self.new.by_module))

    def text(self, file: str) -> str:
        """Return the failure, the limit and the advice."""
        if not self.is_unlike:
            return f"{self.words}: {self.peak}"
        head = f"planned memory of '{self.name}': {self.verdict}, {self.peak}, on {self.new.card}"
        if self.old is None:
            return f"{head}\n{file} has no such plan; add it: pytest --memory-approve"
        lines = [head, *(f"  {row}" for row in self.moved())]
        if self.old.card != self.new.card:
            lines.append(f"the baseline is of {self.old.card}")
        if self.old.made_with != self.new.made_with:
            lines.append(f"the baseline was made with {self.old.made_with}; this is {self.new.made_with}")
        lines.append(f"{file} has the accepted figures; undo the change or, if intended, run pytest --memory-approve")
        return "\n".join(lines)

    def cells(self) -> list[str]:
        """Return a row of the comparison for a pull request."""
        return [
            f"`{self.name}`", self.new.card, f"**{self.words}**" if self.fails else self.words, self.peak,
            format_bytes(self.limit_bytes) if self.limit_bytes else "-", "\n".join(self.moved()) or "-",
        ]  # fmt: skip


CELL_HEADERS = ("plan", "card", "verdict", "peak", "limit", "what moved")
"""Of ``PlanChange.cells``."""

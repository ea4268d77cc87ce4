"""Planned peaks that a repository keeps, and what has changed since: to the byte, with who holds them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybridtrain.config.rules import young
from hybridtrain.units import format_bytes

_BLOCK = re.compile(r"(?<=[./])\d+(?=\.|$)")
_BLOCKS = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NUM_SHOWN = 6


class Verdict(StrEnum):
    """What became of a plan."""

    EQUAL = "equal"
    GREW = "grew"
    SHRANK = "shrank"
    """Fails too: a win that nobody approved is lost unseen by the next change."""
    NEW = "new"
    """There is nothing to compare with."""
    FITS_NO_MORE = "fits no more"
    NOT_COMPARED = "not compared"
    """There is no baseline file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What a baseline keeps of one plan."""

    test: str
    """The test that makes it."""
    card: str
    fits: bool
    peak_bytes: int
    """Of ``torch.cuda.max_memory_allocated``, planned."""
    by_module: Mapping[str, int]
    """Holders of the peak's bytes as ``class/module``; of ``layers.{0..31}`` what each of these blocks holds."""
    made_with: str
    """Packages whose versions decide what a model allocates."""
    fits_barely: bool = young(False)
    """Whether it fits and leaves less than the card's margin free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBaseline:
    """The baseline file."""

    plans: Mapping[str, PlanFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A plan beside its baseline."""

    name: str
    verdict: Verdict
    new: PlanFigures
    old: PlanFigures | None
    approved: bool = False
    """Whether it goes into the baseline, whatever it is."""

    @property
    def fails(self) -> bool:
        """Whether a test fails for it."""
        return not self.approved and self.verdict not in {Verdict.EQUAL, Verdict.NOT_COMPARED}

    def moved(self) -> list[tuple[str, int, int]]:
        """Return ``class/module``, bytes by which each of its blocks changed, and all; the largest first."""
        if self.old is None:
            return []
        old, new = unfold(self.old.by_module), unfold(self.new.by_module)
        changed = {name: new.get(name, 0) - old.get(name, 0) for name in {*old, *new}}
        folded = fold({name: change for name, change in changed.items() if change})
        totals = [(name, each, each * _num_blocks(name)) for name, each in folded.items()]
        return sorted(totals, key=lambda row: (-abs(row[2]), row[0]))

    def change(self) -> str:
        """Return before, now and by how much."""
        now = format_bytes(self.new.peak_bytes)
        if self.old is None or self.old.peak_bytes == self.new.peak_bytes:
            return now
        more = self.new.peak_bytes - self.old.peak_bytes
        return f"{format_bytes(self.old.peak_bytes)} -> {now} ({more:+,} B, {100 * more / self.old.peak_bytes:+.2f} %)"

    def text(self, file: str) -> str:
        """Return what is wrong, what is allowed and what to do."""
        head = f"planned memory of '{self.name}': {self.verdict}, {self.change()}, on {self.new.card}"
        if self.old is None:
            return f"{head}\n{file} has no such plan; record it: pytest --memory-approve"
        lines = [head, *(f"  {row}" for row in moved_lines(self))]
        if self.old.card != self.new.card:
            lines.append(f"the baseline is of {self.old.card}")
        if self.old.made_with != self.new.made_with:
            lines.append(f"the baseline was made with {self.old.made_with}; this is {self.new.made_with}")
        lines.append(f"{file} states what is allowed; undo the change, or if it is meant: pytest --memory-approve")
        return "\n".join(lines)


def compare_plan(name: str, old: PlanFigures | None, new: PlanFigures) -> PlanChange:
    """Return what became of a plan; there is no tolerance, as the count is deterministic."""
    if old is None:
        verdict = Verdict.NEW
    elif old.fits and not new.fits:
        verdict = Verdict.FITS_NO_MORE
    elif old.peak_bytes == new.peak_bytes:
        verdict = Verdict.EQUAL
    else:
        verdict = Verdict.GREW if new.peak_bytes > old.peak_bytes else Verdict.SHRANK
    return PlanChange(name=name, verdict=verdict, old=old, new=new)


def moved_lines(change: PlanChange) -> list[str]:
    """Return the holders that changed most, a line each."""
    moved = change.moved()
    lines = [
        f"{name}: {total:+,} B" + (f", {each:+,} B in each block" if each != total else "")
        for name, each, total in moved[:_NUM_SHOWN]
    ]
    rest = moved[_NUM_SHOWN:]
    return [*lines, f"and {len(rest)} more: {sum(row[2] for row in rest):+,} B"] if rest else lines


def fold(held: Mapping[str, int]) -> dict[str, int]:
    """Return holders with neighbouring blocks that hold as much each under one name.

    >>> fold({"grad/layers.0.mlp": 8, "grad/layers.1.mlp": 8, "grad/layers.2.mlp": 4})
    {'grad/layers.2.mlp': 4, 'grad/layers.{0..1}.mlp': 8}
    """
    alike: dict[tuple[str, str, int], list[int]] = {}
    folded = {}
    for name, size in held.items():
        block = _BLOCK.search(name)
        if block is None:
            folded[name] = size
        else:
            alike.setdefault((name[: block.start()], name[block.end() :], size), []).append(int(block[0]))
    for (before, after, size), blocks in alike.items():
        for first, last in _runs(sorted(blocks)):
            folded[f"{before}{first if first == last else f'{{{first}..{last}}}'}{after}"] = size
    return dict(sorted(folded.items()))


def unfold(folded: Mapping[str, int]) -> dict[str, int]:
    """Return every block's holders; the inverse of ``fold``."""
    held: dict[str, int] = {}
    for name, size in folded.items():
        blocks = _BLOCKS.search(name)
        numbers = range(int(blocks[1]), int(blocks[2]) + 1) if blocks else ()
        held |= {_BLOCKS.sub(str(number), name, count=1): size for number in numbers} or {name: size}
    return held


def _num_blocks(name: str) -> int:
    blocks = _BLOCKS.search(name)
    return int(blocks[2]) - int(blocks[1]) + 1 if blocks else 1


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of neighbours; the numbers are sorted."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last

"""Which implementation an op takes on a card: the fastest of its own, where that is beyond doubt.

A row is written only where the same provider is right, has enough samples, and beats every other one that the op can
take in every case that decides; else the op keeps its default order.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from hybridkernels.provider import _choices
from hybridtrain.atomic_write import replace_file
from hybridvalidation.kernel_bench.case import Mode
from hybridvalidation.kernel_bench.record import KernelRecord, newest_kernels
from hybridvalidation.kernel_bench.timing import WANTED_ROUNDS, Times
from hybridvalidation.records.outcome import Outcome

CHOICES = Path(str(files("hybridkernels").joinpath("choices.toml")))
_HEAD = """\
# The fastest implementation of each op by card, written by `hybridtrain bench kernels --choose` from measurements:
# [[choice]] op, card (as CUDA names it), provider. An op without a row for a card takes its stated order.
"""


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """One row."""

    op: str
    card: str
    provider: str


@dataclass(frozen=True, slots=True)
class Undecided:
    """An op that keeps its default order on a card."""

    op: str
    card: str
    reason: str


def choose(records: Iterable[KernelRecord]) -> tuple[list[Choice], list[Undecided]]:
    """Return the rows that the newest records of each case decide, and what they leave open; CUDA cards only."""
    by_row: dict[tuple[str, str], list[KernelRecord]] = {}
    for record in newest_kernels(records):
        if record.is_on_card and any(result.is_choosable for result in record.results):
            by_row.setdefault((record.choice, record.card), []).append(record)
    chosen, undecided = [], []
    for (op, card), found in by_row.items():
        winner = _winner(_deciding(found))
        if winner.provider:
            chosen.append(Choice(op, card, winner.provider))
        else:
            undecided.append(Undecided(op, card, winner.doubt))
    return sorted(chosen), undecided


def write_choices(chosen: Sequence[Choice], undecided: Sequence[Undecided], path: Path) -> list[Choice]:
    """Rewrite the rows of the ops and cards that were judged; return all rows, those of others as they were."""
    judged = {(row.op, row.card) for row in chosen} | {(row.op, row.card) for row in undecided}
    text = path.read_text(encoding="utf-8")
    old = [Choice(row["op"], row["card"], row["provider"]) for row in tomllib.loads(text).get("choice", [])]
    rows = sorted([*chosen, *(row for row in old if (row.op, row.card) not in judged)])
    tables = [f'\n[[choice]]\nop = "{row.op}"\ncard = "{row.card}"\nprovider = "{row.provider}"\n' for row in rows]
    replace_file(path, (_HEAD + "".join(tables)).encode())
    _choices.cache_clear()
    return rows


@dataclass(frozen=True, slots=True)
class _Winner:
    provider: str = ""
    doubt: str = ""


def _deciding(records: Sequence[KernelRecord]) -> list[KernelRecord]:
    """Return the cases of the whole step where there are any: one provider runs forward and backward."""
    return [record for record in records if record.mode is Mode.BOTH] or list(records)


def _winner(records: Sequence[KernelRecord]) -> _Winner:
    """Return the one provider that wins every case beyond noise, or why there is none."""
    winners = set()
    for record in records:
        found = _candidates(record)
        if len(found) < 2:
            return _Winner(doubt=f"{record.name}: fewer than two of its providers are right with enough samples")
        (first, best), *others = found
        if not all(best.is_faster_than(times) for _, times in others):
            return _Winner(doubt=f"{record.name}: {first} and {others[0][0]} are within noise of each other")
        winners.add(first)
    if len(winners) > 1:
        return _Winner(doubt=f"the shapes disagree: {', '.join(sorted(winners))}")
    return _Winner(provider=winners.pop())


def _candidates(record: KernelRecord) -> list[tuple[str, Times]]:
    """Return the providers that the op can take, the fastest first."""
    assert all(result.outcome is Outcome.OK for result, _ in record.timed())
    return [
        (result.provider, times)
        for result, times in record.timed()
        if result.is_choosable and times.num_samples >= WANTED_ROUNDS
    ]

"""The one stack of full training to take: the gentlest numbers that are not much slower than harsher ones.

What fits and how fast it is says ``fitting.fit``; the chosen way is then run dry with every block, with what can move
its reserved bytes left free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor

from hybridtrain.errors import OutOfMemoryError
from hybridtrain.models.model_config import block_params
from hybridtrain.planning.candidates import LEVELS, Candidate, Question
from hybridtrain.planning.dry_runs import DryRun
from hybridtrain.planning.fitting import Way, confirmed, fit
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.card import MARGIN_SHARE
from hybridtrain.virtual_gpu.roofline import Bound

_FREE_SHARE = 0.03
"""Of the card, beside the margin, in short runs: their bytes are extended by arithmetic, reserved ones are no line."""
_WORTH_HARSHER = 1.05
"""A harsher level must be this much faster to be chosen."""
_WORTH_TRYING = 1.02
"""A harsher level must be this much faster than the one before, or even harsher ones are not looked at."""
_WAITS = 0.01
"""Of a step, for the bus: less than this is not worth blocks that stay on the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer."""

    question: Question
    way: Way
    """The chosen one, run with every block."""
    ways: tuple[Way, ...]
    """All levels that fit by short runs, the gentlest first."""
    free_share: float
    """Of the card's bytes that stay free, beside the way's ``margin_bytes``."""

    @property
    def chosen(self) -> Candidate:
        """The stack, and how a step is cut into micro-batches."""
        return self.way.candidate

    @property
    def run(self) -> DryRun:
        """Every block; of many micro-batches the first."""
        assert self.way.run is not None, "the chosen way was run"
        return self.way.run


def recommend(question: Question, on_try: Callable[[str], None], *, free_share: float = MARGIN_SHARE) -> Recommendation:
    """Return the fastest stack that fits; a gentler level wins unless a harsher one is 5 % faster.

    Args:
        question: What is to be trained, on what.
        on_try: Told what is run next.
        free_share: Of the card's bytes that stay free, beside what can move reserved bytes.

    Raises:
        OutOfMemoryError: nothing fits; the message says what is missing.
    """
    found = fit(question, methods=("full",), free_share=free_share + _FREE_SHARE, on_try=on_try)
    ways = tuple(sorted((way for way in found if way.fits), key=lambda way: LEVELS.index(way.candidate.level)))
    left = list(ways)
    while left:
        chosen = _chosen(left)
        on_try(f"{chosen.name}, {chosen.candidate.arrangement.name}: every block")
        whole = confirmed(question, chosen, free_share=free_share, leaves_margin=True)
        if whole.fits:
            way = _with_resident_blocks(question, whole, free_share)
            return Recommendation(question=question, way=way, ways=ways, free_share=free_share)
        left.remove(chosen)
    raise OutOfMemoryError(_nothing_fits(question, found, free_share))


def _chosen(ways: Sequence[Way]) -> Way:
    chosen = ways[0]
    for before, way in pairwise(ways):
        if _speed(way) < _WORTH_TRYING * _speed(before):
            break
        if _speed(way) > _WORTH_HARSHER * _speed(chosen):
            chosen = way
    return chosen


def _speed(way: Way) -> float:
    return way.tokens_per_s or 0.0


def _with_resident_blocks(question: Question, way: Way, free_share: float) -> Way:
    """Return the way with as many blocks on the card as there is room for, where the step waits for the bus."""
    candidate, run = way.candidate, way.run
    assert run is not None, "the way was run"
    waits = run.time.seconds_by_bound.get(Bound.TRANSFER, 0.0) > _WAITS * run.time.seconds
    if not candidate.arrangement.streams or not waits:
        return way
    room = (1 - free_share - _FREE_SHARE) * question.card.memory_bytes - way.device_bytes - way.margin_bytes
    block = candidate.level.weight_bytes * block_params(question.model)
    resident = min(question.model.num_blocks, floor(room / block))
    while resident > 0:
        trial = replace(way, candidate=replace(candidate, resident_layers=resident))
        found = confirmed(question, trial, free_share=free_share, leaves_margin=True)
        if found.fits and found.candidate.keep_last == candidate.keep_last:
            return max(way, found, key=_speed)
        resident -= 1 + resident // 4
    return way


def _nothing_fits(question: Question, ways: tuple[Way, ...], free_share: float) -> str:
    smallest = min(ways, key=lambda way: way.host_bytes + way.device_bytes)
    margin = f", {100 * free_share:g} % of the card free" if free_share else ""
    return (
        f"nothing fits: the smallest stack tried takes {format_bytes(round(smallest.device_bytes))} of "
        f"{format_bytes(question.card.memory_bytes)} on the card and {format_bytes(round(smallest.host_bytes))} of "
        f"{format_bytes(question.host.tensor_bytes)} of host memory (arithmetic{margin}); "
        "take a smaller --seq, a larger card, or more host memory."
    )

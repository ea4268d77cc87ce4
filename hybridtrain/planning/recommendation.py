"""The one stack of full training to take: the most exact precision that is not much slower than the others.

``fitting.fit`` finds the options; the chosen one gets a full dry run, with a margin for reserved bytes left free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor

from hybridtrain.errors import OutOfMemoryError
from hybridtrain.models.model_config import block_params
from hybridtrain.planning.candidates import LEVELS, Candidate, FitRequest
from hybridtrain.planning.dry_runs import DryRun
from hybridtrain.planning.fitting import TrainingOption, confirmed, fit
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE
from hybridtrain.virtual_gpu.cards.roofline import Bound

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

    request: FitRequest
    option: TrainingOption
    """The chosen one, run with every block."""
    options: tuple[TrainingOption, ...]
    """All levels that fit by short runs, the gentlest first."""
    free_share: float
    """Of the card's bytes that stay free, beside the option's ``margin_bytes``."""

    @property
    def chosen(self) -> Candidate:
        """The stack, and how a step is cut into micro-batches."""
        return self.option.candidate

    @property
    def run(self) -> DryRun:
        """Every block; of many micro-batches the first."""
        assert self.option.run is not None, "the chosen option was run"
        return self.option.run


def recommend(
    request: FitRequest, on_try: Callable[[str], None], *, free_share: float = MARGIN_SHARE
) -> Recommendation:
    """Return the fastest stack that fits; a gentler level wins unless a harsher one is 5 % faster.

    Args:
        request: What is to be trained, on what.
        on_try: Told what is run next.
        free_share: Of the card's bytes that stay free, beside what can move reserved bytes.

    Raises:
        OutOfMemoryError: nothing fits; the message says what is missing.
    """
    found = fit(request, methods=("full",), free_share=free_share + _FREE_SHARE, on_try=on_try)
    options = tuple(
        sorted((option for option in found if option.fits), key=lambda option: LEVELS.index(option.candidate.level))
    )
    left = list(options)
    while left:
        chosen = _chosen(left)
        on_try(f"{chosen.name}, {chosen.candidate.arrangement.name}: every block")
        whole = confirmed(request, chosen, free_share=free_share, leaves_margin=True)
        if whole.fits:
            option = _with_resident_blocks(request, whole, free_share)
            return Recommendation(request=request, option=option, options=options, free_share=free_share)
        left.remove(chosen)
    raise OutOfMemoryError(_nothing_fits(request, found, free_share))


def _chosen(options: Sequence[TrainingOption]) -> TrainingOption:
    chosen = options[0]
    for before, option in pairwise(options):
        if _speed(option) < _WORTH_TRYING * _speed(before):
            break
        if _speed(option) > _WORTH_HARSHER * _speed(chosen):
            chosen = option
    return chosen


def _speed(option: TrainingOption) -> float:
    return option.tokens_per_s or 0.0


def _with_resident_blocks(request: FitRequest, option: TrainingOption, free_share: float) -> TrainingOption:
    """Return the option with as many blocks on the card as there is room for, where the step waits for the bus."""
    candidate, run = option.candidate, option.run
    assert run is not None, "the option was run"
    waits = run.time.seconds_by_bound.get(Bound.TRANSFER, 0.0) > _WAITS * run.time.seconds
    if not candidate.arrangement.streams or not waits:
        return option
    room = (1 - free_share - _FREE_SHARE) * request.card.memory_bytes - option.device_bytes - option.margin_bytes
    block = candidate.level.weight_bytes * block_params(request.model)
    resident = min(request.model.num_blocks, floor(room / block))
    while resident > 0:
        trial = replace(option, candidate=replace(candidate, resident_layers=resident))
        found = confirmed(request, trial, free_share=free_share, leaves_margin=True)
        if found.fits and found.candidate.keep_last == candidate.keep_last:
            return max(option, found, key=_speed)
        resident -= 1 + resident // 4
    return option


def _nothing_fits(request: FitRequest, options: tuple[TrainingOption, ...], free_share: float) -> str:
    smallest = min(options, key=lambda option: option.host_bytes + option.device_bytes)
    margin = f", {100 * free_share:g} % of the card free" if free_share else ""
    return (
        f"nothing fits: the smallest stack tried takes {format_bytes(round(smallest.device_bytes))} of "
        f"{format_bytes(request.card.memory_bytes)} on the card and {format_bytes(round(smallest.host_bytes))} of "
        f"{format_bytes(request.host.tensor_bytes)} of host memory (arithmetic{margin}); "
        "take a smaller --seq, a larger card, or more host memory."
    )

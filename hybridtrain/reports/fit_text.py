"""What the views of ``hybridtrain fit`` share: a table, names of cards, and the options that all of them read."""

from collections.abc import Sequence

from hybridtrain.errors import ConfigError
from hybridtrain.planning.fitting import METHODS, precisions
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, Card

PERCENT = 100
WIDEST = 120
CLIPPED = "Fused updates clip by the previous step's norm, whose effect on quality is undecided."
"""Columns of an answer, at most."""
_MOST_LINES = 25
_TEXT_COLUMNS = 2


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines as wide as its cells; the first two columns are text, the others numbers."""
    widths = [max(map(len, cells)) for cells in zip(headers, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(size) if i < _TEXT_COLUMNS else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        )
        for row in (headers, *rows)
    ]


def in_blocks(blocks: Sequence[Sequence[str]]) -> str:
    """Return lines in blocks, an empty line before as many as leave no more than 25 lines."""
    spare = _MOST_LINES - sum(map(len, blocks))
    return "\n".join(line for i, block in enumerate(blocks) for line in (*([""] if 0 < i <= spare else []), *block))


def short_name(card: Card) -> str:
    """Return a card's name without the vendor's."""
    return card.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removesuffix(" GPU")


def chosen_methods(names: Sequence[str]) -> Sequence[str]:
    """Return names of methods and precisions as they are; raises ``ConfigError``."""
    known = {*METHODS, *(level.name for _, level in precisions(METHODS))}
    levels = ", ".join(level.name for _, level in precisions(["full"]))
    allowed = f"{', '.join(METHODS)}, or a precision of full: {levels}"
    faults = [f"'{name}' must be one of {allowed}" for name in names if name not in known]
    if faults:
        raise ConfigError("--method", faults)
    return names


def free_share(margin: float | None) -> float:
    """Return the share of the card that stays free, of a margin in percent; raises ``ConfigError``."""
    margin = PERCENT * MARGIN_SHARE if margin is None else margin
    if not 0 <= margin < PERCENT:
        raise ConfigError("--margin", [f"{margin:g} must be a share of the card in percent, from 0 to below 100"])
    return margin / PERCENT

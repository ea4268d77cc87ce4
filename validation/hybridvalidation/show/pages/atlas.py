"""The atlas: the smallest card for each model and method. The page for a browser has every cell."""

import re
from collections.abc import Callable, Iterator, Sequence

from hybridtrain.planning.fitting import METHODS, levels_of
from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.units import MIB, to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, card_catalogue
from hybridvalidation.experiments.atlas import Atlas, AtlasCheck, AtlasRecord, Cell
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.results import Results

_SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 94, 96, 141, 180, 288)
"""Memory on the box; error correction takes some of it."""
_SEQ_LEN = 2048
"""Of the tables: the default of fit, or the model's longest below it."""


def labels(levels: Sequence[str]) -> dict[str, str]:
    """Return what a reader calls precisions, by name."""
    known = {level.name: level.label for method in METHODS for level in levels_of(method)}
    return {name: known[name] for name in levels}


def card_title(name: str) -> str:
    """Return a card's name as people write it, with its memory; an unknown one's as it is."""
    card = card_catalogue().get(name)
    if card is None:
        return name
    short = re.sub(r"[ -]\d+GB.*| Generation| Edition| GPU|NVIDIA |GeForce |Tesla ", "", card.name)
    size = to_gib(card.nvidia_smi_mib * MIB)
    return f"{short} {next((sold for sold in _SOLD_GB if size < 1.01 * sold), round(size))} GB"


def card_note(name: str) -> str:
    """Return what an answer about a card must say; empty: nothing."""
    card = card_catalogue().get(name)
    return "" if card is None else card.note


def checks_sentence(checks: Sequence[AtlasCheck]) -> str:
    """Return how far off full dry runs found the cells; empty without any."""
    if not checks:
        return ""
    memory = max(abs(check.memory_error) for check in checks)
    speed = max(abs(check.speed_error) for check in checks)
    cells = "1 cell" if len(checks) == 1 else f"{len(checks)} cells"
    return f"{cells} planned in full: largest difference {memory:.1%} of the card's bytes, {speed:.1%} of speed."


def atlas_text(atlas: Atlas, style: str = MARKDOWN) -> str:
    """Return the page of an atlas, or its tables for a terminal."""
    return "\n\n".join(_text(atlas, style))


def _smallest_table(atlas: Atlas, fits: Callable[[Cell, int], bool], style: str) -> str:
    """Return the smallest card of each model and precision on which a cell fits, by a rule of cell and room in MiB."""
    titles = {model.name: model.title for model in atlas.file.models}
    named = labels(atlas.file.levels)
    rows = [
        [titles[name], *(_smallest(record, level, fits) for level in named)] for name, record in atlas.records.items()
    ]
    return table(("model", *named.values()), rows, style)


def _smallest(record: AtlasRecord, level: str, fits: Callable[[Cell, int], bool]) -> str:
    seq_len = min(_SEQ_LEN, max(record.lengths))
    sizes = dict(zip(record.cards, record.card_mib, strict=True))
    found = [
        cell for cell in record.cells()
        if cell.level == level and cell.seq_len == seq_len and fits(cell, int((1 - MARGIN_SHARE) * sizes[cell.card]))
    ]  # fmt: skip
    if not found:
        return "none"
    cell = min(found, key=lambda cell: (sizes[cell.card], -cell.tokens_per_s))
    return f"{card_title(cell.card)}, {cell.tokens_per_s:,}/s"


def _checks_table(checks: Sequence[AtlasCheck], style: str) -> str:
    headers = ("model", "card", "tokens", "precision", "card GiB", "memory", "speed")
    rows = [
        [
            check.model, check.card, f"{check.seq_len:,}", check.level,
            f"{to_gib(check.figures.planned_device_bytes):.2f}", f"{check.memory_error:+.2%}",
            f"{check.speed_error:+.2%}",
        ]
        for check in checks
    ]  # fmt: skip
    return table(headers, rows, style)


def _text(atlas: Atlas, style: str) -> Iterator[str]:
    file, cards = atlas.file, max((len(record.cards) for record in atlas.records.values()), default=0)
    yield "# The smallest card for each model"
    yield (
        f"{len(atlas.records)} models on {cards} cards, {atlas.num_cells:,} cells. {checks_sentence(atlas.checks)} "
        "`hybridtrain report --html page` makes a page that searches all of them."
    )
    yield (
        f"Sequences have {_SEQ_LEN:,} tokens, or the model's longest below that. Behind a card stands its estimated "
        f"speed in tokens per second. The host has {file.host_memory}; {MARGIN_SHARE:.0%} of each card stay free."
    )
    yield "## Everything on the card"
    yield _smallest_table(atlas, lambda cell, room: cell.resident_mib <= room, style)
    yield "## With the host's memory or disk"
    yield _smallest_table(atlas, lambda cell, _: cell.fits, style)
    yield "## How the figures were got"
    yield (
        "Every cell is the answer of `hybridtrain fit MODEL --card CARD --method METHOD --seq N --quick`. Bytes are "
        "extrapolated from dry runs of three blocks. Bytes of what does not fit are arithmetic. Speeds are estimated: "
        f"off by {TIME_ERROR:.0%} on average on cards they were not calibrated on, by {WAITING_ERROR:.0%} where a step "
        "waits for copies."
    )
    if atlas.checks:
        yield "## Cells planned in full"
        yield "Estimated over planned, less 1. Planned by dry runs of every block; cells are chosen by a digest."
        yield _checks_table(atlas.checks, style)
    yield made_by([("models", record) for record in atlas.records.values()])


def _pages(results: Results) -> Iterator[Page]:
    if results.atlas is not None:
        yield Page(name="atlas", group="Evidence", text=atlas_text(results.atlas))


SOURCE = Source(order=0, pages=_pages)

"""The atlas: the smallest card for each model and method. The page for a browser has every cell."""

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.units import MIB, to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, card_catalogue
from hybridvalidation.experiments.atlas import LABELS, Atlas, AtlasCheck, AtlasRecord, Cell
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.results import Results

_SOLD_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 94, 96, 141, 180, 288)
"""Memory on the box; error correction takes some of it."""
_SEQ_LEN = 2048
"""Of the tables: the default of fit, or the model's longest below it."""


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
    """Return how far off full dry runs found cells, planned and extrapolated; empty without any."""
    told = {True: "cells were planned again by their commands", False: "extrapolated ones were planned in full"}
    sentences = []
    for is_planned, done in told.items():
        errors = sorted(abs(check.memory_error) for check in checks if check.cell.is_planned is is_planned)
        if errors:
            sentences.append(
                f"{len(errors)} {done}: median difference {median(errors):.1%} of the card's bytes, largest "
                f"{errors[-1]:.1%}."
            )
    return " ".join(sentences)


def outdated_sentence(atlas: Atlas) -> str:
    """Return which models have figures of an earlier time model; empty: none."""
    titles = {model.name: model.title for model in atlas.file.models}
    if not (names := atlas.outdated()):
        return ""
    listed = ", ".join(titles[name] for name in names)
    return f"Speeds, and options chosen by speed, are of an earlier time model for {len(names)} models: {listed}."


def atlas_text(atlas: Atlas, style: str = MARKDOWN) -> str:
    """Return the page of an atlas, or its tables for a terminal."""
    return "\n\n".join(_text(atlas, style))


def cells_table(atlas: Atlas, places: Sequence[Sequence[str]], style: str) -> str:
    """Return the cells of some models, cards and precisions at the default length."""
    titles = {model.name: model.title for model in atlas.file.models}
    rows = []
    for name, card, level in places:
        record = atlas.records[name]
        place = card, min(_SEQ_LEN, max(record.lengths)), level
        cell = next(cell for cell in record.cells() if (cell.card, cell.seq_len, cell.level) == place)
        rows.append([
            titles[name], card_title(card), LABELS[level] + (f"; {cell.offload}" if cell.offload != "none" else ""),
            f"{to_gib(cell.device_mib * MIB):.1f}", f"{to_gib(cell.host_mib * MIB):.1f}",
            f"{cell.tokens_per_s:,}" if cell.fits else "does not fit",
            f"{100e6 / cell.tokens_per_s / 3600:.1f}" if cell.fits else "",
        ])  # fmt: skip
    return table(("model", "card", "method", "card GiB", "host GiB", "tokens/s", "h / 100M tokens"), rows, style)


def _smallest_table(atlas: Atlas, fits: Callable[[AtlasRecord, Cell, int], bool], style: str) -> str:
    """Return the smallest card of each model and precision on which a cell fits, by a rule of cell and room in MiB."""
    titles = {model.name: model.title for model in atlas.file.models}
    named = {name: LABELS[name] for name in atlas.file.levels}
    rows = [
        [titles[name], *(_smallest(record, level, fits) for level in named)] for name, record in atlas.records.items()
    ]
    return table(("model", *named.values()), rows, style)


def _smallest(record: AtlasRecord, level: str, fits: Callable[[AtlasRecord, Cell, int], bool]) -> str:
    seq_len = min(_SEQ_LEN, max(record.lengths))
    sizes = dict(zip(record.cards, record.card_mib, strict=True))
    found = [
        cell for cell in record.cells()
        if cell.level == level and cell.seq_len == seq_len
        and fits(record, cell, int((1 - MARGIN_SHARE) * sizes[cell.card]))
    ]  # fmt: skip
    if not found:
        return "none"
    cell = min(found, key=lambda cell: (sizes[cell.card], -cell.tokens_per_s))
    return f"{card_title(cell.card)}, {cell.tokens_per_s:,}/s"


def _is_resident(record: AtlasRecord, cell: Cell, room: int) -> bool:
    return record.resident_mib(cell.card, cell.seq_len, cell.level) <= room


def _checks_table(checks: Sequence[AtlasCheck], style: str) -> str:
    headers = ("model on card", "tokens", "precision", "atlas", "card GiB", "memory", "speed")
    rows = [
        [
            f"{check.cell.model} on {check.cell.card}", f"{check.cell.seq_len:,}", check.cell.level,
            "planned" if check.cell.is_planned else "extrapolated",
            f"{to_gib(check.again.device_mib * MIB):.2f}", f"{check.memory_error:+.2%}", f"{check.speed_error:+.2%}",
        ]
        for check in checks
    ]  # fmt: skip
    return table(headers, rows, style)


def _text(atlas: Atlas, style: str) -> Iterator[str]:
    file, cards = atlas.file, max((len(record.cards) for record in atlas.records.values()), default=0)
    yield "# The smallest card for each model"
    counts = f"{len(atlas.records)} models on {cards} cards, {atlas.num_cells:,} cells."
    searched = "`hybridtrain report --html page` makes a page that searches all of them."
    yield " ".join(part for part in (counts, checks_sentence(atlas.checks), searched) if part)
    yield (
        f"Sequences have {_SEQ_LEN:,} tokens, or the model's longest below that. Behind a card stands its estimated "
        f"speed in tokens per second. The host has {file.host_memory}; {MARGIN_SHARE:.0%} of each card stay free."
    )
    yield "## Everything on the card"
    yield _smallest_table(atlas, _is_resident, style)
    yield "## With the host's memory or disk"
    yield _smallest_table(atlas, lambda _record, cell, _room: cell.fits, style)
    yield "## How the figures were got"
    yield (
        "Every cell is the answer of `hybridtrain fit MODEL --card CARD --method PRECISION --seq N`. Bytes of what "
        f"fits at {', '.join(f'{length:,}' for length in file.planned)} tokens are planned, by a dry run of every "
        "block. Others are extrapolated from a dry run of three blocks, as by `--quick`. "
        "A tiled MLP is not tried here: with it `fit` finds room for longer sequences. "
        f"Speeds are estimated: off by {TIME_ERROR:.0%} on average on repositories left out of the fit, by "
        f"{WAITING_ERROR:.0%} where a step waits for copies. {outdated_sentence(atlas)}".rstrip()
    )
    if atlas.checks:
        yield "## Cells planned again"
        yield "The atlas over a dry run of every block, less 1. A digest of their names chose the cells."
        yield _checks_table(atlas.checks, style)
    yield made_by([("models", record) for record in atlas.records.values()])


def _pages(results: Results) -> Iterator[Page]:
    if results.atlas is not None:
        yield Page(name="atlas", group="Evidence", text=atlas_text(results.atlas))


SOURCE = Source(order=0, pages=_pages)

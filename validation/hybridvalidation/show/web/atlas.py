"""The atlas for a browser: its cells as a script, which a page that is a file can read, and what its template says."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.fit_arguments import parse_host
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE
from hybridvalidation.experiments.atlas import LABELS, QUICK, Atlas, AtlasRecord, command_of
from hybridvalidation.show.pages.atlas import card_note, card_title, checks_sentence, outdated_sentence

DATA_FILE = "atlas-data.js"
_TOKENS = 100_000_000
"""Of the hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasView:
    """What ``atlas.html.jinja`` says, and the script with the cells."""

    models: Mapping[str, Mapping[str, str]]
    """Titles by name, by family."""
    cards: Mapping[str, str]
    """Titles by name, the smallest card first."""
    levels: Mapping[str, str]
    lengths: Sequence[int]
    num_cells: int
    host_memory: str
    checks: str
    time_error: str
    waiting_error: str
    script: bytes
    """Content of ``DATA_FILE``."""
    data_file: str = DATA_FILE


def atlas_view(atlas: Atlas) -> AtlasView:
    """Return the atlas as a page shows it."""
    sizes = {
        card: mib for record in atlas.records.values() for card, mib in zip(record.cards, record.card_mib, strict=True)
    }
    cards = {name: card_title(name) for name in sorted(sizes, key=lambda name: (sizes[name], name))}
    levels = {name: LABELS[name] for name in atlas.file.levels}
    known = {model.name: model.title for model in atlas.file.models}
    titles = {name: known[name] for name in atlas.records}
    also = {model.name: model.also for model in atlas.file.models}
    families = groupby(titles, key=lambda name: titles[name].split()[0])
    host = parse_host(atlas.file.host_memory)
    data = {
        "cards": [
            {"name": name, "title": title, "note": card_note(name), "room": int((1 - MARGIN_SHARE) * sizes[name])}
            for name, title in cards.items()
        ],
        "levels": [
            {"name": name, "title": title, "command": command_of("{model}", "{card}", "{seq}", name)}
            for name, title in levels.items()
        ],
        "quick": QUICK,
        "hostRoom": int(host.tensor_bytes / MIB),
        "tokens": _TOKENS,
        "models": [
            {"name": name, "title": titles[name], "also": also[name], **_cells(record, list(cards), list(levels))}
            for name, record in atlas.records.items()
        ],
    }
    return AtlasView(
        models={family: {name: titles[name] for name in names} for family, names in families}, cards=cards,
        levels=levels, lengths=atlas.file.lengths, num_cells=atlas.num_cells, host_memory=atlas.file.host_memory,
        checks=f"{checks_sentence(atlas.checks)} {outdated_sentence(atlas)}".strip(),
        time_error=f"{TIME_ERROR:.0%}", waiting_error=f"{WAITING_ERROR:.0%}",
        script=f"window.ATLAS = {json.dumps(data, separators=(',', ':'))};\n".encode(),
    )  # fmt: skip


def _cells(record: AtlasRecord, cards: Sequence[str], levels: Sequence[str]) -> dict[str, object]:
    columns = record.columns
    return {
        "params": record.num_params, "planned": record.planned, "cards": [cards.index(name) for name in record.cards],
        "lengths": record.lengths, "levels": [levels.index(name) for name in record.levels],
        "offloads": columns.offloads, "kind": columns.kind, "resident_mib": columns.resident_mib,
        "longest": columns.longest, **columns.per_cell(),
    }  # fmt: skip

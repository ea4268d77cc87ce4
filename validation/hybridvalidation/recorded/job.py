"""What a child plans of a recorded run, alone: its record holds through any change to what holds it against others."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.records.asked import key_of, values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """What a child is asked to plan."""

    source: str
    run: str
    engine: str
    card: str
    common: str
    config: str

    @property
    def key(self) -> str:
        """Digest of what decides the plan: the card by its figures, whatever it and the run are called."""
        task = {"engine": self.engine, "common": self.common, "config": self.config}
        return key_of(task, values_of(card=find_card(self.card)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFigures:
    """What a child answers: quantity to value, as in ``RecordedRun.recorded``."""

    figures: Mapping[str, float]


def work(job: RecordedJob) -> PlannedFigures:
    """Plan one run; the child's side."""
    engine = import_module(f"hybridvalidation.engines.{job.engine}")
    return PlannedFigures(figures=engine.plan(json.loads(job.common), json.loads(job.config), job.card))

"""One part of the evidence, in a child process."""

import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import DivergenceError, HostMemoryError, HybridTrainError
from hybridvalidation.experiments.card_session.ceilings import measure_ceilings
from hybridvalidation.experiments.card_session.plan import PlanJob, PlannedPart, plan_part
from hybridvalidation.experiments.card_session.record import CardMeasurements, Ceilings
from hybridvalidation.experiments.card_session.train import TrainedPart, TrainJob, train_part
from hybridvalidation.records.outcome import Outcome

_BEGIN_S = time.monotonic()
"""Start of the process: this module is imported first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingsJob:
    """Input of the first part."""

    used_before_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a process, or the reason why there is none."""

    outcome: Outcome = Outcome.OK
    message: str = ""
    planned: PlannedPart | None = None
    ceilings: Ceilings | None = None
    measured: CardMeasurements | None = None


def plan(job: PlanJob) -> Answer:
    """Plan a part on the CPU; errors are returned, not raised."""
    try:
        return Answer(planned=plan_part(job))
    except HybridTrainError as error:
        return Answer(outcome=Outcome.ERROR, message=str(error))


def ceilings(job: CeilingsJob) -> Answer:
    """Measure the card's peak rates."""
    return Answer(ceilings=measure_ceilings(job.used_before_bytes))


def train(job: TrainJob) -> Answer:
    """Train on the card; steps before an error are kept."""
    trained = TrainedPart()
    outcome, message = Outcome.OK, ""
    try:
        train_part(job, embedded_corpus(), trained, _BEGIN_S)
        message = trained.remark
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        outcome, message = Outcome.OUT_OF_MEMORY, str(error) or type(error).__name__
    except DivergenceError as error:
        outcome, message = Outcome.DIVERGED, str(error)
    except Exception as error:  # noqa: BLE001  whatever a card may do to a run is evidence too
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome.ERROR
        message = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return Answer(outcome=outcome, message=message, measured=trained.measured)

"""One piece of the evidence in this process: ``python -m hybridvalidation.card_session.worker VERB JOB ANSWER``."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.decode import Unions, decode
from hybridtrain.config.encode import to_json
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.errors import DivergenceError, HostMemoryError, HybridTrainError
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import Optimization
from hybridvalidation.card_session.ceilings import measure_ceilings
from hybridvalidation.card_session.plan import PlanJob, PlannedPart, plan_part
from hybridvalidation.card_session.record import Ceilings, Measured
from hybridvalidation.card_session.train import TrainedPart, TrainJob, train_part
from hybridvalidation.records.outcome import Outcome

UNIONS: Unions = {Optimization: OPTIMIZATIONS}
_BEGIN_S = time.monotonic()
_PARENT_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingsJob:
    """What the first part must know."""

    used_before_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a process found, or why it did not."""

    outcome: Outcome = Outcome.OK
    message: str = ""
    planned: PlannedPart | None = None
    ceilings: Ceilings | None = None
    measured: Measured | None = None


def plan(job: PlanJob) -> Answer:
    """Plan a part on the processor; what cannot be planned is told, not raised."""
    try:
        return Answer(planned=plan_part(job))
    except HybridTrainError as error:
        return Answer(outcome=Outcome.ERROR, message=str(error))


def ceilings(job: CeilingsJob) -> Answer:
    """Measure what the card does at best."""
    return Answer(ceilings=measure_ceilings(job.used_before_bytes))


def train(job: TrainJob) -> Answer:
    """Train on the card; steps before an error are kept."""
    trained = TrainedPart()
    outcome, message = Outcome.OK, ""
    try:
        train_part(job, embedded_corpus(), trained, _BEGIN_S)
        message = trained.remark
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        outcome, message = Outcome.OUT_OF_MEMORY, str(error)
    except DivergenceError as error:
        outcome, message = Outcome.DIVERGED, str(error)
    except Exception as error:  # noqa: BLE001  whatever a card may do to a run is evidence too
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome.ERROR
        message = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return Answer(outcome=outcome, message=message, measured=trained.figures())


_VERBS: dict[str, tuple[type, Callable[..., Answer]]] = {
    "plan": (PlanJob, plan),
    "ceilings": (CeilingsJob, ceilings),
    "train": (TrainJob, train),
}


def main() -> None:
    """Read the job file, do it, write the answer."""
    verb, job_path, answer_path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    job_class, work = _VERBS[verb]
    job: object = decode(job_class, json.loads(job_path.read_text(encoding="utf-8")), source=verb, unions=UNIONS)
    replace_file(answer_path, to_json(work(job)).encode())


def _die_with_parent(parent: int) -> None:
    """End when the parent is gone: nobody else would stop a run on the card."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()

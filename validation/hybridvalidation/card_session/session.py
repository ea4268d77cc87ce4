"""All parts of the evidence within a budget of time: planned side by side on the processor, run one by one on the card.

The card takes the most valuable part whose plan is there, so that it does not wait for a long search; every record is
on disk as soon as its part is over.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import torch

from hybridtrain.errors import HybridTrainError
from hybridtrain.memory.tier import available_host_bytes
from hybridtrain.profiler.nvml import DeviceReader, DeviceReadError
from hybridtrain.run.environment import Environment, read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.stacks import default_folder
from hybridtrain.units import GIB, MIB, format_bytes
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.card_session.parts import (
    CEILINGS,
    PAIR_STACKS,
    Part,
    all_parts,
    ceilings_limit,
    choose_parts,
    decide_start,
    effective_cap,
    shortage,
)
from hybridvalidation.card_session.plan import PlanJob, PlannedPart, card_under_cap
from hybridvalidation.card_session.record import Ceilings, EvidenceRecord, Training, append_evidence, read_evidence
from hybridvalidation.card_session.table import write_evidence
from hybridvalidation.card_session.train import TrainJob
from hybridvalidation.card_session.worker import Answer, CeilingsJob
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.runs.child import ONE_THREAD, Child, Ended
from hybridvalidation.scenario_files import ScenarioFiles

_POLL_S = 0.2
_RECORDING_S = 5.0
"""Kept of the budget for the last record and the table."""

_HOST_SHARE = 0.85
"""Of the available host memory, for a run beside which others are still planned."""


class Working(Protocol):
    """A process at work, as ``runs.child.Child`` is."""

    def poll(self) -> Ended[Answer] | None:
        """Return how it ended, None while it works."""
        ...

    def stop(self) -> None:
        """End it if it still works."""
        ...


Verb: TypeAlias = Literal["plan", "ceilings", "train"]
"""What a process does: a function of worker.py."""


class StartChild(Protocol):
    """Starts a process."""

    def __call__(self, verb: Verb, job: object, limit_s: float) -> Working:
        """Return a process that does ``verb`` for at most ``limit_s``."""
        ...


def start_child(verb: Verb, job: object, limit_s: float) -> Child[Answer]:
    """Start a process; plans are made side by side and get one thread each."""
    return Child(
        f"hybridvalidation.card_session.worker:{verb}", job, Answer, limit_s=limit_s,
        environment=ONE_THREAD if verb == "plan" else {},
    )  # fmt: skip


def answer_of(ended: Ended[Answer]) -> Answer:
    """Return what a process found; a crash or the end of its time is an answer too."""
    return ended.answer or Answer(outcome=Outcome.ERROR, message=ended.fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The machine, the budget, and the ways to the outside."""

    card: str
    total_bytes: int
    """Of the card."""
    used_bytes: Callable[[], int | None]
    """Memory of the whole card in use; None where nobody says."""
    host_bytes: int
    """Host memory that is available."""
    environment: Environment
    budget_s: float
    start: StartChild
    on_record: Callable[[EvidenceRecord], None]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    num_planners: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) - 4))
    """The run on the card has the other cores."""


class EvidenceRun:
    """One call of the command."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._end_s = session.clock() + session.budget_s - _RECORDING_S
        self._others_bytes = session.used_bytes() or 0
        self._planning: dict[str, Working] = {}
        self._answers: dict[str, Answer] = {}
        self._unplanned: list[Part] = []
        self._ceilings: Ceilings | None = None
        self._children: list[Working] = []

    def run(self, parts: Sequence[Part]) -> None:
        """Run the ceilings, then every part for which card, host and time suffice; record each."""
        try:
            self._measure_ceilings()
            waiting = [part for part in parts if self._is_there(part)]
            self._unplanned = list(waiting) if self._ceilings is not None else []
            for part in waiting if self._ceilings is None else ():
                self._skip(part, "the card did not pass the first part")
            while self._unplanned or self._planning or self._answers:
                ready = self._next_ready(waiting)
                if ready is None:
                    break
                waiting.remove(ready)
                self._run_part(ready)
            for part in waiting if self._ceilings is not None else ():
                self._skip(part, "its plan was not ready when the time was over")
        finally:
            for child in self._children:
                child.stop()

    def _measure_ceilings(self) -> None:
        session, begin = self._session, self._session.clock()
        started = datetime.now(UTC)
        session.say(f"{CEILINGS}: matmuls and copies of {session.card}")
        limit = ceilings_limit(self._remaining())
        answer = self._finish(self._start("ceilings", CeilingsJob(used_before_bytes=session.used_bytes()), limit))
        self._ceilings = answer.ceilings
        self._record(CEILINGS, "what the card does at best", answer, started, begin, ceilings=answer.ceilings)

    def _is_there(self, part: Part) -> bool:
        """Skip a part that the card cannot hold, whatever its plan says."""
        total = self._session.total_bytes
        if effective_cap(part, total, self._others_bytes):
            return True
        self._skip(part, shortage(part, total, self._others_bytes))
        return False

    def _next_ready(self, waiting: Sequence[Part]) -> Part | None:
        """Return the most valuable part whose plan is there; None when the time is over."""
        while self._remaining() > 0:
            self._plan()
            ready = [part for part in waiting if part.name in self._answers]
            if ready:
                return ready[0]
            self._session.sleep(_POLL_S)
        return None

    def _plan(self) -> None:
        """Keep the planners busy."""
        for name, child in list(self._planning.items()):
            ended = child.poll()
            if ended is not None:
                self._answers[name] = answer_of(ended)
                del self._planning[name]
        while self._unplanned and len(self._planning) < self._session.num_planners:
            part = self._unplanned.pop(0)
            self._planning[part.name] = self._start("plan", self._plan_job(part), self._session.budget_s)

    def _plan_job(self, part: Part) -> PlanJob:
        assert self._ceilings is not None, "nothing is planned for an unknown card"
        cap = effective_cap(part, self._session.total_bytes, self._others_bytes)
        return PlanJob(
            part=part, card=card_under_cap(self._ceilings, cap), host=self._host(part)
        )  # fmt: skip

    def _host(self, part: Part) -> Host:
        available = self._session.host_bytes / GIB
        return Host(memory_gib=_HOST_SHARE * available if part.host_gib is None else min(part.host_gib, available))

    def _run_part(self, part: Part) -> None:
        answer = self._answers.pop(part.name)
        planned = answer.planned
        if planned is None:
            self._skip(part, f"no plan: {answer.message}")
            return
        if planned.fault:
            self._skip(part, planned.fault, planned)
            return
        predicted = planned.predicted
        start = decide_start(
            part, step_s=predicted.step_time_s, host_bytes=predicted.host_bytes, remaining_s=self._remaining()
        )
        if start.refusal:
            self._skip(part, start.refusal, planned)
            return
        self._session.say(f"{part.name}: {part.says}")
        self._train(part, planned, start.limit_s)

    def _train(self, part: Part, planned: PlannedPart, limit_s: float) -> None:
        session, begin = self._session, self._session.clock()
        assert self._ceilings is not None, "nothing is run on an unknown card"
        used, started = session.used_bytes(), datetime.now(UTC)
        job = TrainJob(
            part=part, planned=planned, cap_bytes=effective_cap(part, session.total_bytes, self._others_bytes),
            context_bytes=-(-self._ceilings.context_with_libraries_bytes // MIB) * MIB,
            host_limit_bytes=int(self._host(part).tensor_bytes), used_before_bytes=used, limit_s=limit_s,
        )  # fmt: skip
        answer = self._finish(self._start("train", job, limit_s))
        training = _training(part, planned, job.cap_bytes, answer)
        self._record(part.name, part.says, answer, started, begin, others_bytes=used or 0, training=training)

    def _skip(self, part: Part, reason: str, planned: PlannedPart | None = None) -> None:
        session = self._session
        cap = effective_cap(part, session.total_bytes, self._others_bytes)
        session.say(f"{part.name}: skipped, {reason}")
        training = None if planned is None else _training(part, planned, cap, Answer())
        answer = Answer(outcome=Outcome.SKIPPED, message=reason)
        self._record(part.name, part.says, answer, datetime.now(UTC), session.clock(), training=training)

    def _record(
        self, part: str, says: str, answer: Answer, started: datetime, begin_s: float, *,
        others_bytes: int | None = None, ceilings: Ceilings | None = None, training: Training | None = None,
    ) -> None:  # fmt: skip
        """Hand a record on; ``begin_s`` by the session's clock, ``others_bytes`` None: as when the session began."""
        session = self._session
        session.on_record(
            EvidenceRecord(
                part=part, key=f"{part}, {session.card}", program=program_digest(), says=says,
                outcome=answer.outcome, message=answer.message, started_at=started.isoformat(timespec="seconds"),
                duration_s=round(session.clock() - begin_s, 3), environment=session.environment, card=session.card,
                others_bytes=self._others_bytes if others_bytes is None else others_bytes, ceilings=ceilings,
                training=training,
            )
        )  # fmt: skip

    def _start(self, verb: Verb, job: object, limit_s: float) -> Working:
        child = self._session.start(verb, job, limit_s)
        self._children.append(child)
        return child

    def _finish(self, child: Working) -> Answer:
        """Return the answer of a process on the card; planning goes on beside it."""
        while (ended := child.poll()) is None:
            self._plan()
            self._session.sleep(_POLL_S)
        return answer_of(ended)

    def _remaining(self) -> float:
        return self._end_s - self._session.clock()


def _training(part: Part, planned: PlannedPart, cap_bytes: int, answer: Answer) -> Training:
    return Training(
        model=part.model, num_params=planned.num_params, stack=planned.stack.name, says=planned.stack.says,
        plan=planned.plan, cap_bytes=cap_bytes, micro_batch_size=planned.micro_batch_size, seq_len=part.seq_len,
        accum_steps=planned.accum_steps, predicted=planned.predicted, measured=answer.measured,
    )  # fmt: skip


NO_CARD = (
    "no CUDA card: nothing was measured; run this on a machine with one, with a torch built for CUDA (nvidia-smi must "
    "list the card)"
)
_BUSY_BYTES = GIB
"""More than this in use by others disturbs times; a desktop takes less."""
_UNKNOWN_HOST_BYTES = 16 * GIB
"""Where the system does not say what is available."""


class NoCard(HybridTrainError):  # noqa: N818  a state of the machine; the name is part of the answer
    """There is no card to measure on, or too little of it is free."""


def measure_card(
    *, minutes: float, only: Sequence[str], scenarios: Path | None, results: Path, say: Callable[[str], None]
) -> tuple[list[EvidenceRecord], list[Path]]:
    """Measure, record each part at once and write the table.

    Args:
        minutes: Parts that do not fit any more are recorded as skipped.
        only: Names of parts; empty: all.
        scenarios: Folder of scenario files; None: the default one.
        results: Folder of records and tables.
        say: Told of every part.

    Returns:
        The records made and the files written.

    Raises:
        NoCard: nothing was measured.
        ConfigError: a part is unknown, a file is faulty.
    """
    files = ScenarioFiles(scenarios or default_folder())
    stacks = [files.stack(name) for name in files.stack_names() if name in PAIR_STACKS]
    parts = choose_parts(list(all_parts(stacks)), only)
    if not torch.cuda.is_available():
        raise NoCard(NO_CARD)
    records = results / "records"
    earlier = read_evidence(records)  # a damaged file is told now, not after the run
    made: list[EvidenceRecord] = []

    def on_record(record: EvidenceRecord) -> None:
        append_evidence(records, record)
        made.append(record)
        write_evidence([*earlier, *made], results)

    session = _session(minutes, on_record, say)
    smallest = min((part.cap_bytes for part in parts), default=0)
    used = session.used_bytes() or 0
    if session.total_bytes - used < smallest * 9 // 10:
        raise NoCard(
            f"{format_bytes(used)} of the {format_bytes(session.total_bytes)} of {session.card} are in use, and the "
            f"smallest part wants {format_bytes(smallest)}: nothing was measured; end the other programs, or take a "
            f"larger card"
        )
    if used > _BUSY_BYTES:
        say(f"other programs hold {format_bytes(used)} of {session.card}: times will be longer than on an idle card")
    EvidenceRun(session).run(parts)
    return made, [records / "evidence.jsonl", *write_evidence([*earlier, *made], results)]


def _session(minutes: float, on_record: Callable[[EvidenceRecord], None], say: Callable[[str], None]) -> Session:
    properties = torch.cuda.get_device_properties(0)  # makes no context: the card stays as it is
    return Session(
        card=properties.name, total_bytes=properties.total_memory, used_bytes=_used_bytes,
        host_bytes=available_host_bytes() or _UNKNOWN_HOST_BYTES,
        environment=read_environment(),
        budget_s=60 * minutes, start=start_child, on_record=on_record, say=say,
    )  # fmt: skip


def _used_bytes() -> int | None:
    """Return the memory of the whole card in use, None where NVML does not answer."""
    try:
        reader = DeviceReader(0)
    except DeviceReadError:
        return None
    try:
        return reader.read().used_bytes
    finally:
        reader.close()

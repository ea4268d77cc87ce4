"""All parts of the evidence within a time limit: planned in parallel on the CPU, run one by one on the card.

The card runs the part of highest priority whose plan is ready.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from hybridtrain.errors import HybridTrainError
from hybridtrain.memory.tier import available_host_bytes
from hybridtrain.profiler.nvml import DeviceReader, DeviceReadError
from hybridtrain.stacks import default_folder
from hybridtrain.units import GIB, MIB, format_bytes
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.child import ONE_THREAD, Child, ChildResult
from hybridvalidation.experiment import Experiment, begin_header
from hybridvalidation.experiments.card_session.parts import (
    CEILINGS,
    PAIR_STACKS,
    Part,
    all_parts,
    choose_parts,
    effective_cap,
    shortage,
    time_limit,
)
from hybridvalidation.experiments.card_session.plan import PlanJob, PlannedPart, card_under_cap
from hybridvalidation.experiments.card_session.record import EVIDENCE_FILE, EvidenceRecord, Training, read_evidence
from hybridvalidation.experiments.card_session.table import write_evidence
from hybridvalidation.experiments.card_session.train import TrainJob
from hybridvalidation.experiments.card_session.worker import Answer, CeilingsJob
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.scenario_files import ScenarioFiles

NO_CARD = (
    "no CUDA card: nothing was measured; use a machine with a CUDA card that nvidia-smi lists, and a CUDA build of "
    "torch"
)
_POLL_S = 0.2
_RECORDING_S = 5.0
"""Seconds reserved for the last record and the table."""
_CEILINGS_SECONDS = 90.0
_HOST_SHARE = 0.85
"""Share of available host memory for a run, while others are still planned."""
_BUSY_BYTES = GIB
"""Memory of other programs above which times may be disturbed; a desktop uses less."""
_UNKNOWN_HOST_BYTES = 16 * GIB
"""Assumed host memory if the system does not report it."""

Verb: TypeAlias = Literal["plan", "ceilings", "train"]
"""Functions of worker.py that a child process runs."""


def start_child(verb: Verb, job: object, limit_s: float) -> Child[Answer]:
    """Start a process; parallel planning processes get one thread each."""
    return Child(
        f"hybridvalidation.experiments.card_session.worker:{verb}", job, Answer, limit_s=limit_s,
        environment=ONE_THREAD if verb == "plan" else {},
    )  # fmt: skip


def answer_of(ended: ChildResult[Answer]) -> Answer:
    """Return the answer of a process; crashes and timeouts become answers."""
    return ended.answer or Answer(outcome=Outcome.ERROR, message=ended.fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Machine, budget, and callbacks of a session."""

    card: str
    total_bytes: int
    """Memory of the card in bytes."""
    used_bytes: Callable[[], int | None]
    """Used memory of the whole card; None if unknown."""
    host_bytes: int
    """Available host memory."""
    budget_s: float
    say: Callable[[str], None]
    start: Callable[[Verb, object, float], Child[Answer]] = start_child
    """Starts a process with a time limit in seconds."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    num_planners: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) - 4))
    """Parallel planning processes; the run on the card has the other cores."""


class EvidenceRun:
    """Result of one call of the command."""

    def __init__(self, session: Session, parts: Sequence[Part]) -> None:
        self._session, self._parts = session, parts
        self._end_s = session.clock() + session.budget_s - _RECORDING_S
        self._others_bytes = session.used_bytes() or 0
        self._context_bytes = 0
        self._unplanned: list[PlanJob] = []
        self._planning: dict[str, Child[Answer]] = {}
        self._answers: dict[str, Answer] = {}
        self._children: list[Child[Answer]] = []

    def run(self, names: Sequence[str]) -> Iterator[tuple[str, EvidenceRecord]]:
        """Run the ceilings, then each part that card, host and time allow; yield the records."""
        parts = [part for part in self._parts if part.name in names]
        try:
            answer, record = self._measure_ceilings()
            yield CEILINGS, record
            yield from self._run_parts(answer, parts)
        finally:
            for child in self._children:
                child.stop()

    def _run_parts(self, answer: Answer, parts: Sequence[Part]) -> Iterator[tuple[str, EvidenceRecord]]:
        total, others, waiting = self._session.total_bytes, self._others_bytes, list[Part]()
        for part in parts:
            cap = effective_cap(part, total, others)
            if not cap:
                yield part.name, self._skip(part, shortage(part, total, others))
            elif answer.ceilings is None:
                yield part.name, self._skip(part, "the card did not pass the first part")
            else:
                card = card_under_cap(answer.ceilings, cap)
                self._unplanned.append(PlanJob(part=part, card=card, host=self._host(part)))
                waiting.append(part)
        while waiting and (ready := self._next_ready(waiting)) is not None:
            waiting.remove(ready)
            yield ready.name, self._run_part(ready)
        for part in waiting:
            yield part.name, self._skip(part, "its plan was not ready in time")

    def _measure_ceilings(self) -> tuple[Answer, EvidenceRecord]:
        session, header = self._session, begin_header()
        session.say(f"{CEILINGS}: matmuls and copies of {session.card}")
        job = CeilingsJob(used_before_bytes=session.used_bytes())
        answer = self._finish(self._start("ceilings", job, min(_CEILINGS_SECONDS, self._remaining())))
        if answer.ceilings is not None:
            self._context_bytes = -(-answer.ceilings.context_with_libraries_bytes // MIB) * MIB
        return answer, self._record(CEILINGS, "no ceilings", answer, header(), ceilings=answer.ceilings)

    def _next_ready(self, waiting: Sequence[Part]) -> Part | None:
        """Return the most valuable part whose plan is there; None when the time is over."""
        while self._remaining() > 0:
            self._plan()
            for part in waiting:
                if part.name in self._answers:
                    return part
            self._session.sleep(_POLL_S)
        return None

    def _plan(self) -> None:
        """Keep the planners busy."""
        for name, child in list(self._planning.items()):
            if (ended := child.poll()) is not None:
                self._answers[name] = answer_of(ended)
                del self._planning[name]
        while self._unplanned and len(self._planning) < self._session.num_planners:
            job = self._unplanned.pop(0)
            self._planning[job.part.name] = self._start("plan", job, self._session.budget_s)

    def _host(self, part: Part) -> Host:
        available = self._session.host_bytes / GIB
        return Host(memory_gib=_HOST_SHARE * available if part.host_gib is None else min(part.host_gib, available))

    def _run_part(self, part: Part) -> EvidenceRecord:
        answer = self._answers.pop(part.name)
        planned = answer.planned
        if planned is None:
            return self._skip(part, f"no plan: {answer.message}")
        predicted = planned.predicted
        limit_s, refusal = time_limit(
            part, step_s=predicted.step_time_s, host_bytes=predicted.host_peak_bytes, remaining_s=self._remaining()
        )
        if planned.fault or refusal:
            return self._skip(part, planned.fault or refusal, planned)
        session, header = self._session, begin_header()
        session.say(f"{part.name}: {part.description}")
        used = session.used_bytes()
        job = TrainJob(
            part=part, planned=planned, cap_bytes=effective_cap(part, session.total_bytes, self._others_bytes),
            context_bytes=self._context_bytes, host_limit_bytes=int(self._host(part).tensor_bytes),
            used_before_bytes=used, limit_s=limit_s,
        )  # fmt: skip
        answer = self._finish(self._start("train", job, limit_s))
        training = _training(part, planned, job.cap_bytes, answer)
        return self._record(part.name, part.description, answer, header(), others_bytes=used or 0, training=training)

    def _skip(self, part: Part, reason: str, planned: PlannedPart | None = None) -> EvidenceRecord:
        cap = effective_cap(part, self._session.total_bytes, self._others_bytes)
        training = None if planned is None else _training(part, planned, cap, Answer())
        answer = Answer(outcome=Outcome.SKIPPED, message=reason)
        return self._record(part.name, part.description, answer, begin_header()(), training=training)

    def _record(
        self, part: str, description: str, answer: Answer, header: dict[str, Any], **found: Any
    ) -> EvidenceRecord:
        found = {"others_bytes": self._others_bytes} | found
        return EvidenceRecord(
            part=part, key=_key(part, self._session.card), description=description, outcome=answer.outcome,
            message=answer.message,
            card=self._session.card, **header, **found,
        )  # fmt: skip

    def _start(self, verb: Verb, job: object, limit_s: float) -> Child[Answer]:
        child = self._session.start(verb, job, limit_s)
        self._children.append(child)
        return child

    def _finish(self, child: Child[Answer]) -> Answer:
        """Return the answer of a process on the card; planning goes on beside it."""
        while (ended := child.poll()) is None:
            self._plan()
            self._session.sleep(_POLL_S)
        return answer_of(ended)

    def _remaining(self) -> float:
        return self._end_s - self._session.clock()


def _key(part: str, card: str) -> str:
    return f"{part}, {card}"


def _training(part: Part, planned: PlannedPart, cap_bytes: int, answer: Answer) -> Training:
    return Training(
        model=part.model, num_params=planned.num_params, stack=planned.stack.name,
        description=planned.stack.description,
        plan=planned.plan, cap_bytes=cap_bytes, micro_batch_size=planned.micro_batch_size, seq_len=part.seq_len,
        accum_steps=planned.accum_steps, predicted=planned.predicted, measured=answer.measured,
    )  # fmt: skip


class NoCard(HybridTrainError):  # noqa: N818  a state of the machine; the name is part of the answer
    """There is no CUDA card, or too little of its memory is free."""


def measure_card(
    *, minutes: float, only: Sequence[str], scenarios: Path | None, results: Path, say: Callable[[str], None]
) -> tuple[Sequence[EvidenceRecord], list[Path]]:
    """Measure, record each part at once, and write the table; return records and files.

    Parts beyond ``minutes`` are recorded as skipped. ``only``: parts, empty: all. ``scenarios``: folder of scenario
    files, None: the default one. ``say`` is called with a line about each part.

    Raises:
        NoCard: nothing was measured.
        ConfigError: a part is unknown, or a file invalid.
    """
    files = ScenarioFiles(scenarios or default_folder())
    stacks = [files.stack(name) for name in files.stack_names() if name in PAIR_STACKS]
    parts = choose_parts(list(all_parts(stacks)), only)
    if not torch.cuda.is_available():
        raise NoCard(NO_CARD)
    records = read_evidence(results / "records")  # a damaged file is told now, not after the run
    session = _session(minutes, say)
    smallest = min((part.cap_bytes for part in parts), default=0)
    used = session.used_bytes() or 0
    if session.total_bytes - used < smallest * 9 // 10:
        raise NoCard(
            f"{format_bytes(used)} of the {format_bytes(session.total_bytes)} of {session.card} are in use, and the "
            f"smallest part needs {format_bytes(smallest)}: nothing was measured; end other programs, or use a larger "
            f"card"
        )
    if used > _BUSY_BYTES:
        say(f"other programs use {format_bytes(used)} of {session.card}: times may be longer than on an idle card")

    def on_record(record: EvidenceRecord) -> None:
        records.append(record)
        write_evidence(records, results)

    experiment = Experiment[str, EvidenceRecord](
        name="evidence", key=lambda part: _key(part, session.card), run=EvidenceRun(session, parts).run,
        file=lambda _: EVIDENCE_FILE, line=lambda part, made: f"{part}: {made.outcome} {made.message}".strip(),
    )  # fmt: skip
    names = [CEILINGS, *(part.name for part in parts)]
    made = experiment.run_missing(names, (), records=results / "records", say=say, on_record=on_record)
    return made.new, [results / "records" / EVIDENCE_FILE, *write_evidence(records, results)]


def _session(minutes: float, say: Callable[[str], None]) -> Session:
    properties = torch.cuda.get_device_properties(0)  # makes no context: the card stays as it is
    return Session(
        card=properties.name, total_bytes=properties.total_memory, used_bytes=_used_bytes,
        host_bytes=available_host_bytes() or _UNKNOWN_HOST_BYTES, budget_s=60 * minutes, say=say,
    )  # fmt: skip


def _used_bytes() -> int | None:
    """Return the memory of the whole card in use, None where NVML does not answer."""
    try:
        with closing(DeviceReader(0)) as reader:
            return reader.read().used_bytes
    except DeviceReadError:
        return None

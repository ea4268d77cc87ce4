"""All parts of the evidence within a budget of time: planned side by side on the processor, run one by one on the card.

The card takes the most valuable part whose plan is there, so that it does not wait for a long search; every record is
on disk as soon as its part is over.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from hybridtrain.units import GIB, MIB
from hybridtrain.virtual_gpu.card import Host
from hybridvalidation.card_session.child import Child, StartChild
from hybridvalidation.card_session.parts import CEILINGS, Part, ceilings_limit, decide_start, effective_cap, shortage
from hybridvalidation.card_session.plan import PlanJob, PlannedPart, card_under_cap
from hybridvalidation.card_session.record import Ceilings, EvidenceRecord, PartOutcome, Training
from hybridvalidation.card_session.train import TrainJob
from hybridvalidation.card_session.worker import Answer, CeilingsJob
from hybridvalidation.records.environment import Environment

_POLL_S = 0.2
_RECORDING_S = 5.0
"""Kept of the budget for the last record and the table."""

_HOST_SHARE = 0.85
"""Of the available host memory, for a run beside which others are still planned."""


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
        self._planning: dict[str, Child] = {}
        self._answers: dict[str, Answer] = {}
        self._unplanned: list[Part] = []
        self._ceilings: Ceilings | None = None
        self._children: list[Child] = []

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
        session.on_record(
            EvidenceRecord(
                part=CEILINGS, says="what the card does at best", outcome=answer.outcome, message=answer.message,
                started_at=started.isoformat(timespec="seconds"), duration_s=round(session.clock() - begin, 3),
                environment=session.environment, card=session.card, others_bytes=self._others_bytes,
                ceilings=answer.ceilings,
            )
        )  # fmt: skip

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
            answer = child.answer()
            if answer is not None:
                self._answers[name] = answer
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
        session.on_record(
            EvidenceRecord(
                part=part.name, says=part.says, outcome=answer.outcome, message=answer.message,
                started_at=started.isoformat(timespec="seconds"), duration_s=round(session.clock() - begin, 3),
                environment=session.environment, card=session.card, others_bytes=used or 0,
                training=_training(part, planned, job.cap_bytes, answer),
            )
        )  # fmt: skip

    def _skip(self, part: Part, reason: str, planned: PlannedPart | None = None) -> None:
        session = self._session
        cap = effective_cap(part, session.total_bytes, self._others_bytes)
        session.say(f"{part.name}: skipped, {reason}")
        session.on_record(
            EvidenceRecord(
                part=part.name, says=part.says, outcome=PartOutcome.SKIPPED, message=reason,
                started_at=datetime.now(UTC).isoformat(timespec="seconds"), duration_s=0.0,
                environment=session.environment, card=session.card, others_bytes=self._others_bytes,
                training=None if planned is None else _training(part, planned, cap, Answer()),
            )
        )  # fmt: skip

    def _start(self, verb: str, job: object, limit_s: float) -> Child:
        child = self._session.start(verb, job, limit_s)
        self._children.append(child)
        return child

    def _finish(self, child: Child) -> Answer:
        """Return the answer of a process on the card; planning goes on beside it."""
        while (answer := child.answer()) is None:
            self._plan()
            self._session.sleep(_POLL_S)
        return answer

    def _remaining(self) -> float:
        return self._end_s - self._session.clock()


def _training(part: Part, planned: PlannedPart, cap_bytes: int, answer: Answer) -> Training:
    return Training(
        model=part.model, num_params=planned.num_params, stack=planned.stack.name, says=planned.stack.says,
        plan=planned.plan, cap_bytes=cap_bytes, micro_batch_size=planned.micro_batch_size, seq_len=part.seq_len,
        accum_steps=planned.accum_steps, predicted=planned.predicted, measured=answer.measured,
    )  # fmt: skip

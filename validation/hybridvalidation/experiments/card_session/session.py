"""All parts of the evidence within a time limit: planned in parallel on the CPU, run one by one on the card.

The card runs the part of highest priority whose plan is ready; kernels need none.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import torch

from hybridtrain.errors import HybridTrainError
from hybridtrain.memory.tier import available_host_bytes
from hybridtrain.profiler.nvml import DeviceReader, DeviceReadError
from hybridtrain.stacks import default_folder
from hybridtrain.units import GIB, MIB, format_bytes, format_seconds
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.child import ONE_THREAD, Child, ChildResult
from hybridvalidation.experiment import Experiment, begin_header, versions_of
from hybridvalidation.experiments.card_session.ceilings import read_driver
from hybridvalidation.experiments.card_session.parts import (
    CEILINGS,
    CURVES,
    PAIR_STACKS,
    CardPart,
    Part,
    ScriptPart,
    all_parts,
    choose_parts,
    effective_cap,
    plain_limit,
    shortage,
    time_limit,
)
from hybridvalidation.experiments.card_session.plan import PlanJob, PlannedPart, card_under_cap
from hybridvalidation.experiments.card_session.record import (
    CURVES_FILE,
    EVIDENCE_FILE,
    Ceilings,
    EvidenceRecord,
    KernelTime,
    Training,
    read_evidence,
    script_run,
)
from hybridvalidation.experiments.card_session.run_script import ScriptJob
from hybridvalidation.experiments.card_session.table import write_evidence
from hybridvalidation.experiments.card_session.train import TrainJob
from hybridvalidation.experiments.card_session.worker import (
    Answer,
    CeilingsJob,
    CurvesJob,
    KernelsJob,
    ModelsJob,
    ScriptPlanJob,
)
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.store import read_lines
from hybridvalidation.scenario_files import ScenarioFiles

NO_CARD = (
    "no CUDA card: nothing was measured; use a machine with a CUDA card that nvidia-smi lists, and a CUDA build of "
    "torch"
)
_POLL_S = 0.2
_RECORDING_S = 5.0
"""Seconds reserved for the last record and the table."""
_CEILINGS_SECONDS = 90.0
_MODELS_SECONDS = 90.0
_SCRIPT_PLAN_SECONDS = 240.0
_ENDING_S = 15.0
"""Seconds of a part's limit in which it begins nothing more."""
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "torchvision", "nvidia-ml-py")
"""Packages whose versions a record tells."""
_HOST_SHARE = 0.85
"""Share of available host memory for a run, while others are still planned."""
_BUSY_BYTES = GIB
"""Memory of other programs above which times may be disturbed; a desktop uses less."""
_PLAIN_BYTES = 4 * GIB
"""Memory of the card without which no kernel or script is worth a try."""
_UNKNOWN_HOST_BYTES = 16 * GIB
"""Assumed host memory if the system does not report it."""

Verb: TypeAlias = Literal["ceilings", "curves", "kernels", "models", "plan", "plan_script", "script", "train"]
"""Functions of worker.py that a child process runs."""
_NO_CARD = ONE_THREAD | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
_ENVIRONMENTS = {"models": _NO_CARD, "plan": _NO_CARD, "plan_script": _NO_CARD, "script": {"HF_HUB_OFFLINE": "1"}}


def start_child(verb: Verb, job: object, limit_s: float) -> Child[Answer]:
    """Start a process; parallel planning processes get one thread each, and no card."""
    return Child(
        f"hybridvalidation.experiments.card_session.worker:{verb}", job, Answer, limit_s=limit_s,
        environment=_ENVIRONMENTS.get(verb, {}),
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
    """Result of one call of the command; ``results``: folder for what parts write themselves."""

    def __init__(self, session: Session, parts: Sequence[CardPart], results: Path) -> None:
        self._session, self._parts, self._results = session, parts, results.resolve()
        self._end_s = session.clock() + session.budget_s - _RECORDING_S
        self._others_bytes = session.used_bytes() or 0
        self._context_bytes = 0
        self._driver, self._versions = read_driver(), versions_of(_PACKAGES)
        self._unplanned: list[tuple[Verb, str, object]] = []
        self._planning: dict[str, Child[Answer]] = {}
        self._answers: dict[str, Answer] = {}
        self._loaded: dict[str, Child[Answer]] = {}
        self._children: list[Child[Answer]] = []

    def run(self, names: Sequence[str]) -> Iterator[tuple[str, EvidenceRecord]]:
        """Run the ceilings, then each part that card, host and time allow; yield the records."""
        parts = [part for part in self._parts if part.name in names]
        with TemporaryDirectory(prefix="hybridtrain-evidence-") as folder:
            self._folder = Path(folder)
            try:
                models = self._start_models(parts)
                answer, record = self._measure_ceilings()
                yield CEILINGS, record
                fault = "" if models is None else self._finish(models).message
                yield from self._run_parts(answer.ceilings, parts, fault)
            finally:
                for child in self._children:
                    child.stop()

    def _start_models(self, parts: Sequence[CardPart]) -> Child[Answer] | None:
        """Start to make the models' folders that scripts load."""
        names = {name for part in parts if isinstance(part, ScriptPart) for name in part.models()}
        job = ModelsJob(names=tuple(sorted(names)), folder=self._folder)
        return self._start("models", job, _MODELS_SECONDS) if names else None

    def _run_parts(
        self, ceilings: Ceilings | None, parts: Sequence[CardPart], models_fault: str
    ) -> Iterator[tuple[str, EvidenceRecord]]:
        waiting = list[CardPart]()
        for part in parts:
            reason = self._refusal(part, models_fault) or ("" if ceilings else "the card did not pass the first part")
            if reason or ceilings is None:
                yield part.name, self._skip(part, reason)
            else:
                self._queue_plan(part, ceilings)
                waiting.append(part)
        while waiting and (ready := self._next_ready(waiting)) is not None:
            waiting.remove(ready)
            yield ready.name, self._run_part(ready, waiting)
        for part in waiting:
            reason = "its plan was not ready in time" if isinstance(part, Part | ScriptPart) else "no time was left"
            yield part.name, self._skip(part, reason)

    def _refusal(self, part: CardPart, models_fault: str) -> str:
        """Return why this machine cannot run a part; empty: it can."""
        if isinstance(part, Part) and not effective_cap(part, self._session.total_bytes, self._others_bytes):
            return shortage(part, self._session.total_bytes, self._others_bytes)
        if isinstance(part, ScriptPart) and (missing := part.missing()):
            return f"{missing} is not installed"
        return models_fault if isinstance(part, ScriptPart) and part.models() else ""

    def _queue_plan(self, part: CardPart, ceilings: Ceilings) -> None:
        if isinstance(part, Part):
            cap = effective_cap(part, self._session.total_bytes, self._others_bytes)
            job = PlanJob(part=part, card=card_under_cap(ceilings, cap), host=self._host(part))
            self._unplanned.append(("plan", part.name, job))
        elif isinstance(part, ScriptPart):
            card = card_under_cap(ceilings, ceilings.memory_bytes)
            self._unplanned.append(
                ("plan_script", part.name, ScriptPlanJob(script=part.path, folder=self._folder, card=card))
            )
        else:
            self._answers[part.name] = Answer()

    def _measure_ceilings(self) -> tuple[Answer, EvidenceRecord]:
        session, header = self._session, begin_header()
        session.say(f"{CEILINGS}: matmuls and copies of {session.card}")
        job = CeilingsJob(used_before_bytes=session.used_bytes())
        answer = self._finish(self._start("ceilings", job, min(_CEILINGS_SECONDS, self._remaining())))
        if answer.ceilings is not None:
            self._context_bytes = -(-answer.ceilings.context_with_libraries_bytes // MIB) * MIB
        return answer, self._record(CEILINGS, "no ceilings", answer, header(), ceilings=answer.ceilings)

    def _next_ready(self, waiting: Sequence[CardPart]) -> CardPart | None:
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
            verb, name, job = self._unplanned.pop(0)
            limit_s = _SCRIPT_PLAN_SECONDS if verb == "plan_script" else self._session.budget_s
            self._planning[name] = self._start(verb, job, limit_s)

    def _host(self, part: Part) -> Host:
        available = self._session.host_bytes / GIB
        return Host(memory_gib=_HOST_SHARE * available if part.host_gib is None else min(part.host_gib, available))

    def _run_part(self, part: CardPart, waiting: Sequence[CardPart]) -> EvidenceRecord:
        answer = self._answers.pop(part.name)
        if isinstance(part, Part):
            return self._train(part, answer)
        limit_s, refusal = plain_limit(part, self._remaining())
        if refusal:
            return self._skip(part, refusal)
        header = begin_header()
        self._session.say(f"{part.name}: {part.description}")
        if isinstance(part, ScriptPart):
            plan, answer = answer, self._run_script(part, waiting, limit_s)
            figures = script_run(plan.planned_script, answer.measured_script, plan.message)
            return self._record(part.name, part.description, answer, header(), script=figures)
        if part.name == CURVES:
            rows = self._folder / CURVES_FILE
            job = CurvesJob(rows=rows, limit_s=limit_s - _ENDING_S)
            answer = self._finish(self._start("curves", job, limit_s))
            times = tuple(read_lines(rows, KernelTime))
            return self._record(part.name, part.description, answer, header(), curves=times)
        answer = self._finish(
            self._start("kernels", KernelsJob(results=self._results, limit_s=limit_s - 2 * _ENDING_S), limit_s)
        )
        return self._record(part.name, part.description, answer, header())

    def _run_script(self, part: ScriptPart, waiting: Sequence[CardPart], limit_s: float) -> Answer:
        """Run a script; the next one imports its packages meanwhile."""
        child = self._loaded.pop(part.name, None) or self._load(part)
        later = next((other for other in waiting if isinstance(other, ScriptPart)), None)
        if later is not None and later.name not in self._loaded:
            self._loaded[later.name] = self._load(later)
        self._go(part).touch()
        return self._finish(child, limit_s)

    def _load(self, part: ScriptPart) -> Child[Answer]:
        job = ScriptJob(
            script=part.path, folder=self._folder, go=self._go(part),
            trace=self._results / "traces" / f"{part.path.stem}.json.gz",
        )  # fmt: skip
        return self._start("script", job, self._session.budget_s)

    def _go(self, part: ScriptPart) -> Path:
        return self._folder / f"{part.path.stem}.go"

    def _train(self, part: Part, answer: Answer) -> EvidenceRecord:
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

    def _skip(self, part: CardPart, reason: str, planned: PlannedPart | None = None) -> EvidenceRecord:
        training = None
        if isinstance(part, Part) and planned is not None:
            cap = effective_cap(part, self._session.total_bytes, self._others_bytes)
            training = _training(part, planned, cap, Answer())
        answer = Answer(outcome=Outcome.SKIPPED, message=reason)
        return self._record(part.name, part.description, answer, begin_header()(), training=training)

    def _record(
        self, part: str, description: str, answer: Answer, header: dict[str, Any], **found: Any
    ) -> EvidenceRecord:
        found = {"others_bytes": self._others_bytes} | found
        return EvidenceRecord(
            part=part, key=_key(part, self._session.card), description=description, outcome=answer.outcome,
            message=answer.message, card=self._session.card, driver=self._driver, versions=self._versions, **header,
            **found,
        )  # fmt: skip

    def _start(self, verb: Verb, job: object, limit_s: float) -> Child[Answer]:
        child = self._session.start(verb, job, limit_s)
        self._children.append(child)
        return child

    def _finish(self, child: Child[Answer], limit_s: float = float("inf")) -> Answer:
        """Return the answer of a process, stopped after ``limit_s``; planning goes on beside it."""
        end_s = self._session.clock() + limit_s
        while (ended := child.poll()) is None:
            if self._session.clock() > end_s:
                child.stop(f"stopped after {format_seconds(limit_s)}, its time limit")
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
    smallest = min((part.cap_bytes if isinstance(part, Part) else _PLAIN_BYTES for part in parts), default=0)
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
        name="evidence", key=lambda part: _key(part, session.card), run=EvidenceRun(session, parts, results).run,
        file=lambda record: CURVES_FILE if record.part == CURVES else EVIDENCE_FILE,
        line=lambda part, made: f"{part}: {made.outcome} {made.message}".strip(),
    )  # fmt: skip
    names = [CEILINGS, *(part.name for part in parts)]
    made = experiment.run_missing(names, (), records=results / "records", say=say, on_record=on_record)
    written = {results / "records" / experiment.file(record) for record in made.new}
    return made.new, [*sorted(written), *write_evidence(records, results)]


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

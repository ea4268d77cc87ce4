"""``hybridtrain peers``: other trainers compared with this one on the same tokens and card, in one table."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import encode
from hybridtrain.config.rules import repeated
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.reports.tables import TERMINAL, table_with_notes
from hybridtrain.units import format_seconds, to_gib
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.child import ONE_THREAD, Child, ChildResult
from hybridvalidation.engines.task import ENGINES, Precision, Task
from hybridvalidation.experiment import Experiment, child_header, in_children, missing_package, versions_of
from hybridvalidation.records.asked import key_of, plan_figures, values_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.scenario import CardSpec
from hybridvalidation.scenario_files import ScenarioFiles

KINDS = (Evidence.PLANNED, Evidence.MEASURED, Evidence.EXECUTED)
"""File of records of each scenario."""
_LIMIT_S = 1800.0
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Disable compilation, unless a row asks for it: torchao compiles its update for minutes, and here it is not run."""
_HEADERS = (
    "recipe", "fits", "reserved GiB", "tokens/s", "host GiB", "bottleneck", "allocated GiB", "step time",
    "evidence", "remark",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One recipe of one engine."""

    id: str
    engine: str
    """File of ``engines/``."""
    config: str = "{}"
    """Settings as JSON, with the engine's own names (see its file's docstring)."""
    precision: Precision | None = None
    """Card; None: the scenario's."""
    micro_batches: int = 1
    """Number of micro-batches; our stacks have their own."""
    expandable_segments: bool = False
    """Whether to use expandable segments (``PYTORCH_ALLOC_CONF``); not for our stacks."""
    needs: tuple[str, ...] = ()
    """Packages in addition to the engine's."""
    remark: str = ""
    """Remark on its row."""
    left_out: str = ""
    """Reason for not running it; the table lists it with the reason."""

    def __post_init__(self) -> None:
        faults = []
        if self.engine not in ENGINES and not self.left_out:
            faults.append(f"engine: {unknown_name('engine', self.engine, ENGINES)}")
        if self.micro_batches < 1:
            faults.append(f"micro_batches: {self.micro_batches} must be at least 1")
        if self.expandable_segments and self.engine == "hybridtrain":
            faults.append("expandable_segments: our own stacks are planned without it; remove it")
        faults += self._config_faults()
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def packages(self) -> tuple[str, ...]:
        """All packages that the recipe needs."""
        return ENGINES.get(self.engine, ()) + self.needs

    @property
    def stack(self) -> str | None:
        """Name of the stack, for our own engine."""
        found: object = json.loads(self.config).get("stack")
        return found if self.engine == "hybridtrain" and isinstance(found, str) else None

    def _config_faults(self) -> list[str]:
        try:
            found = json.loads(self.config)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return [f"""config: '{self.config}' must be a JSON object; write it as '{{"optim": "adamw_torch"}}'"""]
        if self.engine == "hybridtrain" and not isinstance(found.get("stack"), str):
            return [f"""config: '{self.config}' must name a stack; write it as '{{"stack": "balanced"}}'"""]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFile:
    """``scenarios/peers/NAME.toml``. Omitted keys come from ``scenarios/NAME.toml``, with that file's stacks."""

    title: str
    description: str = ""
    """Remarks on common settings of all rows."""
    model: ModelSpec | None = None
    card: CardSpec | None = None
    workload: BatchWorkload | None = None
    host: Host | None = None
    precision: Precision = "bf16"
    runs: tuple[PeerRun, ...]

    def __post_init__(self) -> None:
        names = [run.id for run in self.runs]
        faults = [f"runs: id '{name}' appears twice; make ids unique" for name in repeated(names)]
        if self.workload is not None:
            faults += _cut_faults(self.runs, self.workload.batch_size)
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerScenario:
    """A scenario of peers with all keys resolved."""

    name: str
    title: str
    description: str
    model: ModelSpec
    card: CardSpec
    workload: BatchWorkload
    host: Host
    runs: tuple[PeerRun, ...]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step of every row."""
        return self.workload.batch_size * self.workload.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """Job of a child."""

    scenario: str
    run: str
    evidence: Evidence
    """Planned, executed (at small size) or measured."""
    card: CardSpec
    host: Host
    expandable_segments: bool
    task: Task
    packages: tuple[str, ...]
    """Required packages."""

    @property
    def key(self) -> str:
        """Digest of all values that affect the result, without names and descriptions."""
        task, stack = self.task, self.task.stack
        choices = {
            "evidence": self.evidence.value, "engine": task.engine, "config": "" if stack else task.config,
            "micro_batches": str(task.micro_batches), "precision": task.precision, "device": task.device,
            "num_steps": str(task.num_steps), "expandable_segments": str(self.expandable_segments),
        }  # fmt: skip
        values = values_of(model=task.model, workload=task.workload, card=self.card.resolve(), host=self.host)
        if stack is not None:
            values |= values_of(optimizer=stack.training().optimizer) | plan_figures(stack.plan())
        return key_of(choices, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """Figures of a run. An executed run has no bytes or times, as no card was there."""

    num_params: int = 0
    """Stored parameter elements: with adapters, a tied weight once, two 4-bit weights per byte."""
    peak_allocated_bytes: int = 0
    """Allocated bytes needed on a larger card, if the run does not fit; the next two likewise."""
    peak_reserved_bytes: int = 0
    host_peak_bytes: int = 0
    fits: bool = False
    shortage: str = ""
    """Which memory is exhausted, and at which point of the step."""
    step_time_s: float = 0.0
    bound: str = ""
    """Bottleneck of a planned step."""
    losses: tuple[float, ...] = ()
    """Loss of each computed step."""
    without_gradient: int = 0
    """Trainable parameters without a gradient: part of the model did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord(Record):
    """One run."""

    scenario: str
    run: str
    figures: PeerFigures | None
    packages: Mapping[str, str]
    """Versions of its packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recipe and its newest records."""

    run: PeerRun
    tokens_per_step: int
    records: Mapping[Evidence, PeerRecord]

    def figures(self, evidence: Evidence) -> PeerFigures | None:
        """Return the figures of a kind of run; None if missing or failed."""
        record = self.records.get(evidence)
        return None if record is None or record.outcome is not Outcome.OK else record.figures

    def tokens_per_s(self, figures: PeerFigures) -> float | None:
        """Return tokens per second; None without a step time."""
        return self.tokens_per_step / figures.step_time_s if figures.step_time_s else None

    def why(self, evidence: Evidence) -> str:
        """Return the reason for missing figures."""
        record = self.records.get(evidence)
        if self.run.left_out:
            return self.run.left_out
        if record is None:
            return f"not {evidence.value} yet"
        return "" if record.outcome is Outcome.OK else f"{evidence.value}: {record.message}"


def read_peers(files: ScenarioFiles, only: str | None = None) -> dict[str, PeerScenario]:
    """Return scenarios by name, all or one.

    Raises:
        ConfigError: an unknown scenario, or an invalid file.
    """
    folder = files.folder / "peers"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if only is not None and only not in names:
        raise ConfigError("peers", [unknown_name("scenario with peers", only, names)])
    return {name: _read(folder / f"{name}.toml", files) for name in names if only in {None, name}}


def jobs_of(scenario: PeerScenario, files: ScenarioFiles, kinds: Sequence[Evidence]) -> list[PeerJob]:
    """Return the jobs of each row that is not skipped."""
    return [
        PeerJob(
            scenario=scenario.name, run=run.id, evidence=kind, card=scenario.card, host=scenario.host,
            expandable_segments=run.expandable_segments, task=task.small() if kind is Evidence.EXECUTED else task,
            packages=run.packages,
        )
        for run in scenario.runs if not run.left_out
        for task in [_task(scenario, run, files)]
        for kind in kinds
    ]  # fmt: skip


def _task(scenario: PeerScenario, run: PeerRun, files: ScenarioFiles) -> Task:
    assert run.precision is not None, "a run without a card"
    return Task(
        engine=run.engine, model=scenario.model.resolve(), workload=scenario.workload, config=run.config,
        micro_batches=run.micro_batches, precision=run.precision,
        stack=None if run.stack is None else files.stack(run.stack),
    )  # fmt: skip


def _read(path: Path, files: ScenarioFiles) -> PeerScenario:
    file = load_toml(PeerFile, path)
    base = files.scenario(path.stem) if path.stem in files.scenario_names() else None
    missing = [name for name in ("model", "card", "workload") if getattr(file, name) is None and base is None]
    faults = [f"{name}: missing, and there is no scenarios/{path.name} to inherit it from; add it" for name in missing]
    runs = file.runs
    if base is not None:
        faults += _cut_faults(runs, (file.workload or base.workload).batch_size)
        runs += tuple(_of_stack(stack) for stack in base.stacks)
    faults += [
        f"runs: {unknown_name('stack', run.stack, files.stack_names())}"
        for run in runs
        if run.stack is not None and run.stack not in files.stack_names()
    ]
    if faults:
        raise ConfigError(str(path), faults)
    model, card, workload = (getattr(file, name) or getattr(base, name) for name in ("model", "card", "workload"))
    host = file.host or (Host() if base is None else base.host)
    return PeerScenario(
        name=path.stem, title=file.title, description=file.description, model=model, card=card, workload=workload,
        host=host,
        runs=tuple(replace(run, precision=run.precision or file.precision) for run in runs),
    )  # fmt: skip


def _of_stack(stack: str) -> PeerRun:
    return PeerRun(id=f"stack {stack}", engine="hybridtrain", config=json.dumps({"stack": stack}))


def _cut_faults(runs: Iterable[PeerRun], batch_size: int) -> list[str]:
    return [
        f"runs: '{run.id}': micro_batches: {run.micro_batches} must divide the batch ({batch_size})"
        for run in runs
        if batch_size % run.micro_batches
    ]


def read_peer_records(records: Path) -> list[PeerRecord]:
    """Return all records, of each kind oldest first."""
    return [record for kind in KINDS for record in read_lines(records / _file(kind), PeerRecord)]


def append_peer_record(records: Path, record: PeerRecord) -> Path:
    """Add a record and wait until it is on disk; return the file."""
    return append_record(records, _file(record.evidence), record)


def _file(kind: Evidence) -> Path:
    return Path("peers") / f"{kind.value}.jsonl"


def start_run(job: PeerJob) -> Child[PeerFigures]:
    """Run one row in a child process."""
    eager = {} if job.evidence is Evidence.MEASURED or _compiles(job.task.settings) else _EAGER
    work = "hybridvalidation.experiments.peer_runs:work"
    return Child(work, job, PeerFigures, limit_s=_LIMIT_S, environment=ONE_THREAD | eager)


def _compiles(settings: Mapping[str, Any]) -> bool:
    """Return whether a recipe's settings, or those inside them, ask for compilation."""
    inner = (value for value in settings.values() if isinstance(value, dict))
    return any(settings.get(name) for name in ("compile", "torch_compile")) or any(map(_compiles, inner))


def run_record(job: PeerJob, ended: ChildResult[PeerFigures]) -> PeerRecord:
    """Return the record of a finished row."""
    return PeerRecord(
        key=job.key, evidence=job.evidence, **child_header(ended), scenario=job.scenario, run=job.run,
        figures=ended.answer, packages=versions_of(job.packages),
    )  # fmt: skip


def rows_of(scenario: PeerScenario, files: ScenarioFiles, records: Iterable[PeerRecord]) -> list[Row]:
    """Return a row for each recipe with its newest records."""
    newest = {record.key: record for record in records}
    keys = {(job.run, job.evidence): job.key for job in jobs_of(scenario, files, KINDS)}
    return [
        Row(
            run=run, tokens_per_step=scenario.tokens_per_step,
            records={
                kind: record
                for kind in KINDS
                if (record := newest.get(keys.get((run.id, kind), "")))
            },
        )
        for run in scenario.runs
    ]  # fmt: skip


def peer_table(rows: Iterable[Row], style: str) -> str:
    """Return a line for each row, and another if it was measured."""
    lines = [
        _line(row, kind)
        for row in rows
        for kind in (Evidence.PLANNED, Evidence.MEASURED)
        if kind is Evidence.PLANNED or row.figures(kind) is not None
    ]
    return table_with_notes(_HEADERS, lines, style)


def versions_lines(rows: Iterable[Row]) -> list[str]:
    """Return the package versions of each engine's recipes, a line each."""
    engines: dict[str, set[str]] = {}
    for row in rows:
        told = {f"{package} {version}" for package, version in _versions(row).items()}
        engines[row.run.engine] = engines.get(row.run.engine, set()) | told
    return [f"{engine}: {', '.join(sorted(told))}." for engine, told in engines.items() if told]


def row_mapping(scenario: str, row: Row) -> dict[str, object]:
    """Return a row as ``peers --json`` prints it; bytes and seconds."""
    found: dict[str, object] = {"scenario": scenario, "id": row.run.id, "engine": row.run.engine}
    for kind in (Evidence.PLANNED, Evidence.MEASURED):
        figures = row.figures(kind)
        found[kind.value] = None if figures is None else _figures_mapping(row, figures)
    executed = row.figures(Evidence.EXECUTED)
    found["executed"] = None if executed is None else {"losses": list(executed.losses)}
    found["versions"] = dict(_versions(row))
    why = {kind.value: row.why(kind) for kind in (Evidence.PLANNED, Evidence.EXECUTED) if row.figures(kind) is None}
    return found | {"remark": row.run.remark, "why": why}


def _figures_mapping(row: Row, figures: PeerFigures) -> dict[str, object]:
    plain = {name: value for name, value in encode(figures).items() if name not in {"num_params", "losses"}}
    rates = {"step_time_s": figures.step_time_s or None, "tokens_per_s": row.tokens_per_s(figures)}
    return {"params": figures.num_params, **plain, **rates}


def _line(row: Row, kind: Evidence) -> list[str]:
    figures = row.figures(kind)
    name = f"{row.run.engine} {row.run.id}"
    if figures is None:
        return [name, *["-"] * 7, _evidence(row, kind), _joined(row.why(kind), row.run.remark)]
    tokens_per_s = row.tokens_per_s(figures)
    lost = f"{figures.without_gradient} trainable parameters without gradient" if figures.without_gradient else ""
    return [
        name, "yes" if figures.fits else "NO", f"{to_gib(figures.peak_reserved_bytes):.2f}",
        "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}",
        f"{to_gib(figures.host_peak_bytes):.2f}" if kind is Evidence.PLANNED else "-", figures.bound or "-",
        f"{to_gib(figures.peak_allocated_bytes):.2f}",
        "-" if tokens_per_s is None else format_seconds(figures.step_time_s),
        _evidence(row, kind), _joined(figures.shortage, lost, row.run.remark, _failure(row)),
    ]  # fmt: skip


def _evidence(row: Row, kind: Evidence) -> str:
    """Return the kinds of evidence of a line, and whether the recipe was executed."""
    if kind is Evidence.MEASURED:
        return "measured"
    planned = "planned, times estimated" if row.figures(kind) is not None else ""
    executed = row.figures(Evidence.EXECUTED)
    trained = "" if executed is None else f"executed small, loss {executed.losses[0]:.2f} to {executed.losses[-1]:.2f}"
    failed = "execution failed" if _failure(row) else ""
    return _joined(planned, trained, failed) or "-"


def _failure(row: Row) -> str:
    return row.why(Evidence.EXECUTED) if Evidence.EXECUTED in row.records else ""


def _versions(row: Row) -> Mapping[str, str]:
    record = row.records.get(Evidence.PLANNED) or row.records.get(Evidence.EXECUTED)
    return {} if record is None else record.packages


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def peers_command(
    *, files: ScenarioFiles, results: Path, scenario: str | None, planned: bool, record: bool, jobs: int,
    say: Callable[[str], None],
) -> tuple[str, list[dict[str, object]]]:  # fmt: skip
    """Run rows without a valid record; return a table for each scenario, and all rows as plain data.

    ``planned``: only plan. ``record``: append new records. ``jobs``: parallel processes, one on a card. ``say`` is
    called with a line per run.

    Raises:
        ConfigError: an unknown scenario, or an invalid file.
    """
    scenarios, records, has_card = read_peers(files, scenario), results / "records", torch.cuda.is_available()
    kinds = [kind for kind in KINDS if kind is Evidence.PLANNED or not planned]
    kinds = [kind for kind in kinds if kind is not Evidence.MEASURED or has_card]
    cases = [job for found in scenarios.values() for job in jobs_of(found, files, kinds)]
    experiment = Experiment[PeerJob, PeerRecord](
        name="peers", key=lambda job: job.key, file=lambda made: _file(made.evidence),
        run=in_children(start_run, run_record, 1 if has_card else jobs),
        line=lambda job, made: (
            f"{job.scenario} {job.run}: {job.evidence}, {made.outcome} {made.message} in {made.duration_s:.0f} s"
        ),
        packages=lambda job: job.packages,
    )  # fmt: skip
    known = read_peer_records(records)
    made = experiment.run_missing(cases, known, records=records if record else None, say=say)
    notes = [
        f"{job.scenario} {job.run}: not {job.evidence.value}: {missing_package(job.packages)} is not installed "
        "(pip install hybridtrain[peers])"
        for job in made.not_run
    ]
    rows = {name: rows_of(found, files, [*known, *made.new]) for name, found in scenarios.items()}
    tables = [f"{scenarios[name].title}\n\n{peer_table(found, TERMINAL)}\n" for name, found in rows.items()]
    text = "\n".join([*tables, *notes, f"{len(made.new)} new runs"])
    return text, [row_mapping(name, row) for name, found in rows.items() for row in found]

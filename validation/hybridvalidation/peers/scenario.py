"""Files of peers: one model, one card, the tokens of a step, and a recipe for each engine."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.virtual_gpu.cards.card import Host
from hybridvalidation.engines.task import ENGINES, Precision, Task
from hybridvalidation.records.asked import key_of, values_of
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.runs.job import plan_figures
from hybridvalidation.scenario import CardSpec
from hybridvalidation.scenario_files import ScenarioFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One recipe of one engine."""

    id: str
    engine: str
    """File of ``engines/``."""
    config: str = "{}"
    """JSON, in the words of the engine; what each takes stands at the top of its file."""
    precision: Precision | None = None
    """None: the scenario's."""
    micro_batches: int = 1
    """Parts that the batch is cut into; our stacks have their own number."""
    expandable_segments: bool = False
    """Whether torch's allocator grows its segments (``PYTORCH_ALLOC_CONF``); not for our stacks."""
    needs: tuple[str, ...] = ()
    """Packages beside those that the engine always needs."""
    remark: str = ""
    """What a reader of its row must know."""
    left_out: str = ""
    """Why it is not run, and stands in the table all the same."""

    def __post_init__(self) -> None:
        faults = []
        if self.engine not in ENGINES and not self.left_out:
            faults.append(f"engine: {unknown_name('engine', self.engine, ENGINES)}")
        if self.micro_batches < 1:
            faults.append(f"micro_batches: {self.micro_batches} must be at least 1; give the parts of a batch")
        if self.expandable_segments and self.engine == "hybridtrain":
            faults.append("expandable_segments: our own stacks are planned without; leave it out")
        faults += self._config_faults()
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def packages(self) -> tuple[str, ...]:
        """All packages that it needs."""
        return ENGINES.get(self.engine, ()) + self.needs

    @property
    def stack(self) -> str | None:
        """Name of the stack, of our own engine."""
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
    """``scenarios/peers/NAME.toml``. What it leaves out is that of ``scenarios/NAME.toml``, with that file's stacks."""

    title: str
    says: str = ""
    """What all rows share, and what a reader must know."""
    model: ModelSpec | None = None
    card: CardSpec | None = None
    workload: BatchWorkload | None = None
    host: Host | None = None
    precision: Precision = "bf16"
    runs: tuple[PeerRun, ...]

    def __post_init__(self) -> None:
        names = [run.id for run in self.runs]
        twice = sorted({name for name in names if names.count(name) > 1})
        faults = [f"runs: '{name}' is there twice; give each its own id" for name in twice]
        if self.workload is not None:
            faults += _cut_faults(self.runs, self.workload.batch_size)
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerScenario:
    """A file with nothing left out."""

    name: str
    title: str
    says: str
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
    """What a child is asked to run."""

    scenario: str
    run: str
    evidence: Evidence
    """Planned, executed (at small size) or measured."""
    card: CardSpec
    host: Host
    expandable_segments: bool
    task: Task

    @property
    def key(self) -> str:
        """Digest of what decides the result, resolved to values: names, and what a stack says of itself, do not."""
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


def read_peers(files: ScenarioFiles, only: str | None = None) -> dict[str, PeerScenario]:
    """Return scenarios by name, all or one.

    Raises:
        ConfigError: No such scenario, or a faulty file.
    """
    folder = files.folder / "peers"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if only is not None and only not in names:
        raise ConfigError("peers", [unknown_name("scenario with peers", only, names)])
    return {name: _read(folder / f"{name}.toml", files) for name in names if only in {None, name}}


def jobs_of(scenario: PeerScenario, files: ScenarioFiles, kinds: Iterable[Evidence]) -> list[tuple[PeerRun, PeerJob]]:
    """Return what is run for each row that is not left out."""
    kinds = list(kinds)
    return [
        (run, PeerJob(
            scenario=scenario.name, run=run.id, evidence=kind, card=scenario.card, host=scenario.host,
            expandable_segments=run.expandable_segments, task=task.small() if kind is Evidence.EXECUTED else task,
        ))
        for run in scenario.runs if not run.left_out
        for task in [_task(scenario, run, files)]
        for kind in kinds
    ]  # fmt: skip


def _task(scenario: PeerScenario, run: PeerRun, files: ScenarioFiles) -> Task:
    assert run.precision is not None, "given to each when the file was read"
    return Task(
        engine=run.engine, model=scenario.model.resolve(), workload=scenario.workload, config=run.config,
        micro_batches=run.micro_batches, precision=run.precision,
        stack=None if run.stack is None else files.stack(run.stack),
    )  # fmt: skip


def _read(path: Path, files: ScenarioFiles) -> PeerScenario:
    file = load_toml(PeerFile, path)
    base = files.scenario(path.stem) if path.stem in files.scenario_names() else None
    missing = [name for name in ("model", "card", "workload") if getattr(file, name) is None and base is None]
    faults = [f"{name}: missing; give it, for there is no scenarios/{path.name} to take it from" for name in missing]
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
        name=path.stem, title=file.title, says=file.says, model=model, card=card, workload=workload, host=host,
        runs=tuple(replace(run, precision=run.precision or file.precision) for run in runs),
    )  # fmt: skip


def _of_stack(stack: str) -> PeerRun:
    return PeerRun(id=f"stack {stack}", engine="hybridtrain", config=json.dumps({"stack": stack}))


def _cut_faults(runs: Iterable[PeerRun], batch_size: int) -> list[str]:
    return [
        f"runs: '{run.id}': micro_batches: {run.micro_batches} must divide the batch ({batch_size}); take a divisor"
        for run in runs
        if batch_size % run.micro_batches
    ]

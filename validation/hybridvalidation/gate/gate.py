"""The memory gate: dry runs of today against committed baselines. A regression fails, and so does an unrecorded win."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hybridtrain.dry_runs import dry_run_ranks, phases_of_cycle
from hybridtrain.errors import HybridTrainError
from hybridtrain.units import format_bytes
from hybridvalidation.gate.baseline_file import read_baseline, write_baseline
from hybridvalidation.records.stack_run import MemoryFigures
from hybridvalidation.runs.figures import figures_of_ranks
from hybridvalidation.scenario import Scenario, Stack
from hybridvalidation.scenario_files import ScenarioFiles

ALLOCATED_TOLERANCE = 0.0
"""Relative; the count is deterministic."""
RESERVED_TOLERANCE = 0.02
"""Relative; reserved bytes depend on the order of allocations."""
TIME_TOLERANCE = 0.05
"""Relative; an estimate."""
_SHOWN_CHANGES = 6
_STEP_NAMES = {
    2: ("first step", "later step"),
    4: tuple(phase.value for phase in phases_of_cycle()),
}
"""By the number of steps of a dry run: the first ordinary step, which allocates optimizer state, and a later one; or
those of a cycle."""


class GateExit(IntEnum):
    """Exit codes of the gate, worst first in precedence."""

    OK = 0
    OVER_BUDGET = 3
    """A stack that fitted its card does not fit any more."""
    REGRESSED = 4
    IMPROVED = 5
    """Better than the baseline: record the win, or it can be lost unseen."""
    COULD_NOT_MEASURE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StackBaseline:
    """What the gate compares of one stack."""

    fits: bool
    allocated_bytes: tuple[int, ...]
    """Peak per step: the first, which allocates optimizer state, and a later one; or that of each phase of a cycle."""
    reserved_bytes: tuple[int, ...]
    step_time_s: float
    by_unit: Mapping[str, int]
    """Holders of the peak's bytes, as ``class/unit``."""

    def __post_init__(self) -> None:
        per_step = (self.allocated_bytes, self.reserved_bytes)
        if any(len(figures) not in _STEP_NAMES or min(figures) < 1 for figures in per_step) or self.step_time_s <= 0:
            raise ValueError("allocated_bytes, reserved_bytes: 2 or 4 figures above 0 each; step_time_s above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The baseline file of one scenario."""

    scenario: str
    stacks: Mapping[str, StackBaseline]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure that left its tolerance, or a run that could not be made."""

    scenario: str
    stack: str
    exit: GateExit
    message: str
    settled_by_accept: bool = True
    """Whether recording today's figures answers it; a run that failed has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """All findings, and the baselines that today's runs would make."""

    findings: tuple[Finding, ...]
    replacements: Mapping[str, Baseline]
    num_runs: int


def worst_exit(findings: Iterable[Finding]) -> GateExit:
    """Return the code of the most serious finding."""
    order = (GateExit.COULD_NOT_MEASURE, GateExit.OVER_BUDGET, GateExit.REGRESSED, GateExit.IMPROVED)
    found = {finding.exit for finding in findings}
    return next((code for code in order if code in found), GateExit.OK)


def run_gate(files: ScenarioFiles, names: list[str], baselines: Path, on_run: Callable[[str], None]) -> GateResult:
    """Dry-run every stack of the named scenarios and compare; ``on_run`` hears of each run before it starts."""
    findings: list[Finding] = []
    replacements: dict[str, Baseline] = {}
    num_runs = 0
    for name in names:
        scenario = files.scenario(name)
        recorded = read_baseline(baselines / f"{scenario.name}.json", Baseline)
        stacks: dict[str, StackBaseline] = {}
        for stack_name in scenario.stacks:
            on_run(f"{scenario.name} {stack_name}")
            num_runs += 1
            try:
                stacks[stack_name] = measure_stack(scenario, files.stack(stack_name))
            except (HybridTrainError, ValueError, RuntimeError) as error:
                reason = f"{type(error).__name__}: {error}"
                findings.append(
                    _finding(scenario.name, stack_name, GateExit.COULD_NOT_MEASURE, reason, settled_by_accept=False)
                )
                continue
            if recorded is None or stack_name not in recorded.stacks:
                reason = "there is no baseline to compare with"
                findings.append(_finding(scenario.name, stack_name, GateExit.COULD_NOT_MEASURE, reason))
            else:
                findings += compare(scenario.name, stack_name, recorded.stacks[stack_name], stacks[stack_name])
        findings += [
            _finding(scenario.name, gone, GateExit.COULD_NOT_MEASURE, "stands in the baseline but is not run any more")
            for gone in (() if recorded is None else recorded.stacks)
            if gone not in scenario.stacks
        ]
        replacements[scenario.name] = Baseline(scenario=scenario.name, stacks=stacks)
    return GateResult(findings=tuple(findings), replacements=replacements, num_runs=num_runs)


def measure_stack(scenario: Scenario, stack: Stack) -> StackBaseline:
    """Return today's figures of a stack."""
    plan = stack.plan()
    workload = scenario.workload_of(stack.name).micro_batch(plan)
    runs = dry_run_ranks(
        scenario.model.resolve(), plan, scenario.card.resolve(), workload, host=scenario.host, config=stack.training(),
        world=scenario.ranks(),
    )  # fmt: skip
    return _baseline(figures_of_ranks(runs, with_timeline=False))


def compare(scenario: str, stack: str, old: StackBaseline, new: StackBaseline) -> list[Finding]:
    """Return what left its tolerance, with the tensor classes and blocks that moved."""
    findings = []
    moved = _moved(old.by_unit, new.by_unit)
    if old.fits and not new.fits:
        findings.append(_finding(scenario, stack, GateExit.OVER_BUDGET, f"does not fit the card any more; {moved}"))
    figures: list[tuple[str, float, float, float, bool]] = []
    for kind, olds, news, tolerance in (
        ("allocated", old.allocated_bytes, new.allocated_bytes, ALLOCATED_TOLERANCE),
        ("reserved", old.reserved_bytes, new.reserved_bytes, RESERVED_TOLERANCE),
    ):
        if len(olds) != len(news):  # a cycle came or went: only the largest peaks compare
            figures.append((f"{kind}, largest step", max(olds), max(news), tolerance, True))
            continue
        steps = _STEP_NAMES[len(olds)]
        figures += [(f"{kind}, {step}", a, b, tolerance, True) for step, a, b in zip(steps, olds, news, strict=True)]
    figures.append(("estimated step time", old.step_time_s, new.step_time_s, TIME_TOLERANCE, False))
    changed = [figure for figure in figures if abs(figure[2] / figure[1] - 1) > figure[3]]
    # Holders are those of the largest peak: they are told once, beside its step where that has changed.
    of_bytes = sorted((figure for figure in changed if figure[4]), key=lambda figure: -figure[2])
    own = next((figure for figure in of_bytes if figure[0].startswith("allocated")), next(iter(of_bytes), None))
    for figure in changed:
        what, before, after, _, is_bytes = figure
        code = GateExit.REGRESSED if after > before else GateExit.IMPROVED
        shown = (
            f"{format_bytes(before)} -> {format_bytes(after)} ({after - before:+,.0f} B)"
            if is_bytes
            else f"{before:.4f} s -> {after:.4f} s"
        )
        message = f"{what}: {shown}, {100 * (after / before - 1):+.3f} %"
        findings.append(_finding(scenario, stack, code, f"{message}; {moved}" if figure is own else message))
    return findings


def write_baselines(replacements: Mapping[str, object], folder: Path, *, accept: bool) -> list[Path]:
    """Write the baselines themselves (``accept``) or ``NAME.replacement.json`` beside them; return the paths."""
    paths = []
    for name, baseline in replacements.items():
        path = folder / (f"{name}.json" if accept else f"{name}.replacement.json")
        write_baseline(path, baseline)
        if accept:
            (folder / f"{name}.replacement.json").unlink(missing_ok=True)
        paths.append(path)
    return paths


def drop_replacements(names: list[str], folder: Path) -> None:
    """Remove the replacement files of scenarios that need none any more."""
    for name in names:
        (folder / f"{Path(name).stem}.replacement.json").unlink(missing_ok=True)


def _baseline(figures: MemoryFigures) -> StackBaseline:
    return StackBaseline(
        fits=figures.fits,
        allocated_bytes=tuple(step.allocated_bytes for step in figures.steps),
        reserved_bytes=tuple(step.reserved_bytes for step in figures.steps),
        step_time_s=figures.step_time_s,
        by_unit=figures.by_unit,
    )


def _moved(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Name the holders whose bytes at the peak changed, largest change first."""
    changes = {name: new.get(name, 0) - old.get(name, 0) for name in {*old, *new}}
    ranked = sorted(
        ((name, change) for name, change in changes.items() if change),
        key=lambda item: (-abs(item[1]), item[0]),
    )
    if not ranked:
        return "nothing moved at the peak"
    shown = ", ".join(f"{name} {change:+,} B" for name, change in ranked[:_SHOWN_CHANGES])
    rest = len(ranked) - _SHOWN_CHANGES
    return f"moved: {shown}" + (f" and {rest} more" if rest > 0 else "")


def _finding(scenario: str, stack: str, code: GateExit, message: str, *, settled_by_accept: bool = True) -> Finding:
    return Finding(scenario=scenario, stack=stack, exit=code, message=message, settled_by_accept=settled_by_accept)

"""``hybridtrain gate`` and ``records``: what is kept, planned or compiled again and compared."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from hybridkernels.ahead_of_time import KERNELS
from hybridtrain.config.encode import encode
from hybridtrain.errors import ConfigError
from hybridtrain.progress import progress_bar
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridvalidation.gate import kernel_gate
from hybridvalidation.gate.baseline_file import write_baseline
from hybridvalidation.gate.ci_text import annotation, markdown_table
from hybridvalidation.gate.gate import Finding, GateExit, worst_exit
from hybridvalidation.gate.kernel_gate import run_kernel_gate
from hybridvalidation.gate.others import NAMES, OthersPlan, accept_others, read_others, verify_others
from hybridvalidation.gate.plans import (
    ScenarioPlans,
    accept_plans,
    jobs_to_plan,
    keep_verification,
    known_verifications,
    read_plans,
    verify_plans,
)
from hybridvalidation.scenario_files import ScenarioFiles

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOrder:
    """What is compared, and what becomes of differences."""

    names: tuple[str, ...] = ()
    """Scenarios, ``recorded``, ``peers``, ``kernels``, a part of these (``recorded/peft``); empty: all scenarios."""
    accept: bool = False
    """Keep today's figures."""
    reason: str = ""
    """Why kept figures may change; it stands in the records that replace them."""
    processes: int | None = None
    """At a time; None: one for each core, unless the runs are few."""
    trusts_verified: bool = False
    """Plan nothing again that this very program has found again before."""
    keeps_verified: bool = False
    """Append to the records that this program has found them again."""
    progress: bool = False
    """Show a bar on standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What the gate found and wrote."""

    names: tuple[str, ...]
    """Scenarios that were asked for; empty: all."""
    compared: str
    findings: list[Finding]
    notes: list[str]
    """What was not compared now, and why."""
    exit_code: GateExit
    written: list[Path]
    accepted: bool

    def as_mapping(self) -> dict[str, object]:
        """Return exit, findings and files."""
        return {
            "exit": self.exit_code.name.lower(),
            "compared": self.compared,
            "findings": [encode(finding) for finding in self.findings],
            "notes": self.notes,
            "written": [path.as_posix() for path in self.written],
        }

    def as_text(self) -> str:
        """Return the same for a reader, with what to run if the change is meant."""
        lines = list[str]()
        for finding in self.findings:
            where = " ".join(part for part in (finding.scenario, finding.stack) if part)
            accepted = "accepted: " if self.accepted and self.exit_code is GateExit.OK else ""
            lines.append(f"{accepted}{finding.exit.name.lower()}: {where}: {finding.message}")
        lines += self.notes
        lines.append(f"gate: {self.exit_code.name.lower()}, {self.compared} compared")
        if self.written:
            lines.append(f"written: {', '.join(path.as_posix() for path in self.written)}")
        if self.accepted and self.written:
            lines.append("then: hybridtrain report")
        elif self.exit_code is not GateExit.OK and all(finding.settled_by_accept for finding in self.findings):
            again = " ".join(["hybridtrain gate", *self.names, '--accept --reason "WHY"'])
            lines.append(f"if the change is meant, run: {again}")
        return "\n".join(lines)

    def as_markdown(self) -> str:
        """Return the same for a pull request or a step summary."""
        rows = [[f.exit.name.lower(), f.scenario, f.stack, f.message] for f in self.findings]
        parts = [f"### Memory gate: {self.exit_code.name.lower()}, {self.compared} compared"]
        if rows:
            parts.append(markdown_table(["verdict", "scenario", "stack", "what"], rows))
        return "\n\n".join(parts) + "\n"

    def annotations(self) -> list[str]:
        """Return a line for each finding that GitHub shows as an error; none elsewhere, or where all is accepted."""
        findings = self.findings if self.exit_code is not GateExit.OK else []
        lines = (annotation(f"{f.scenario} {f.stack}: {f.message}", title=f.exit.name.lower()) for f in findings)
        return [line for line in lines if line]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One kind of thing that was compared."""

    said: str
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    accept: Callable[[], list[Path]]
    """Keeps today's figures; returns the files."""
    written: Sequence[Path] = ()


def gate_all(files: ScenarioFiles, order: GateOrder, results: Path) -> GateReport:
    """Plan or compile again what is named, and compare it with what ``results`` keeps.

    Raises:
        ConfigError: An unknown name, or figures are to be replaced without a reason.
    """
    names_of_others = [name for name in order.names if name.partition("/")[0] in NAMES]
    names_of_kernels = [name for name in order.names if name.partition("/")[0] == kernel_gate.NAME]
    scenarios = [name for name in order.names if name not in {*names_of_kernels, *names_of_others}]
    capabilities = kernel_gate.capabilities_of(names_of_kernels)
    others = read_others(files, names_of_others, results)
    plans = read_plans(files, scenarios if order.names else files.scenario_names(), results)
    is_kept = any(found.records for found in plans) or any(plan.recorded is not None for plan in others)
    is_kept |= bool(capabilities) and kernel_gate.baseline_path(results).exists()
    if order.accept and is_kept and not order.reason:
        fault = "--reason: missing; say in a line why figures that are kept may change, it stands in the new records"
        raise ConfigError("gate --accept", [fault])
    parts = [_plans_part(files, plans, order, results)] if plans else []
    parts += [_others_part(others, order)] if others else []
    parts += [_kernels_part(capabilities, order, results)] if capabilities else []
    findings = [finding for part in parts for finding in part.findings]
    written = [path for part in parts for path in part.written]
    exit_code = worst_exit(findings)
    if order.accept and findings and all(finding.settled_by_accept for finding in findings):
        exit_code = GateExit.OK
        written += [path for part in parts if part.findings for path in part.accept()]
    return GateReport(
        names=order.names, compared=" and ".join(part.said for part in parts), findings=findings,
        notes=[note for part in parts for note in part.notes], exit_code=exit_code, written=written,
        accepted=order.accept,
    )  # fmt: skip


def _plans_part(files: ScenarioFiles, plans: Sequence[ScenarioPlans], order: GateOrder, results: Path) -> _Part:
    verified = known_verifications(plans, results) if order.trusts_verified else {}
    again = [found for found in plans if found.scenario.name not in verified]
    num_plans = sum(len(found.jobs) for found in again)
    jobs = jobs_to_plan(again, plans_new=order.accept)
    with progress_bar(jobs, desc="plan", unit="run", shown=order.progress) as bar:
        planned = verify_plans(again, jobs, lambda name: _advance(bar, name), processes=order.processes)
    different = f" ({planned.num_planned} different ones)" if planned.num_planned < planned.num_compared else ""
    said = f"{planned.num_compared} dry runs{different} of {len(again)} scenarios"
    notes = [f"planned again in {planned.seconds:.0f} s by {_this_program()}"] if planned.num_planned else []
    if verified:
        newest = max(verified.values(), key=lambda done: done.started_at)
        count = sum(len(found.jobs) for found in plans) - num_plans
        notes.append(
            f"{count} dry runs of {len(verified)} scenarios were found again by this very program on "
            f"{newest.started_at[:10]}; --verify plans them once more"
        )
    return _Part(
        said=said, findings=planned.findings, notes=notes,
        accept=lambda: accept_plans(files, planned, results, order.reason),
        written=[keep_verification(results, planned)] if order.keeps_verified and planned.verified else [],
    )  # fmt: skip


def _this_program() -> str:
    here = read_environment()
    commit = (here.commit[:8] or "of no checkout") + (", with changes" if here.dirty else "")
    return f"program {program_digest()} (commit {commit}, torch {here.torch})"


def _others_part(others: Sequence[OthersPlan[Any]], order: GateOrder) -> _Part:
    with progress_bar(others, desc="plan", unit="run", shown=order.progress) as bar:
        found = verify_others(
            others, lambda name: _advance(bar, name), processes=order.processes or os.cpu_count() or 1
        )
    return _Part(
        said=f"{found.num_planned} plans of others' trainers", findings=found.findings, notes=found.notes,
        accept=lambda: accept_others(found, order.reason),
    )  # fmt: skip


def _kernels_part(capabilities: Sequence[int], order: GateOrder, results: Path) -> _Part:
    steps = range(len(KERNELS) * len(capabilities))
    with progress_bar(steps, desc="compile", unit="kernel", shown=order.progress) as bar:
        found = run_kernel_gate(
            results / "baselines", lambda name: _advance(bar, name), capabilities=capabilities, jobs=order.processes
        )

    def accept() -> list[Path]:
        path = kernel_gate.baseline_path(results)
        assert found.replacement is not None, "what could not be compiled is not settled by accepting"
        write_baseline(path, replace(found.replacement, accepted=order.reason))
        return [path]

    said = f"{found.num_compiled} compiled kernels on {len(capabilities)} cards"
    return _Part(said=said, findings=found.findings, accept=accept)


def _advance(bar: "tqdm[T]", name: str) -> None:
    bar.set_postfix_str(name)
    bar.update()

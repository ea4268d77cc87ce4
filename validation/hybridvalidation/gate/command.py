"""``hybridtrain gate``: dry runs, compiled kernels and recorded plans of today against committed baselines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from hybridkernels.ahead_of_time import KERNELS
from hybridkernels.compile_case import CAPABILITIES
from hybridtrain.config.encode import encode
from hybridvalidation.gate import kernel_gate, recorded_gate
from hybridvalidation.gate.ci_text import annotation, markdown_table
from hybridvalidation.gate.gate import Finding, GateExit, drop_replacements, run_gate, worst_exit, write_baselines
from hybridvalidation.gate.kernel_gate import KernelBaseline, run_kernel_gate
from hybridvalidation.gate.recorded_gate import run_recorded_gate
from hybridvalidation.progress import progress_bar
from hybridvalidation.scenario_files import ScenarioFiles

T = TypeVar("T")
_OTHERS = frozenset({kernel_gate.NAME, recorded_gate.NAME})
"""What can be named beside scenarios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What the gate found and wrote."""

    names: tuple[str, ...]
    """Scenarios that were asked for; empty: all."""
    compared: str
    findings: list[Finding]
    exit_code: GateExit
    written: list[Path]
    accepted: bool

    def as_mapping(self) -> dict[str, object]:
        """Return exit, findings and files."""
        return {
            "exit": self.exit_code.name.lower(),
            "findings": [encode(finding) for finding in self.findings],
            "written": [path.as_posix() for path in self.written],
        }

    def as_text(self) -> str:
        """Return the same for a reader, with what to run if the change is meant."""
        lines = []
        for finding in self.findings:
            where = " ".join(part for part in (finding.scenario, finding.stack) if part)
            accepted = "accepted: " if self.accepted and self.exit_code is GateExit.OK else ""
            lines.append(f"{accepted}{finding.exit.name.lower()}: {where}: {finding.message}")
        lines.append(f"gate: {self.exit_code.name.lower()}, {self.compared} compared")
        if self.written:
            again = " ".join(["hybridtrain gate", *self.names, "--accept"])
            hint = "" if self.accepted else f"; if the change is meant, run: {again}"
            lines.append(f"written: {', '.join(path.as_posix() for path in self.written)}{hint}")
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


def gate_all(
    files: ScenarioFiles, names: Sequence[str], folder: Path, *, accept: bool, progress: bool
) -> GateReport:  # fmt: skip
    """Compare dry runs, errors of recorded figures and, where named, compiled kernels with those in ``folder``."""
    scenarios = [name for name in names or files.scenario_names() if name not in _OTHERS]
    findings: list[Finding] = []
    replacements: dict[str, object] = {}
    said = []
    if scenarios:
        runs = [stack for name in scenarios for stack in files.scenario(name).stacks]
        with progress_bar(runs, desc="gate", unit="run", shown=progress) as bar:
            result = run_gate(files, scenarios, folder, lambda name: _advance(bar, name))
        findings += result.findings
        replacements |= result.replacements
        said.append(f"{result.num_runs} dry runs of {len(scenarios)} scenarios")
    if not names or recorded_gate.NAME in names:
        errors = run_recorded_gate(files.folder, folder.parent / "records", folder)
        if errors is not None:
            findings += errors.findings
            replacements[recorded_gate.NAME] = errors.replacement
            said.append(f"{errors.num_errors} errors of recorded figures")
    if kernel_gate.NAME in names:
        baseline, num_compiled = _gate_kernels(folder, findings, shown=progress)
        replacements |= {} if baseline is None else {kernel_gate.NAME: baseline}
        said.append(f"{num_compiled} compiled kernels on {len(CAPABILITIES)} cards")
    exit_code, written = _settle(findings, replacements, folder, accept=accept)
    return GateReport(
        names=tuple(names), compared=" and ".join(said), findings=findings, exit_code=exit_code, written=written,
        accepted=accept,
    )  # fmt: skip


def _gate_kernels(folder: Path, findings: list[Finding], *, shown: bool) -> tuple[KernelBaseline | None, int]:
    with progress_bar(range(len(KERNELS) * len(CAPABILITIES)), desc="compile", unit="kernel", shown=shown) as bar:
        result = run_kernel_gate(folder, lambda name: _advance(bar, name))
    findings += result.findings
    return result.replacement, result.num_compiled


def _settle(
    findings: list[Finding], replacements: dict[str, object], folder: Path, *, accept: bool
) -> tuple[GateExit, list[Path]]:
    """Write what ``accept`` asks for; return the exit code and the files."""
    exit_code = worst_exit(findings)
    if accept and all(finding.settled_by_accept for finding in findings):
        return GateExit.OK, write_baselines(replacements, folder, accept=True)
    if exit_code is not GateExit.OK:
        return exit_code, write_baselines(replacements, folder, accept=False)
    drop_replacements(list(replacements), folder)
    return exit_code, []


def _advance(bar: "tqdm[T]", name: str) -> None:
    bar.set_postfix_str(name)
    bar.update()

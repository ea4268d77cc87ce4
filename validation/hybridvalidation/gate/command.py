"""``hybridtrain gate`` and ``records``: plans and kernels are rebuilt and compared with the stored ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridkernels.ahead_of_time import KERNELS
from hybridtrain.config.encode import encode
from hybridtrain.errors import ConfigError
from hybridtrain.progress import progress_bar
from hybridvalidation.gate import kernel_gate
from hybridvalidation.gate.atlas import NAME as ATLAS
from hybridvalidation.gate.atlas import compare_atlas, read_cells
from hybridvalidation.gate.baseline_file import write_baseline
from hybridvalidation.gate.gate import Comparison, Finding, GateExit, Order, annotation, markdown_table, worst_exit
from hybridvalidation.gate.kernel_gate import run_kernel_gate
from hybridvalidation.gate.others import NAMES, compare_others, read_others
from hybridvalidation.gate.plans import compare_plans, read_plans
from hybridvalidation.scenario_files import ScenarioFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Findings and written files of the gate."""

    names: tuple[str, ...]
    """Requested scenarios; empty: all."""
    compared: str
    findings: list[Finding]
    notes: list[str]
    """Subjects that were not compared, with reasons."""
    exit_code: GateExit
    written: list[Path]
    accepted: bool

    def as_mapping(self) -> dict[str, object]:
        """Return exit, findings and files."""
        return {
            "exit": self.exit_code.word,
            "compared": self.compared,
            "findings": [encode(finding) for finding in self.findings],
            "notes": self.notes,
            "written": [path.as_posix() for path in self.written],
        }

    def as_text(self) -> str:
        """Return the report as text, with the command for an intended change."""
        accepted = "accepted: " if self.accepted and self.exit_code is GateExit.OK else ""
        lines = [f"{accepted}{f.exit.word}: {f.scenario} {f.stack}: {f.message}" for f in self.findings]
        lines += [*self.notes, f"gate: {self.exit_code.word}, {self.compared} compared"]
        if self.written:
            lines.append(f"written: {', '.join(path.as_posix() for path in self.written)}")
        if self.accepted and self.written:
            lines.append("then: hybridtrain report")
        elif (
            self.exit_code is not GateExit.OK
            and self.findings
            and all(finding.settled_by_accept for finding in self.findings)
        ):
            again = " ".join(["hybridtrain gate", *self.names, '--accept --reason "WHY"'])
            lines.append(f"if the change is intended, run: {again}")
        return "\n".join(lines)

    def as_markdown(self) -> str:
        """Return the report as Markdown for a pull request or a step summary."""
        rows = [[f.exit.word, f.scenario, f.stack, f.message] for f in self.findings]
        parts = [f"### Memory gate: {self.exit_code.word}, {self.compared} compared"]
        if rows:
            parts.append(markdown_table(["verdict", "scenario", "stack", "what"], rows))
        return "\n\n".join(parts) + "\n"

    def annotations(self) -> list[str]:
        """Return a GitHub error annotation per finding; none outside of GitHub, or if accepted."""
        findings = self.findings if self.exit_code is not GateExit.OK else []
        lines = (annotation(f"{f.scenario} {f.stack}: {f.message}", title=f.exit.word) for f in findings)
        return [line for line in lines if line]


def gate_all(files: ScenarioFiles, order: Order, results: Path) -> GateReport:
    """Plan or compile the given subjects again, and compare them with ``results``.

    Raises:
        ConfigError: an unknown name, or changed figures to accept without a reason.
    """
    names_of_others = [name for name in order.names if name.partition("/")[0] in NAMES]
    names_of_kernels = [name for name in order.names if name.partition("/")[0] == kernel_gate.NAME]
    scenarios = [name for name in order.names if name not in {*names_of_kernels, *names_of_others, ATLAS}]
    capabilities = kernel_gate.capabilities_of(names_of_kernels)
    others, atlas = read_others(files, names_of_others, results), read_cells(files, order, results)
    plans = read_plans(files, scenarios if order.names else files.scenario_names(), results)
    is_kept = any(found.records for found in plans) or any(plan.recorded is not None for plan in others)
    is_kept |= bool(capabilities) and kernel_gate.baseline_path(results).exists()
    if order.accept and is_kept and not order.reason:
        fault = "--reason: missing; give the reason for the changed figures, which the new records will store"
        raise ConfigError("gate --accept", [fault])
    if plans and not (is_kept or others or capabilities or order.accept):
        return GateReport(
            names=order.names, compared="nothing", findings=[], notes=[_nothing_kept(results)],
            exit_code=GateExit.COULD_NOT_MEASURE, written=[], accepted=False,
        )  # fmt: skip
    parts = [compare_plans(files, plans, order, results)] if plans else []
    parts += [compare_others(others, order)] if others else []
    parts += [compare_atlas(atlas, order)] if atlas is not None else []
    parts += [_compare_kernels(capabilities, order, results)] if capabilities else []
    findings = [finding for part in parts for finding in part.findings]
    written = [path for part in parts for path in part.written]
    exit_code = worst_exit(findings)
    if order.accept and findings and all(finding.settled_by_accept for finding in findings):
        exit_code = GateExit.OK
        written += [path for part in parts if part.findings for path in part.accept()]
    return GateReport(
        names=order.names, compared=" and ".join(part.subject for part in parts), findings=findings,
        notes=[note for part in parts for note in part.notes], exit_code=exit_code, written=written,
        accepted=order.accept,
    )  # fmt: skip


def _nothing_kept(results: Path) -> str:
    return (
        f"{results / 'records'} keeps no plan to compare with.\n"
        "- memory of your own model or script: a test with the fixture memory_plan (hybridtrain guide gate)\n"
        "- scenarios of your own, in scenarios/: hybridtrain gate --accept keeps their plans, once\n"
        "- the plans that came with hybridtrain: hybridtrain records plans them again and compares"
    )


def _compare_kernels(capabilities: Sequence[int], order: Order, results: Path) -> Comparison:
    steps = range(len(KERNELS) * len(capabilities))
    with progress_bar(steps, desc="compile", unit="kernel", shown=order.progress) as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        found = run_kernel_gate(results / "baselines", advance, capabilities=capabilities, jobs=order.processes)

    def accept() -> list[Path]:
        path = kernel_gate.baseline_path(results)
        assert found.replacement is not None, "failed compilations cannot be accepted"
        write_baseline(path, replace(found.replacement, accepted=order.reason))
        return [path]

    subject = f"{found.num_compiled} compiled kernels on {len(capabilities)} cards"
    return Comparison(subject=subject, findings=found.findings, accept=accept)

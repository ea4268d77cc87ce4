"""``hybridtrain gate``: dry runs and compiled kernels of today against committed baselines."""

import argparse
import json
import sys
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from hybridkernels.ahead_of_time import KERNELS
from hybridkernels.compile_case import CAPABILITIES
from hybridtrain.config.encode import encode
from hybridvalidation.gate import kernel_gate
from hybridvalidation.gate.gate import Finding, GateExit, drop_replacements, run_gate, worst_exit, write_baselines
from hybridvalidation.gate.kernel_gate import KernelBaseline, run_kernel_gate
from hybridvalidation.progress import progress_bar
from hybridvalidation.scenario_files import scenario_folder

T = TypeVar("T")


def gate_command(options: argparse.Namespace) -> int:
    """Compare dry runs and, where named, compiled kernels with baselines; return a ``GateExit``."""
    files = scenario_folder(options.scenarios)
    scenarios = [name for name in options.names or files.scenario_names() if name != kernel_gate.NAME]
    folder: Path = options.results / "baselines"
    findings: list[Finding] = []
    replacements: dict[str, object] = {}
    said = []
    if scenarios:
        runs = [stack for name in scenarios for stack in files.scenario(name).stacks]
        with progress_bar(runs, desc="gate", unit="run", shown=not options.json) as bar:
            result = run_gate(files, scenarios, folder, lambda name: _advance(bar, name))
        findings += result.findings
        replacements |= result.replacements
        said.append(f"{result.num_runs} dry runs of {len(scenarios)} scenarios")
    if kernel_gate.NAME in options.names:
        baseline, num_compiled = _gate_kernels(folder, findings, shown=not options.json)
        replacements |= {} if baseline is None else {kernel_gate.NAME: baseline}
        said.append(f"{num_compiled} compiled kernels on {len(CAPABILITIES)} cards")
    exit_code, written = _settle(findings, replacements, folder, accept=options.accept)
    if options.json:
        content = {
            "exit": exit_code.name.lower(),
            "findings": [encode(finding) for finding in findings],
            "written": [path.as_posix() for path in written],
        }
        sys.stdout.write(json.dumps(content) + "\n")
        return int(exit_code)
    for finding in findings:
        where = " ".join(part for part in (finding.scenario, finding.stack) if part)
        sys.stdout.write(f"{finding.exit.name.lower()}: {where}: {finding.message}\n")
    sys.stdout.write(f"gate: {exit_code.name.lower()}, {' and '.join(said)} compared\n")
    if written:
        again = " ".join(["hybridtrain gate", *options.names, "--accept"])
        hint = "" if options.accept else f"; if the change is meant, run: {again}"
        sys.stdout.write(f"written: {', '.join(path.as_posix() for path in written)}{hint}\n")
    return int(exit_code)


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

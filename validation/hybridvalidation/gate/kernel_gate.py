"""The kernel gate: resources of each Triton kernel on each card, compiled ahead of time, against the baseline."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from hybridkernels.ahead_of_time import CAPABILITIES, KERNELS, KernelResources, compile_ahead, compile_cases
from hybridtrain.config.rules import added_field
from hybridtrain.errors import ConfigError, unknown_name
from hybridvalidation.gate.baseline_file import read_baseline
from hybridvalidation.gate.gate import Finding, GateExit

NAME = "kernels"
"""Subject name of all kernels, and the baseline's file name."""
_COMPILER_SETTINGS = ("TRITON_", "PTXAS_", "DISABLE_", "LLVM_", "MLIR_")
"""Prefixes of environment variables that affect Triton's compilation."""
_CACHE_SETTING = "TRITON_CACHE_DIR"
_MEANING = {
    "registers": "registers per thread",
    "spill_bytes": "B spilled per thread",
    "shared_bytes": "B of shared memory per block",
    "code_bytes": "B of code",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBaseline:
    """The baseline file: resources by card (``sm_90``) and case."""

    triton: str
    """Triton version of these figures; other versions compile differently."""
    resources: Mapping[str, Mapping[str, KernelResources]]
    accepted: str = added_field("")
    """Reason for the change from earlier figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGateResult:
    """Findings, and the baseline of the present kernels; None if nothing could be compiled."""

    findings: tuple[Finding, ...]
    replacement: KernelBaseline | None
    num_compiled: int


def baseline_path(results: Path) -> Path:
    """Return the baseline file below a folder of results."""
    return results / "baselines" / f"{NAME}.json"


def capabilities_of(names: Sequence[str]) -> list[int]:
    """Return the cards of subject names: ``kernels`` all, ``kernels/sm_89`` one.

    Raises:
        ConfigError: an unknown card.
    """
    known = {f"{NAME}/{_card(capability)}": [capability] for capability in CAPABILITIES} | {NAME: [*CAPABILITIES]}
    faults = [unknown_name("card of kernels", name, known) for name in names if name not in known]
    if faults:
        raise ConfigError("gate", faults)
    return sorted({capability for name in names for capability in known[name]})


def run_kernel_gate(
    baselines: Path, on_kernel: Callable[[str], None], *, kernels: tuple[str, ...] = KERNELS,
    capabilities: Sequence[int] = CAPABILITIES, jobs: int | None = None,
) -> KernelGateResult:  # fmt: skip
    """Compile every case of every kernel for some cards and compare with ``kernels.json`` in the folder ``baselines``.

    ``on_kernel`` is called once per kernel and card, as ``sm_90 swiglu``. Other cards' figures stay in the baseline.
    ``jobs``: parallel processes, None: one per core.
    """
    reason = (
        "" if find_spec("triton") else ("triton is not installed, so nothing was compiled; pip install triton (Linux)")
    )
    if os.environ.get("TRITON_INTERPRET") == "1":
        reason = reason or "TRITON_INTERPRET=1: kernels are interpreted and nothing was compiled; unset it"
    if reason:
        return KernelGateResult(findings=(_not_measured("", reason, settled=False),), replacement=None, num_compiled=0)
    recorded = read_baseline(baselines / f"{NAME}.json", KernelBaseline)
    findings: list[Finding] = []
    compiled: dict[str, dict[str, KernelResources]] = {_card(capability): {} for capability in capabilities}
    for capability, kernel, results in _compile_all(kernels, capabilities, jobs or len(os.sched_getaffinity(0))):
        card = _card(capability)
        on_kernel(f"{card} {kernel}")
        for name, result in results.items():
            if isinstance(result, str):
                findings.append(_not_measured(f"{card} {name}", result, settled=False))
            else:
                compiled[card][name] = result
    here = version("triton")
    if recorded is None:
        findings.append(_not_measured("", "there is no baseline to compare with"))
    elif recorded.triton != here:
        reason = f"the baseline is of triton {recorded.triton}, but {here} is installed, which compiles differently"
        findings.append(_not_measured("", f"{reason}; install triton=={recorded.triton}"))
    else:
        findings += _compare(recorded, compiled, failed={finding.stack for finding in findings})
    # Another compiler's figures are not kept beside these.
    kept = recorded.resources if recorded is not None and recorded.triton == here else {}
    return KernelGateResult(
        findings=tuple(sorted(findings, key=lambda finding: finding.stack)),
        replacement=KernelBaseline(triton=here, resources={**kept, **compiled}),
        num_compiled=sum(map(len, compiled.values())),
    )


def _compile_all(
    kernels: tuple[str, ...], capabilities: Sequence[int], jobs: int
) -> Iterator[tuple[int, str, Mapping[str, KernelResources | str]]]:
    """Yield capability, kernel and its cases as they are done; one process sets the compiler up many times over."""
    work = [(capability, kernel) for kernel in kernels for capability in capabilities]
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compile_kernel, *pair): pair for pair in work}
        for future in as_completed(futures):
            yield *futures[future], future.result()


def _compile_kernel(capability: int, kernel: str) -> dict[str, KernelResources | str]:
    """Return resources by case, or why it could not be compiled."""
    for name in [name for name in os.environ if name.startswith(_COMPILER_SETTINGS) and name != _CACHE_SETTING]:
        del os.environ[name]  # a process of the gate's own; its baseline knows no settings
    results: dict[str, KernelResources | str] = {}
    for case in compile_cases(capability, (kernel,)):
        try:
            results[case.name] = compile_ahead(case, capability)
        except Exception as error:  # noqa: BLE001  a compiler fails in many ways; the finding names the kernel
            results[case.name] = f"{type(error).__name__}: {error}"
    return results


def _compare(
    recorded: KernelBaseline, compiled: Mapping[str, Mapping[str, KernelResources]], *, failed: set[str]
) -> Iterator[Finding]:
    for card, new in compiled.items():
        old = recorded.resources.get(card, {})
        for name in old.keys() - new.keys():
            if f"{card} {name}" not in failed:
                yield _not_measured(f"{card} {name}", "is in the baseline but is no longer compiled")
        for name in new.keys() - old.keys():
            yield _not_measured(f"{card} {name}", "there is no baseline to compare with")
        for name in old.keys() & new.keys():
            yield from _differences(f"{card} {name}", old[name], new[name])


def _differences(case: str, old: KernelResources, new: KernelResources) -> Iterator[Finding]:
    """Yield one finding for all figures that moved: the compiler is deterministic, so any change is one of the code."""
    moved = [
        (figure.name, before, after)
        for figure in fields(KernelResources)
        if (before := getattr(old, figure.name)) != (after := getattr(new, figure.name))
    ]
    if moved:
        worse = any(after > before for _, before, after in moved)
        changes = ", ".join(f"{_MEANING[name]}: {before:,} -> {after:,}" for name, before, after in moved)
        yield Finding(
            scenario=NAME, stack=case, exit=GateExit.REGRESSED if worse else GateExit.IMPROVED, message=changes
        )


def _not_measured(case: str, reason: str, *, settled: bool = True) -> Finding:
    return Finding(
        scenario=NAME, stack=case, exit=GateExit.COULD_NOT_MEASURE, message=reason, settled_by_accept=settled
    )


def _card(capability: int) -> str:
    return f"sm_{capability}"

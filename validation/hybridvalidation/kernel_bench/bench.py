"""``bench kernels``: run cases in sequence, record each at once; then judge, accept or choose by the records.

A case is checked, warmed up and timed; cases that would exceed the time limit are not started. The most important ones
come first. A provider is correct if its error against the definition is at most twice plain torch's in the same dtype.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.config.encode import encode
from hybridtrain.reports.tables import TERMINAL
from hybridtrain.run.environment import Environment, package_version, read_environment
from hybridtrain.run.program import program_digest
from hybridvalidation.experiments.card_session.ceilings import read_driver
from hybridvalidation.experiments.card_session.record import EvidenceRecord, read_evidence
from hybridvalidation.kernel_bench.case import Clock, Inputs, KernelCase, Mode, Provider, Run, Tensors
from hybridvalidation.kernel_bench.cases import OPS, plan_cases, require_names
from hybridvalidation.kernel_bench.compare import (
    CHOICES,
    Choice,
    SpeedCheck,
    UndecidedOp,
    accept_speed,
    check_speed,
    choose,
    write_choices,
)
from hybridvalidation.kernel_bench.record import (
    KERNELS_FILE,
    KernelRecord,
    ProviderResult,
    append_kernel,
    newest_kernels,
    read_kernels,
)
from hybridvalidation.kernel_bench.table import absent_lines, card_peaks, case_table, write_kernels
from hybridvalidation.kernel_bench.timing import Stopwatch, make_stopwatch, time_in_turn
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.scenario import Target

CASE_BUDGET_S = 1.0
"""Seconds for the samples of a case, without checking and compiling."""
QUICK_BUDGET_S = 0.25
CASE_ESTIMATE_S = 8.0
"""Assumed seconds of a case before the first one is timed: compilers run."""
_CANNOT_RUN = "cannot run here"
"""Text in the error of an op forced to a missing provider (hybridkernels.provider)."""


@dataclass(frozen=True, slots=True)
class OutputTolerance:
    """Exact value and tolerance of one output."""

    exact: Tensor
    largest: float
    """Largest magnitude of the exact value."""
    allowed: float
    """Largest absolute error."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The output with the largest error relative to its tolerance; errors are over the largest exact value."""

    error: float = 0.0
    allowed: float = 0.0
    message: str = ""
    """Why it is wrong; empty: it is correct."""


def make_bounds(case: KernelCase, inputs: Inputs) -> tuple[OutputTolerance, ...]:
    """Return exact value and tolerance of every output of a case.

    Raises:
        RuntimeError: the definition gives non-finite numbers.
    """
    exact = call(case, case.exact(inputs))
    plain = call(case, case.same_dtype(inputs))
    return tuple(_bound(truth, same, case.floor) for truth, same in zip(exact, plain, strict=True))


def _bound(truth: Tensor, same: Tensor, floor: float | None) -> OutputTolerance:
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    error = largest_difference(same, truth)
    if not (largest < float("inf") and error < float("inf")):
        raise RuntimeError("the definition gives numbers that are not finite")
    if floor is None:  # one rounding of the largest value: plain torch may happen to be exact, or to round just once
        floor = torch.finfo(same.dtype).eps / 2 if same.is_floating_point() else 0.0
    return OutputTolerance(truth.detach(), largest, 2 * error + floor * largest)


def call(case: KernelCase, run: Run) -> Tensors:
    """Return the judged outputs of the last of the calls before the check."""
    for _ in range(case.checked_calls - 1):
        run()
    return case.seen(run())


def judge(outputs: Sequence[Tensor], bounds: Sequence[OutputTolerance]) -> Judgement:
    """Return whether all outputs are within their bounds."""
    if len(outputs) != len(bounds):
        return Judgement(message=f"{len(outputs)} outputs, {len(bounds)} expected")
    shares: list[tuple[float, Judgement]] = []
    for place, (output, bound) in enumerate(zip(outputs, bounds, strict=True)):
        if output.shape != bound.exact.shape:
            shapes = f"{tuple(output.shape)}, expected {tuple(bound.exact.shape)}"
            return Judgement(message=f"output {place} has shape {shapes}")
        error, scale = largest_difference(output, bound.exact), bound.largest or 1.0
        if not error < float("inf"):
            return Judgement(message=f"output {place} is not finite")
        message = "" if error <= bound.allowed else f"output {place}: error {error:.3g} is above {bound.allowed:.3g}"
        share = error / bound.allowed if bound.allowed else float(error > 0)
        shares.append((share, Judgement(error / scale, bound.allowed / scale, message)))
    return max(shares, key=lambda pair: pair[0])[1]


def largest_difference(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference; NaN stays NaN."""
    if not actual.numel():
        return 0.0
    wide = torch.promote_types(exact.dtype, torch.float32)
    return float((actual.detach().to(exact.device, wide) - exact.to(wide)).abs_().max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Device of a benchmark, and callbacks."""

    device: torch.device
    card: str
    driver: str
    triton: str
    environment: Environment
    budget_s: float = CASE_BUDGET_S
    """Seconds for the samples of a case."""
    on_record: Callable[[KernelRecord], None]
    log: Callable[[str], None]
    now: Callable[[], float] = time.perf_counter
    stopwatch: Callable[[Clock, torch.device], Stopwatch] = make_stopwatch

    @property
    def on_card(self) -> bool:
        """Whether a CUDA card is timed."""
        return self.device.type == "cuda"

    def card_answers(self) -> bool:
        """Return whether the card's context still works; an out-of-bounds access breaks it."""
        try:
            if self.on_card:
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def free(self) -> None:
        """Free cached memory, so that every provider starts equally."""
        if self.on_card and self.card_answers():
            torch.cuda.empty_cache()

    def peak_bytes(self, run: Run) -> int | None:
        """Return the peak bytes of a call above those held before; None on a CPU."""
        if not self.on_card:
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device) - before)


@dataclass(slots=True)
class BenchOutcome:
    """New records, and missing cases."""

    records: list[KernelRecord] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """Cases without time left, or after the loss of the card."""
    lost_card: str = ""
    """Case after which the card's context was lost, so that later calls fail; empty: none."""


def run_cases(bench: Bench, cases: Sequence[KernelCase], *, limit_s: float) -> BenchOutcome:
    """Run cases in order until ``limit_s``; each record is handed on before the next case."""
    outcome, begin, longest = BenchOutcome(), bench.now(), 0.0
    for place, case in enumerate(cases):
        left = limit_s - (bench.now() - begin)
        if outcome.lost_card or left < longest:
            outcome.not_run = [later.name for later in cases[place:]]
            break
        bench.log(f"[{place + 1}/{len(cases)}, {left:.0f} s left] {case.name}")
        record = run_case(bench, case)
        bench.on_record(record)
        outcome.records.append(record)
        recent = (earlier.duration_s for earlier in outcome.records[-5:])
        longest = max(*recent, min(CASE_ESTIMATE_S, 0.1 * limit_s))
        outcome.lost_card = "" if bench.card_answers() else case.name
    return outcome


def run_case(bench: Bench, case: KernelCase) -> KernelRecord:
    """Return the record of one case, including providers' errors."""
    started_at, begin = datetime.now(UTC).isoformat(timespec="seconds"), bench.now()
    try:
        results = _measure(bench, case)
    except Exception as error:  # noqa: BLE001  inputs or definition: no provider can be judged
        results = [_result(provider, Outcome.ERROR, f"not judged: {_text(error)}") for provider in case.providers]
    bench.free()
    return KernelRecord(
        key=f"{case.name}, {bench.card}", program=program_digest(), op=case.op, choice=case.key, shape=case.shape,
        dtype=case.dtype, mode=case.mode, clock=case.clock if bench.on_card else Clock.WALL,  # a processor has no other
        num_bytes=case.num_bytes, flops=case.flops, uses_tensor_cores=case.uses_tensor_cores, results=tuple(results),
        card=bench.card, driver=bench.driver, triton=bench.triton,
        evidence=Evidence.MEASURED if bench.on_card else Evidence.EXECUTED, started_at=started_at,
        duration_s=bench.now() - begin, environment=bench.environment,
    )  # fmt: skip


def _measure(bench: Bench, case: KernelCase) -> list[ProviderResult]:
    inputs = case.make_inputs(bench.device)
    bounds = make_bounds(case, inputs)
    bench.free()
    stopwatch = bench.stopwatch(case.clock, bench.device)
    results: dict[str, ProviderResult] = {}
    runs: dict[str, Run] = {}
    for provider in case.providers:
        results[provider.name], run = _prepare(bench, case, provider, inputs, bounds, stopwatch)
        if run is not None:
            runs[provider.name] = run
        bench.free()

    def on_fault(name: str, error: Exception) -> None:
        results[name] = replace(results[name], outcome=Outcome.ERROR, message=_text(error))

    times = time_in_turn(runs, stopwatch, budget_s=bench.budget_s, on_fault=on_fault, now=bench.now)
    return [replace(result, times=times.get(name)) for name, result in results.items()]


def _prepare(
    bench: Bench,
    case: KernelCase,
    provider: Provider,
    inputs: Inputs,
    bounds: tuple[OutputTolerance, ...],
    stopwatch: Stopwatch,
) -> tuple[ProviderResult, Run | None]:
    """Return a provider's result so far, and the call to time; none where it is missing, wrong or failed."""
    if provider.missing:
        return _result(provider, Outcome.SKIPPED, provider.missing), None
    try:
        run = provider.setup(inputs)
        verdict = judge(call(case, run), bounds)
        outcome = Outcome.WRONG if verdict.message else Outcome.OK
        result = replace(
            _result(provider, outcome, verdict.message), error=verdict.error, allowed_error=verdict.allowed
        )
        if verdict.message:
            return result, None
        stopwatch.warm_up(run)
        return replace(result, peak_bytes=bench.peak_bytes(run)), run
    except Exception as error:  # noqa: BLE001  libraries fail in many ways; the others go on
        is_missing = isinstance(error, ImportError) or (isinstance(error, ValueError) and _CANNOT_RUN in str(error))
        return _result(provider, Outcome.SKIPPED if is_missing else Outcome.ERROR, _text(error)), None


def _result(provider: Provider, outcome: Outcome, message: str) -> ProviderResult:
    return ProviderResult(
        provider=provider.name, is_ours=provider.is_ours, is_choosable=provider.is_choosable, outcome=outcome,
        message=message,
    )  # fmt: skip


def _text(error: Exception) -> str:
    """Return type and beginning of an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """Order of a benchmark: cases to time, and use of the times."""

    only: Sequence[str] = ()
    """Ops; empty: all."""
    modes: Sequence[str] = ()
    """Empty: all."""
    quick: bool = False
    """One shape of each op, fewer samples."""
    limit_s: float = 600.0
    """Time limit; cases that would exceed it are not started."""
    recorded: bool = False
    """Run nothing; use the newest record of each case."""
    check: bool = False
    accept: bool = False
    choose: bool = False


@dataclass(slots=True)
class BenchReport:
    """Records, decisions, and written files."""

    outcome: BenchOutcome
    evidence: Sequence[EvidenceRecord]
    """Measurements of the card itself: peaks for the table."""
    is_accepted: bool = False
    files: list[Path] = field(default_factory=list)
    check: SpeedCheck | None = None
    chosen: list[Choice] = field(default_factory=list)
    undecided: list[UndecidedOp] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Failures of this project's own providers."""
        return [
            f"{record.name}: {result.provider} is {result.outcome}: {result.message}"
            for record in self.outcome.records
            for result in record.results
            if result.is_ours and result.outcome in {Outcome.WRONG, Outcome.ERROR}
        ]

    @property
    def exit_code(self) -> int:
        """1 if one of our providers is wrong or failed, or the card was lost; else the comparison's."""
        if self.faults or self.outcome.lost_card:
            return 1
        return 0 if self.check is None or self.is_accepted else int(self.check.exit_code)

    def as_mapping(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "exit": self.exit_code,
            "records": [encode(record) for record in self.outcome.records],
            "not_run": self.outcome.not_run,
            "lost_card": self.outcome.lost_card,
            "faults": self.faults,
            "findings": [] if self.check is None else [encode(finding) for finding in self.check.findings],
            "chosen": [encode(row) for row in self.chosen],
            "undecided": [encode(row) for row in self.undecided],
            "files": [path.as_posix() for path in self.files],
        }

    def as_text(self) -> str:
        """Return a table per card, then lists of missing, wrong, slower and chosen ones."""
        records, lost_card, not_run = self.outcome.records, self.outcome.lost_card, self.outcome.not_run
        parts = [
            f"{card} ({'measured' if of_card[0].is_on_card else 'executed'})\n"
            f"{case_table(of_card, card_peaks(card, self.evidence), TERMINAL)}"
            for card in dict.fromkeys(record.card for record in records)
            if (of_card := [record for record in records if record.card == card])
        ]
        parts.append("\n".join(absent_lines(records)) or "every provider was timed")
        if lost_card:
            parts.append(
                f"the card stopped answering after {lost_card}: a kernel may have written out of bounds; run the rest "
                f"with --only, without that op"
            )
        if not_run:
            parts.append(f"not run: {len(not_run)} cases ({', '.join(not_run)}); give more --minutes")
        parts += self.faults
        if self.check is not None:
            for finding in self.check.findings:
                parts.append(
                    f"{finding.exit.name.lower()}: {finding.case} {finding.provider} {finding.message}".replace(
                        "  ", " "
                    )
                )
            code, compared, new = self.check.exit_code.name.lower(), self.check.num_compared, self.check.num_new
            parts.append(f"check: {code}, {compared} times compared, {new} new")
        parts += [f"chosen: {row.op} on {row.card}: {row.provider}" for row in self.chosen]
        parts += [f"default order kept: {row.op} on {row.card}: {row.reason}" for row in self.undecided]
        parts.append(f"written: {', '.join(path.as_posix() for path in self.files) or 'nothing'}")
        return "\n\n".join(parts)


def bench_kernels(
    order: BenchOrder, results: Path, targets: Mapping[str, Target], log: Callable[[str], None]
) -> BenchReport:
    """Time the kernels; with ``order.recorded``, the newest record of each case replaces a run.

    Raises:
        ConfigError: an unknown op or mode.
        RecordError: a record file is damaged.
    """
    require_names(order.only, order.modes)
    folder, baselines = results / "records", results / "baselines"
    known, evidence = read_kernels(folder), read_evidence(folder)  # a damaged file is told now, not after the run

    def on_record(record: KernelRecord) -> None:
        append_kernel(folder, record)
        known.append(record)
        write_kernels(known, results, evidence, targets)

    outcome = _recorded(order, known) if order.recorded else _run_all(order, on_record, log)
    report = BenchReport(outcome, evidence, order.accept)
    report.files += [folder / KERNELS_FILE] if outcome.records and not order.recorded else []
    report.files += write_kernels(known, results, evidence, targets)
    if order.check:
        report.check = check_speed(outcome.records, baselines)
    if order.accept:
        report.files += accept_speed(outcome.records, baselines)
    if order.choose:
        report.chosen, report.undecided = choose(known)
        write_choices(report.chosen, report.undecided, CHOICES)
        report.files.append(CHOICES)
    return report


def _run_all(order: BenchOrder, on_record: Callable[[KernelRecord], None], log: Callable[[str], None]) -> BenchOutcome:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = plan_cases(device, only=order.only, modes=order.modes, quick=order.quick)
    environment, on_card = read_environment(), device.type == "cuda"
    bench = Bench(
        device=device, card=environment.gpu if on_card else environment.cpu, driver=read_driver() if on_card else "",
        triton=package_version("triton"), environment=environment,
        budget_s=QUICK_BUDGET_S if order.quick else CASE_BUDGET_S, on_record=on_record, log=log,
    )  # fmt: skip
    if not on_card:
        log("no CUDA card: small shapes on the CPU, executed; these times say nothing about a card")
    return run_cases(bench, cases, limit_s=order.limit_s)


def _recorded(order: BenchOrder, known: Sequence[KernelRecord]) -> BenchOutcome:
    ops, modes = order.only or OPS, order.modes or list(Mode)
    return BenchOutcome([record for record in newest_kernels(known) if record.op in ops and record.mode in modes])

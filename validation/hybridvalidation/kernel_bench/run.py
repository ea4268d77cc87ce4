"""Run cases one after the other: check, warm up, time in turn, record at once; stop before the time is over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch

from hybridvalidation.kernel_bench.case import Case, Clock, Inputs, Provider, Run
from hybridvalidation.kernel_bench.check import Bound, call, judge, make_bounds
from hybridvalidation.kernel_bench.record import KernelRecord, ProviderResult
from hybridvalidation.kernel_bench.timing import Stopwatch, make_stopwatch, time_in_turn
from hybridvalidation.records.environment import Environment
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.program import current_program

CASE_BUDGET_S = 1.0
"""For the samples of a case; checking and compiling come on top."""
QUICK_BUDGET_S = 0.25
CASE_ESTIMATE_S = 8.0
"""What a case may take in all before the first one has been seen: compilers run."""
_CANNOT_RUN = "cannot run here"
"""What an op says that is made to take a provider it does not have (hybridkernels.provider)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where cases run, and who hears of it."""

    device: torch.device
    card: str
    driver: str
    triton: str
    environment: Environment
    budget_s: float = CASE_BUDGET_S
    """Of one case."""
    on_record: Callable[[KernelRecord], None]
    say: Callable[[str], None]
    now: Callable[[], float] = time.perf_counter
    stopwatch: Callable[[Clock, torch.device], Stopwatch] = make_stopwatch


@dataclass(slots=True)
class BenchOutcome:
    """What came of it."""

    records: list[KernelRecord] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """Cases for which no time was left, or no card any more."""
    lost_card: str = ""
    """After which case the card's context was gone; every later call would fail."""


def run_cases(bench: Bench, cases: Sequence[Case], *, limit_s: float) -> BenchOutcome:
    """Run cases in their order until ``limit_s`` is over; each record is handed on before the next case begins."""
    outcome, begin, longest = BenchOutcome(), bench.now(), CASE_ESTIMATE_S
    for place, case in enumerate(cases):
        left = limit_s - (bench.now() - begin)
        if left < (longest if outcome.records else 0.0):
            outcome.not_run = [later.name for later in cases[place:]]
            break
        bench.say(f"[{place + 1}/{len(cases)}, {left:.0f} s left] {case.name}")
        record = run_case(bench, case)
        bench.on_record(record)
        outcome.records.append(record)
        longest = max(_longest(outcome.records), min(CASE_ESTIMATE_S, 0.1 * limit_s))
        if not _card_answers(bench.device):
            outcome.lost_card = case.name
            outcome.not_run = [later.name for later in cases[place + 1 :]]
            break
    return outcome


def run_case(bench: Bench, case: Case) -> KernelRecord:
    """Return the record of one case; whatever a provider does wrong is in it."""
    started_at, begin = datetime.now(UTC).isoformat(timespec="seconds"), bench.now()
    try:
        results = _measure(bench, case)
    except Exception as error:  # noqa: BLE001  inputs or definition: no provider can be judged
        results = [_result(provider, Outcome.ERROR, f"not judged: {_text(error)}") for provider in case.providers]
    _free(bench.device)
    clock = case.clock if bench.device.type == "cuda" else Clock.WALL  # a processor has no other
    return KernelRecord(
        key=f"{case.name}, {bench.card}", program=current_program().digest,
        op=case.op, choice=case.key, shape=case.shape, dtype=case.dtype, mode=case.mode, clock=clock,
        num_bytes=case.num_bytes, flops=case.flops, uses_tensor_cores=case.uses_tensor_cores, results=tuple(results),
        card=bench.card, driver=bench.driver, triton=bench.triton,
        evidence=Evidence.MEASURED if bench.device.type == "cuda" else Evidence.EXECUTED, started_at=started_at,
        duration_s=bench.now() - begin, environment=bench.environment,
    )  # fmt: skip


def _measure(bench: Bench, case: Case) -> list[ProviderResult]:
    inputs = case.make_inputs(bench.device)
    bounds = make_bounds(case, inputs)
    _free(bench.device)
    stopwatch = bench.stopwatch(case.clock, bench.device)
    results: dict[str, ProviderResult] = {}
    runs: dict[str, Run] = {}
    for provider in case.providers:
        result, run = _prepare(bench, case, provider, inputs, bounds, stopwatch)
        results[provider.name] = result
        if run is not None:
            runs[provider.name] = run
        _free(bench.device)

    def on_fault(name: str, error: Exception) -> None:
        results[name] = replace(results[name], outcome=Outcome.ERROR, message=_text(error))

    times = time_in_turn(runs, stopwatch, budget_s=bench.budget_s, on_fault=on_fault, now=bench.now)
    return [replace(result, times=times.get(name)) for name, result in results.items()]


def _prepare(
    bench: Bench, case: Case, provider: Provider, inputs: Inputs, bounds: tuple[Bound, ...], stopwatch: Stopwatch
) -> tuple[ProviderResult, Run | None]:
    """Return a provider's result so far, and what to time; nothing to time where it is missing, wrong or failed."""
    if provider.missing:
        return _result(provider, Outcome.SKIPPED, provider.missing), None
    try:
        run = provider.setup(inputs)
        verdict = judge(call(case, run), bounds)
        found = replace(
            _result(provider, Outcome.OK, verdict.message), error=verdict.error, allowed_error=verdict.allowed
        )
        if not verdict.is_right:
            return replace(found, outcome=Outcome.WRONG), None
        stopwatch.warm_up(run)
        return replace(found, peak_bytes=_peak_bytes(bench.device, run)), run
    except Exception as error:  # noqa: BLE001  libraries fail in many ways; the others go on
        is_missing = isinstance(error, ImportError) or (isinstance(error, ValueError) and _CANNOT_RUN in str(error))
        outcome = Outcome.SKIPPED if is_missing else Outcome.ERROR
        return _result(provider, outcome, _text(error)), None


def _peak_bytes(device: torch.device, run: Run) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _free(device: torch.device) -> None:
    """Give cached memory back: the next provider finds what the first one found."""
    if device.type == "cuda" and _card_answers(device):
        torch.cuda.empty_cache()


def _card_answers(device: torch.device) -> bool:
    """Whether the card's context still works; after an access out of bounds nothing does."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _longest(records: Sequence[KernelRecord]) -> float:
    return max(record.duration_s for record in records[-5:])


def _result(provider: Provider, outcome: Outcome, message: str) -> ProviderResult:
    return ProviderResult(
        provider=provider.name, is_ours=provider.is_ours, is_choosable=provider.is_choosable, outcome=outcome,
        message=message,
    )  # fmt: skip


def _text(error: Exception) -> str:
    """Return type and beginning of an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__

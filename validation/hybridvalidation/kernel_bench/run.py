"""Run cases one after the other: check, warm up, time in turn, record at once; stop before the time is over.

The cases that most hangs on come first. A provider is right when its error against the definition is at most twice that
of plain torch in the same dtype.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch
from torch import Tensor

from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.run.environment import Environment
from hybridtrain.run.program import program_digest
from hybridvalidation.kernel_bench.attention import attention_cases
from hybridvalidation.kernel_bench.case import Clock, Inputs, KernelCase, Mode, Provider, Run, Tensors
from hybridvalidation.kernel_bench.elementwise import elementwise_cases
from hybridvalidation.kernel_bench.int8 import int8_cases
from hybridvalidation.kernel_bench.loss import loss_cases
from hybridvalidation.kernel_bench.record import KernelRecord, ProviderResult
from hybridvalidation.kernel_bench.state import state_cases
from hybridvalidation.kernel_bench.timing import Stopwatch, make_stopwatch, time_in_turn
from hybridvalidation.records.outcome import Evidence, Outcome

OPS = (
    "causal_attention", "linear_cross_entropy", "adamw_int8", "adamw_int8_rounded", "swiglu", "geglu", "rssm_gru",
    "state_encoding", "moment_statistics", "int8_quantize", "int8_dequantize", "rms_norm", "layer_norm", "rotary",
)  # fmt: skip
"""By the share of a step that hangs on their speed, and by how little is known of it."""

_MAKERS: tuple[Callable[..., Iterable[KernelCase]], ...] = (
    attention_cases, loss_cases, int8_cases, elementwise_cases, state_cases
)  # fmt: skip
_MODE_ORDER = (Mode.BOTH, Mode.FORWARD, Mode.BACKWARD)
"""Both decides the choice of a provider."""


def plan_cases(device: torch.device, *, only: Sequence[str], modes: Sequence[str], quick: bool) -> list[KernelCase]:
    """Return the cases of a device: first one of each op, then the rest, op by op in the order of ``OPS``.

    Args:
        device: Where they will run.
        only: Ops; empty: all.
        modes: Empty: all.
        quick: One shape of each op.

    Raises:
        ConfigError: as ``require_names``.
    """
    require_names(only, modes)
    wanted = [mode for mode in _MODE_ORDER if not modes or mode in modes]
    cases = [case for make in _MAKERS for case in make(device, wanted, quick=quick) if case.op in (only or OPS)]
    by_op = [[case for case in cases if case.op == op] for op in OPS]
    return [case for found in by_op for case in found[:1]] + [case for found in by_op for case in found[1:]]


def require_names(only: Sequence[str], modes: Sequence[str]) -> None:
    """Refuse unknown ops and modes.

    Raises:
        ConfigError: an op or a mode that nobody knows; all of them are named.
    """
    faults = [unknown_name("op", name, OPS) for name in only if name not in OPS]
    faults += [unknown_name("mode", name, list(Mode)) for name in modes if name not in list(Mode)]
    if faults:
        raise ConfigError("--only, --modes", faults)


@dataclass(frozen=True, slots=True)
class Bound:
    """Truth and tolerance of one output."""

    exact: Tensor
    largest: float
    """Largest magnitude of the truth."""
    allowed: float
    """Largest absolute error."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The output nearest to its bound, or furthest beyond it; errors over the largest value of the truth."""

    error: float
    allowed: float
    is_right: bool
    message: str = ""


def make_bounds(case: KernelCase, inputs: Inputs) -> tuple[Bound, ...]:
    """Return truth and tolerance of every output of a case.

    Raises:
        RuntimeError: the definition itself gives numbers that are not finite.
    """
    exact = call(case, case.exact(inputs))
    plain = call(case, case.same_dtype(inputs))
    return tuple(_bound(truth, same, case.floor) for truth, same in zip(exact, plain, strict=True))


def call(case: KernelCase, run: Run) -> Tensors:
    """Return what is judged of the outputs of the last of the calls after which a case is checked."""
    for _ in range(case.checked_calls - 1):
        run()
    return case.seen(run())


def judge(outputs: Sequence[Tensor], bounds: Sequence[Bound]) -> Judgement:
    """Return whether all outputs are within their bounds."""
    if len(outputs) != len(bounds):
        return Judgement(0.0, 0.0, is_right=False, message=f"{len(outputs)} outputs, {len(bounds)} expected")
    worst: tuple[float, Judgement] | None = None
    for place, (output, bound) in enumerate(zip(outputs, bounds, strict=True)):
        if output.shape != bound.exact.shape:
            shapes = f"{tuple(output.shape)}, expected {tuple(bound.exact.shape)}"
            return Judgement(0.0, 0.0, is_right=False, message=f"output {place} has shape {shapes}")
        error = largest_difference(output, bound.exact)
        if not error < float("inf"):
            return Judgement(0.0, 0.0, is_right=False, message=f"output {place} is not finite")
        scale = bound.largest or 1.0
        found = Judgement(
            error / scale, bound.allowed / scale, error <= bound.allowed,
            "" if error <= bound.allowed else f"output {place}: error {error:.3g} is above {bound.allowed:.3g}",
        )  # fmt: skip
        share = error / bound.allowed if bound.allowed else float(error > 0)
        if worst is None or share > worst[0]:
            worst = (share, found)
    assert worst is not None, "a case has an output"
    return worst[1]


def largest_difference(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference; NaN stays NaN."""
    if not actual.numel():
        return 0.0
    wide = torch.promote_types(exact.dtype, torch.float32)
    return float((actual.detach().to(exact.device, wide) - exact.to(wide)).abs_().max())


def _bound(truth: Tensor, same: Tensor, floor: float | None) -> Bound:
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    error = largest_difference(same, truth)
    if not (largest < float("inf") and error < float("inf")):
        raise RuntimeError("the definition gives numbers that are not finite")
    if floor is None:  # one rounding of the largest value: plain torch may happen to be exact, or to round just once
        floor = torch.finfo(same.dtype).eps / 2 if same.is_floating_point() else 0.0
    return Bound(truth.detach(), largest, 2 * error + floor * largest)


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


def run_cases(bench: Bench, cases: Sequence[KernelCase], *, limit_s: float) -> BenchOutcome:
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


def run_case(bench: Bench, case: KernelCase) -> KernelRecord:
    """Return the record of one case; whatever a provider does wrong is in it."""
    started_at, begin = datetime.now(UTC).isoformat(timespec="seconds"), bench.now()
    try:
        results = _measure(bench, case)
    except Exception as error:  # noqa: BLE001  inputs or definition: no provider can be judged
        results = [_result(provider, Outcome.ERROR, f"not judged: {_text(error)}") for provider in case.providers]
    _free(bench.device)
    clock = case.clock if bench.device.type == "cuda" else Clock.WALL  # a processor has no other
    return KernelRecord(
        key=f"{case.name}, {bench.card}", program=program_digest(),
        op=case.op, choice=case.key, shape=case.shape, dtype=case.dtype, mode=case.mode, clock=clock,
        num_bytes=case.num_bytes, flops=case.flops, uses_tensor_cores=case.uses_tensor_cores, results=tuple(results),
        card=bench.card, driver=bench.driver, triton=bench.triton,
        evidence=Evidence.MEASURED if bench.device.type == "cuda" else Evidence.EXECUTED, started_at=started_at,
        duration_s=bench.now() - begin, environment=bench.environment,
    )  # fmt: skip


def _measure(bench: Bench, case: KernelCase) -> list[ProviderResult]:
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
    bench: Bench, case: KernelCase, provider: Provider, inputs: Inputs, bounds: tuple[Bound, ...], stopwatch: Stopwatch
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

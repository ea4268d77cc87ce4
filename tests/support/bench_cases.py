"""Benchmark cases of nothing in particular, and a stopwatch whose times are given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hybridtrain.run.environment import read_environment
from hybridvalidation.kernel_bench.bench import Bench
from hybridvalidation.kernel_bench.case import Clock, Inputs, KernelCase, Mode, Provider, Run, Setup
from hybridvalidation.kernel_bench.record import KernelRecord, ProviderResult
from hybridvalidation.kernel_bench.timing import Stopwatch, Times
from hybridvalidation.records.outcome import Evidence, Outcome

CPU = torch.device("cpu")
ENVIRONMENT = read_environment()
H200 = "NVIDIA H200"


def doubled(factor: float = 2.0) -> Setup:
    """A provider of ``2 x``; another factor makes it wrong."""
    return lambda inputs: lambda: (inputs.args[0] * factor,)


def provider(name: str, setup: Setup | None = None, **changes: Any) -> Provider:
    return replace(Provider(name=name, setup=setup or doubled()), **changes)


def case(*providers: Provider, **changes: Any) -> KernelCase:
    plain = KernelCase(
        op="swiglu", key="swiglu", shape="tiny", dtype="float32", mode=Mode.FORWARD, num_bytes=32, flops=4,
        make_inputs=lambda _: Inputs((torch.arange(4.0),)), exact=lambda i: lambda: (i.args[0].double() * 2,),
        same_dtype=doubled(), providers=providers,
    )  # fmt: skip
    return replace(plain, **changes)


@dataclass
class FakeClock:
    """Seconds that pass only when somebody says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeStopwatch:
    """Gives the times of each provider in turn, over and over; the clock goes on by them."""

    clock: FakeClock
    times_s: Mapping[str, Sequence[float]]
    names: dict[int, str] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    warmed_up: list[str] = field(default_factory=list)

    def provider(self, name: str, setup: Setup | None = None, **changes: Any) -> Provider:
        """Return a provider whose runs are known to this stopwatch."""

        def known_setup(inputs: Inputs) -> Run:
            run = (setup or doubled())(inputs)
            self.names[id(run)] = name
            self.kept.append(run)
            return run

        return provider(name, known_setup, **changes)

    kept: list[Run] = field(default_factory=list)

    def warm_up(self, run: Run) -> None:
        self.warmed_up.append(self.names[id(run)])

    def seconds(self, run: Run) -> float:
        run()
        name = self.names[id(run)]
        count = self.given.get(name, 0)
        self.given[name] = count + 1
        seconds = self.times_s[name][count % len(self.times_s[name])]
        self.clock.now_s += seconds
        return seconds


def bench(
    stopwatch: FakeStopwatch, on_record: Callable[[KernelRecord], None] = lambda _: None, **changes: Any
) -> Bench:
    def make(_clock: Clock, _device: torch.device) -> Stopwatch:
        return stopwatch

    plain = Bench(
        device=CPU, card="a processor", driver="", triton="", environment=ENVIRONMENT, on_record=on_record,
        log=lambda _: None, now=stopwatch.clock, stopwatch=make,
    )  # fmt: skip
    return replace(plain, **changes)


def times(q50_s: float, spread: float = 0.02, num_samples: int = 50) -> Times:
    return Times(q20_s=q50_s * (1 - spread), q50_s=q50_s, q80_s=q50_s * (1 + spread), num_samples=num_samples)


def result(name: str, found: Times | None = None, **changes: Any) -> ProviderResult:
    plain = ProviderResult(
        provider=name, is_ours=name == "triton", is_choosable=name in {"triton", "torch", "bitsandbytes"},
        outcome=Outcome.OK, error=1e-3, allowed_error=2e-3, times=found, peak_bytes=1024**2,
    )  # fmt: skip
    return replace(plain, **changes)


def record(*results: ProviderResult, **changes: Any) -> KernelRecord:
    plain = KernelRecord(
        key="k", op="adamw_int8", choice="adamw_int8", shape="gpt2-1b block", dtype="float32", mode=Mode.FORWARD,
        clock=Clock.DEVICE, num_bytes=4_800_000_000, flops=10**9, uses_tensor_cores=False, results=results, card=H200,
        driver="580.1", triton="3.6.0", evidence=Evidence.MEASURED, started_at="2026-11-20T20:00:00+00:00",
        duration_s=1.0, environment=ENVIRONMENT,
    )  # fmt: skip
    changed = replace(plain, **changes)
    return replace(changed, key=f"{changed.name}, {changed.card}")

"""Times of calls: providers in turn, so that clock drift affects all equally, and quantiles, not means."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hybridtrain.units import MIB
from hybridvalidation.kernel_bench.case import Clock, Run

MOST_ROUNDS = 100
WANTED_ROUNDS = 20
"""Fewest samples for a choice."""
_OVERRUN = 3.0
"""Factor by which a case may exceed its budget to reach the required rounds."""
_FLUSH_BYTES = 256 * MIB
"""More than twice the largest L2 cache of known cards (H100: 50 MiB, RTX 5090: 96 MiB)."""
_MOST_SLEEP_S = 5e-3
_SLEEP_CYCLES_PER_S = 2.0e9
"""Clock rate assumed for spinning kernels; few cards are faster, slower ones sleep longer."""
_LAUNCH_MARGIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Quantiles of the seconds of one call."""

    q20_s: float
    q50_s: float
    q80_s: float
    num_samples: int

    def is_faster_than(self, other: "Times") -> bool:
        """Return whether it is faster beyond noise: quantiles 0.2 to 0.8 do not overlap."""
        return self.q80_s < other.q20_s


class Stopwatch:
    """Times one call, by the wall clock: seconds until the result is there, launches included.

    Caches are not flushed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def warm_up(self, run: Run) -> None:
        """Run the call until compilers, caches and clocks have settled."""
        for _ in range(2):
            self.seconds(run)

    def seconds(self, run: Run) -> float:
        """Return the seconds of one call."""
        self._wait()
        begin = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class DeviceStopwatch(Stopwatch):
    """Seconds between two CUDA events around the call, with cold caches.

    While the call is queued the card overwrites a buffer larger than its L2 cache and then sleeps, so that slow
    launches do not count.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._launch_s = 0.0

    def warm_up(self, run: Run) -> None:
        """Run the call a few times; the last one measures the queueing time."""
        for _ in range(5):
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter()
            run()
            launch_s = time.perf_counter() - begin
        self._launch_s = max(self._launch_s, min(launch_s, _MOST_SLEEP_S))
        torch.cuda.synchronize(self._device)

    def seconds(self, run: Run) -> float:
        """Return the seconds of one call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flush.zero_()
        torch.cuda._sleep(int(_LAUNCH_MARGIN * self._launch_s * _SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def make_stopwatch(clock: Clock, device: torch.device) -> Stopwatch:
    """Return the stopwatch of a clock on a device."""
    return Stopwatch(device) if clock is Clock.WALL or device.type != "cuda" else DeviceStopwatch(device)


def time_in_turn(
    runs: Mapping[str, Run],
    stopwatch: Stopwatch,
    *,
    budget_s: float,
    on_fault: Callable[[str, Exception], None],
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Time providers in turn, in rounds of one call each, without the first round; return the times of successful ones.

    Rounds are repeated until ``budget_s``, up to 100; fewer than 20 may take three times as long. ``runs`` are warmed
    up. ``on_fault`` is called for a provider that raises, which is then dropped.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    begin, rounds = now(), -1  # memory given back after warming up is taken again in the first round
    while samples and rounds < MOST_ROUNDS:
        spent = now() - begin
        if rounds > 0 and spent > budget_s * (1.0 if rounds >= WANTED_ROUNDS else _OVERRUN):
            break
        for name in list(samples):
            try:
                seconds = stopwatch.seconds(runs[name])
                samples[name] += [seconds] if rounds >= 0 else []
            except Exception as error:  # noqa: BLE001  whatever a provider raises, the others go on
                del samples[name]
                on_fault(name, error)
        rounds += 1
    return {name: quantiles(seconds) for name, seconds in samples.items() if seconds}


def quantiles(samples: list[float]) -> Times:
    """Return the quantiles 0.2, 0.5 and 0.8, linear between samples."""
    q20_s, q50_s, q80_s = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return Times(q20_s=q20_s, q50_s=q50_s, q80_s=q80_s, num_samples=len(samples))

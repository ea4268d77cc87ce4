"""One row per stack: does it fit, how fast is it, what does it cost; and how that was got."""

from tabulate import tabulate

from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.roofline import efficiency_of
from hybridvalidation.judge.metrics import accuracy_retention, perplexity_ratio
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.show.kinds import Section

_HEADERS = (
    "stack", "fits", "allocated GiB", "reserved GiB", "device GiB", "host GiB", "disk GiB", "tokens/step",
    "step s", "tokens/s", "bound", "top-1 kept %", "perplexity %",
)  # fmt: skip


def summary_table(run: ScenarioRun, style: str) -> str:
    """Return one row per stack: does it fit, how fast is it, what does it cost."""
    return tabulate(
        [_row(run, stack) for stack in run.scenario.stacks], headers=_HEADERS, tablefmt=style,
        disable_numparse=True,
    )  # fmt: skip


def _row(run: ScenarioRun, stack: str) -> list[str]:
    memory = run.memory(stack)
    cells = ["unknown", *["-"] * 9]
    if memory is not None:
        cells = [
            "yes" if memory.fits else ("NO" if memory.fits_host else "NO, host"),
            f"{to_gib(memory.peak_allocated_bytes):.2f}",
            f"{to_gib(memory.peak_reserved_bytes):.2f}",
            f"{to_gib(memory.device_used_bytes):.2f}",
            f"{to_gib(memory.host_peak_bytes):.2f}",
            f"{to_gib(memory.disk_peak_bytes):.2f}",
            f"{memory.tokens_per_step:,}",
            f"{memory.step_time_s:.3f}",
            f"{memory.tokens_per_s:,.0f}",
            memory.bound,
        ]
    return [stack, *cells, _interval(accuracy_retention(run, stack)), _interval(perplexity_ratio(run, stack))]


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _how(run: ScenarioRun) -> str:
    """Return how each kind of figure was got."""
    efficiency = efficiency_of(run.scenario.card.resolve())
    return (
        "Memory: planned, by a dry run of the trainer on the virtual GPU; host GiB are offloaded tensors, without the "
        f"process itself. Speed: estimated, by a roofline at {100 * efficiency.matmul:.0f} % of the card's matmul rate "
        f"and {100 * efficiency.memory:.0f} % of its bandwidths. Accuracy: executed, by training a small proxy on the "
        "CPU; 95 % intervals over paired seeds; top-1 above 100 and perplexity below 100 are better than vanilla."
    )


SECTION = Section(order=10, parts=lambda view: [summary_table(view.run, view.style), _how(view.run)])

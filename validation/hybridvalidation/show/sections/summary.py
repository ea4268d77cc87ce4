"""One row per stack: does it fit, how fast is it, what does it cost; and how that was got."""

from tabulate import tabulate

from hybridtrain.reports.tables import fits_cell
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.cards.card import MARGIN_TOLD
from hybridtrain.virtual_gpu.cards.roofline import efficiency_of
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.metrics import accuracy_retention, perplexity_ratio
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.show.kinds import Section

_HEADERS = (
    "stack", "fits", "allocated GiB", "reserved GiB", "device GiB", "host GiB", "disk GiB", "tokens/step",
    "step s", "tokens/s", "bound",
)  # fmt: skip
_OF_PROXIES = ("top-1 kept %", "perplexity %")
"""Columns where anything was trained."""


def summary_table(run: ScenarioRun, style: str) -> str:
    """Return one row per stack: does it fit, how fast is it, what does it cost a proxy if some were trained."""
    rows = [_row(run, stack) + _accuracy(run, stack) for stack in run.scenario.stacks]
    headers = _HEADERS + (_OF_PROXIES if _is_trained(run) else ())
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _is_trained(run: ScenarioRun) -> bool:
    return any(kind == "accuracy" for kind, _ in run.records)


def _accuracy(run: ScenarioRun, stack: str) -> list[str]:
    if not _is_trained(run):
        return []
    return [_interval(accuracy_retention(run, stack)), _interval(perplexity_ratio(run, stack))]


def _row(run: ScenarioRun, stack: str) -> list[str]:
    memory = run.memory(stack)
    cells = ["unknown", *["-"] * 9]
    if memory is not None:
        cells = [
            fits_cell(memory.verdict(run.scenario.card.resolve())) if memory.fits_host else "NO, host",
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
    return [stack, *cells]


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _how(run: ScenarioRun) -> str:
    """Return how each kind of figure was got."""
    efficiency = efficiency_of(run.scenario.card.resolve())
    each = " of one rank" if run.scenario.world > 1 else ""
    told = (
        f"Memory: planned, by a dry run of the trainer on the virtual GPU; host GiB are offloaded tensors{each}, "
        f"without the process itself{_host_limit(run)}; barely: {MARGIN_TOLD}. "
        f"Speed: estimated, by a roofline at "
        f"{100 * efficiency.matmul:.0f} % of the card's matmul rate for large products, less for small ones, and "
        f"{100 * efficiency.memory:.0f} % of its bandwidths."
    )
    if not _is_trained(run):
        return told
    return (
        f"{told} Accuracy: executed, by training a small proxy on the CPU; 95 % intervals over paired seeds; top-1 "
        "above 100 and perplexity below 100 are better than vanilla."
    )


def _host_limit(run: ScenarioRun) -> str:
    host = run.rank_host
    if host.memory_gib is None:
        return ""
    return f", of {to_gib(int(host.tensor_bytes)):.1f} GiB that the host has for them"


SECTION = Section(order=10, parts=lambda view: [summary_table(view.run, view.style), _how(view.run)])

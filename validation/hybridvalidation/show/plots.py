"""Records as pictures: peak by class against the card, memory through a step, accuracy with intervals."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.tensor_class import TensorClass
from hybridvalidation.judge.metrics import accuracy_retention
from hybridvalidation.records.stack_run import MemoryFigures
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.scenario import BASELINE_STACK

_COLORS = {
    TensorClass.WEIGHT: "#0072b2", TensorClass.MASTER: "#56b4e9", TensorClass.OPTIM_STATE: "#009e73",
    TensorClass.GRAD: "#d55e00", TensorClass.BOUNDARY: "#f0e442", TensorClass.ACTIVATION: "#e69f00",
    TensorClass.WORKSPACE: "#cc79a7",
}  # fmt: skip
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
_ORDER = tuple(_COLORS)
"""From the bottom: what stays for the whole run, then what comes and goes."""
_CONTEXT_COLOR = "#999999"
_LEAST_SHARE = 0.4
"""Of the card's memory; below it the card's line would squeeze what is to be seen."""
_LARGEST_SHARE = 3.0
"""Of the card's memory; bars are cut off above, lest they squeeze those that fit."""


def write_plots(run: ScenarioRun, folder: Path) -> list[Path]:
    """Write every plot of a scenario as PNG and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = run.scenario.name
    plots: list[tuple[str, tuple[float, float], Callable[[ScenarioRun, Figure], None]]] = [
        ("peak", (max(9.0, 3 + 1.1 * len(run.scenario.stacks)), 5), _plot_peak),
        ("timeline", (10, 2.6 * max(1, len(_with_memory(run)))), _plot_timeline),
    ]
    if run.scenario.accuracy is not None:
        plots.append(("accuracy", (8, 4), _plot_accuracy))
    paths = []
    with mpl.rc_context({"svg.hashsalt": name, "axes.spines.top": False, "axes.spines.right": False}):
        for suffix, size, draw in plots:
            figure = Figure(figsize=size, layout="constrained")
            draw(run, figure)
            path = folder / f"{name}-{suffix}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})
            paths.append(path)
    return paths


def _with_memory(run: ScenarioRun) -> list[tuple[str, MemoryFigures]]:
    found = [(stack, run.get("dry_run", stack)) for stack in run.scenario.stacks]
    return [(stack, record.memory) for stack, record in found if record is not None and record.memory is not None]


def _plot_peak(run: ScenarioRun, figure: Figure) -> None:
    axes = figure.subplots()
    card = run.scenario.card.resolve()
    stacks = _with_memory(run)
    names = [stack for stack, _ in stacks]
    bottoms = [0.0] * len(stacks)
    for tensor_class in _ORDER:
        heights = [to_gib(memory.by_class[tensor_class]) for _, memory in stacks]
        axes.bar(names, heights, bottom=bottoms, label=tensor_class.replace("_", " "), color=_COLORS[tensor_class])
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    slack = [to_gib(memory.peak_reserved_bytes) - low for (_, memory), low in zip(stacks, bottoms, strict=True)]
    axes.bar(names, slack, bottom=bottoms, label="reserved, unused", color="#dddddd")
    tops = [low + height for low, height in zip(bottoms, slack, strict=True)]
    context = to_gib(card.context_bytes)
    axes.bar(names, [context] * len(names), bottom=tops, label="CUDA context", color=_CONTEXT_COLOR)
    ceiling = _LARGEST_SHARE * to_gib(card.memory_bytes)
    for index, ((_, memory), top) in enumerate(zip(stacks, tops, strict=True)):
        text = f"{to_gib(memory.device_used_bytes):.1f}" + ("" if memory.fits else "\ndoes not fit")
        if top + context > ceiling:
            axes.annotate(text, (index, 0.97 * ceiling), ha="center", va="top", fontsize=9, color="white")
        else:
            axes.annotate(text, (index, top + context), ha="center", va="bottom", fontsize=9)
    _card_line(axes, to_gib(card.memory_bytes), card.name)
    axes.margins(y=0.12)
    axes.set_ylabel("GiB at the peak (planned)")
    if max(tops, default=0.0) + context > ceiling:
        axes.set_ylim(0, ceiling)
        axes.set_ylabel("GiB at the peak (planned; tall bars are cut off)")
    axes.set_title(f"{run.scenario.says}: where the memory goes", fontsize=11)
    if stacks:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)


def _plot_timeline(run: ScenarioRun, figure: Figure) -> None:
    stacks = _with_memory(run)
    card = run.scenario.card.resolve()
    rows: list[Axes] = list(figure.subplots(len(stacks), 1, squeeze=False)[:, 0]) if stacks else []
    for axes, (stack, memory) in zip(rows, stacks, strict=True):
        timeline = memory.timeline
        if timeline is not None:
            series = [[to_gib(size) for size in timeline.by_class[name]] for name in _ORDER]
            axes.stackplot(
                timeline.times_s, series, step="post", colors=[_COLORS[name] for name in _ORDER],
                labels=[name.replace("_", " ") for name in _ORDER],
            )  # fmt: skip
            axes.set_xlim(0, memory.step_time_s)
        if memory.peak_allocated_bytes > _LEAST_SHARE * card.memory_bytes:
            _card_line(axes, to_gib(card.memory_bytes), card.name)
        axes.set_ylabel("GiB")
        axes.set_title(f"{stack}: allocated through one step ({memory.bound}-bound)", fontsize=10, loc="left")
    if any(memory.timeline is not None for _, memory in stacks):
        rows[-1].set_xlabel("seconds (estimated)")
        figure.legend(*rows[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.suptitle(
        f"{run.scenario.says}: memory over time (planned; {card.name}: {to_gib(card.memory_bytes):.1f} GiB)",
        fontsize=11,
    )


def _plot_accuracy(run: ScenarioRun, figure: Figure) -> None:
    axes = figure.subplots()
    found = [(stack, accuracy_retention(run, stack)) for stack in run.scenario.stacks if stack != BASELINE_STACK]
    points = [(stack, interval) for stack, interval in found if interval is not None]
    for row, (_, interval) in enumerate(points):
        errors = [[interval.mean - interval.low], [interval.high - interval.mean]]
        axes.errorbar([interval.mean], [row], xerr=errors, fmt="o", capsize=4, color="#0072b2")
        axes.annotate(
            f"{interval.mean:.2f} %", (interval.mean, row), textcoords="offset points", xytext=(0, 7), ha="center",
            fontsize=9,
        )  # fmt: skip
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(range(len(points)), [stack for stack, _ in points])
    axes.set_ylim(max(len(points), 1) - 0.5, -0.5)
    if not points:
        axes.annotate("nothing to compare", (0.5, 0.5), xycoords="axes fraction", ha="center")
    record = run.get("accuracy", BASELINE_STACK)
    proxy = ""
    if record is not None and record.accuracy is not None:
        figures = record.accuracy
        proxy = f", proxy of {figures.num_params / 1e6:.2f}M parameters, {len(figures.seeds)} seeds"
    axes.set_xlabel(f"validation top-1 accuracy, % of {BASELINE_STACK} \n(executed{proxy}; bars: 95 % interval)")
    axes.set_title(f"{run.scenario.says}: accuracy kept", fontsize=11)


def _card_line(axes: Axes, gib: float, name: str) -> None:
    axes.axhline(
        gib, color="black", linestyle="--", linewidth=1, label=f"{name.removeprefix('NVIDIA GeForce ')}: {gib:.1f} GiB"
    )

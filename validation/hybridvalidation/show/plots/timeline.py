"""Memory by class through one step, stack below stack."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridtrain.units import to_gib
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.show.kinds import Plot
from hybridvalidation.show.pictures import COLORS, ORDER, card_line, with_memory

_LEAST_SHARE = 0.4
"""Of the card's memory; below it the card's line would squeeze what is to be seen."""


def _plot_timeline(run: ScenarioRun, figure: Figure) -> None:
    stacks = with_memory(run)
    card = run.scenario.card.resolve()
    rows: list[Axes] = list(figure.subplots(len(stacks), 1, squeeze=False)[:, 0]) if stacks else []
    for axes, (stack, memory) in zip(rows, stacks, strict=True):
        timeline = memory.timeline
        if timeline is not None:
            series = [[to_gib(size) for size in timeline.by_class[name]] for name in ORDER]
            axes.stackplot(
                timeline.times_s, series, step="post", colors=[COLORS[name] for name in ORDER],
                labels=[name.replace("_", " ") for name in ORDER],
            )  # fmt: skip
            axes.set_xlim(0, memory.step_time_s)
        if memory.peak_allocated_bytes > _LEAST_SHARE * card.memory_bytes:
            card_line(axes, to_gib(card.memory_bytes), card.name)
        axes.set_ylabel("GiB")
        axes.set_title(f"{stack}: allocated through one step ({memory.bound}-bound)", fontsize=10, loc="left")
    if any(memory.timeline is not None for _, memory in stacks):
        rows[-1].set_xlabel("seconds (estimated)")
        figure.legend(*rows[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.suptitle(
        f"{run.scenario.says}: memory over time (planned; {card.name}: {to_gib(card.memory_bytes):.1f} GiB)",
        fontsize=11,
    )


PLOT = Plot(
    order=20, name="timeline", size=lambda run: (10, 2.6 * max(1, len(with_memory(run)))), draw=_plot_timeline
)  # fmt: skip

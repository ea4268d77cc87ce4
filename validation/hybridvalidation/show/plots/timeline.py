"""Memory by class through one step, stack below stack, all on one scale."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.units import to_gib
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.kinds import Plot
from hybridvalidation.show.pictures import COLORS, ORDER, card_line, fitting, title_lines

_LEAST_SHARE = 0.4
"""Of the card's memory; below it the card's line would squeeze what is to be seen."""
_ROW_INCHES, _MOST_INCHES = 1.9, 12.0


def _plot_timeline(run: ScenarioRun, figure: Figure) -> None:
    stacks, left_out = fitting(run)
    card = run.scenario.card.resolve()
    rows: list[Axes] = list(figure.subplots(len(stacks), 1, squeeze=False, sharey=True)[:, 0]) if stacks else []
    shows_card = any(memory.peak_allocated_bytes > _LEAST_SHARE * card.memory_bytes for _, memory in stacks)
    for axes, (stack, memory) in zip(rows, stacks, strict=True):
        timeline = memory.timeline
        if timeline is not None:
            series = [[to_gib(size) for size in timeline.sizes(name)] for name in ORDER]
            axes.stackplot(
                timeline.times_s, series, step="post", colors=[COLORS[name] for name in ORDER],
                labels=[name.replace("_", " ") for name in ORDER],
            )  # fmt: skip
            axes.set_xlim(0, memory.step_time_s)
        if shows_card:
            card_line(axes, to_gib(card.memory_bytes), card.name)
        axes.set_ylabel("GiB")
        axes.set_title(
            f"{stack}: allocated through {which_step(memory)} ({memory.bound}-bound)", fontsize=10, loc="left"
        )
    if any(memory.timeline is not None for _, memory in stacks):
        rows[-1].set_xlabel("seconds (estimated)")
        figure.legend(*rows[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    absent = f"; not shown, for they do not fit: {', '.join(left_out)}" if left_out else ""
    title = f"{run.scenario.says}: memory over time (planned; {card.name}: {to_gib(card.memory_bytes):.1f} GiB{absent})"
    figure.suptitle(title_lines(title, figure), fontsize=11)


def which_step(memory: MemoryFigures) -> str:
    """Name the step that is shown: of a cycle its last, whose phases differ."""
    phases = {step.phase for step in memory.steps}
    return "one step" if len(phases) == 1 else f"the cycle's last step, in {memory.steps[-1].phase.upper()}"


def _size(run: ScenarioRun) -> tuple[float, float]:
    return 10.0, min(_MOST_INCHES, 1.0 + _ROW_INCHES * max(1, len(fitting(run)[0])))


PLOT = Plot(order=20, name="timeline", size=_size, draw=_plot_timeline)

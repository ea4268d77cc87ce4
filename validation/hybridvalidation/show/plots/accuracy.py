"""What each stack keeps of the baseline's accuracy, with intervals."""

from matplotlib.figure import Figure

from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.metrics import accuracy_retention
from hybridvalidation.scenario import BASELINE_STACK
from hybridvalidation.show.kinds import Plot
from hybridvalidation.show.pictures import title_lines


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
    axes.set_title(title_lines(f"{run.scenario.says}: accuracy that a small proxy keeps", figure), fontsize=11)


PLOT = Plot(
    order=30, name="accuracy", size=lambda _run: (8, 4), draw=_plot_accuracy,
    has_any=lambda run: run.scenario.accuracy is not None,
)  # fmt: skip

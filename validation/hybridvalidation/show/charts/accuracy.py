"""What a small proxy keeps of the baseline's accuracy under every stack, with intervals."""

from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.metrics import accuracy_retention
from hybridvalidation.scenario import BASELINE_STACK
from hybridvalidation.show.drawing import Drawing, bar_axes, interval_trace, upright_line
from hybridvalidation.show.kinds import Chart


def _draw(run: ScenarioRun) -> list[Drawing]:
    found = [(stack, accuracy_retention(run, stack)) for stack in run.scenario.stacks if stack != BASELINE_STACK]
    points = [(stack, interval) for stack, interval in found if interval is not None]
    if not points:
        return []
    told = ", ".join(f"{name} {kept.mean:.2f} % ({kept.low:.2f} to {kept.high:.2f})" for name, kept in points)
    return [
        Drawing(
            name="accuracy", title=f"Accuracy that a small proxy keeps of {BASELINE_STACK}'s",
            evidence="executed, by training a small proxy on the CPU; bars: 95 % interval over paired seeds",
            says=f"Top-1 accuracy in percent of {BASELINE_STACK}'s: {told}.",
            views={"": [interval_trace("top-1 kept", points, "#0072b2", unit=" %", digits=2)]},
            layout=bar_axes(f"% of {BASELINE_STACK}'s top-1", len(points)) | upright_line(100, BASELINE_STACK),
        )
    ]  # fmt: skip


CHART = Chart(order=60, draw=_draw)

"""Memory by class through one step, for the stack that is chosen."""

from hybridtrain.planning.figures import MemoryFigures, Timeline
from hybridtrain.units import to_gib
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.drawing import TEXT, Drawing, Trace, figure_of
from hybridvalidation.show.kinds import Chart
from hybridvalidation.show.pictures import COLORS, ORDER, with_memory
from hybridvalidation.show.plots.timeline import which_step

_MOST_POINTS = 1200
"""More than a screen has columns."""


def _draw(run: ScenarioRun) -> list[Drawing]:
    stacks = [(stack, memory) for stack, memory in with_memory(run) if memory.timeline is not None]
    stacks.sort(key=lambda item: not item[1].fits)
    if not stacks:
        return []
    has_phases = any(len({step.phase for step in memory.steps}) > 1 for _, memory in stacks)
    title = "Through the last step of a cycle" if has_phases else "Through one step"
    card_gib = figure_of(to_gib(run.scenario.card.resolve().memory_bytes))
    return [
        Drawing(
            name="timeline", title=title, choice="stack",
            evidence="bytes planned, by a dry run; seconds estimated, by a roofline; of each slice of time its highest "
            "moment",
            says="GiB allocated on the card through a step by tensor class, for the chosen stack. "
            + ". ".join(_sentence(stack, memory) for stack, memory in stacks),
            views={stack: _traces(memory) for stack, memory in stacks},
            layout={
                "height": 440, "hovermode": "x unified", "xaxis": {"title": {"text": "seconds (estimated)"}},
                "yaxis": {"title": {"text": "GiB allocated"}, "rangemode": "tozero"},
            },
            layouts={stack: _beside(memory, card_gib) for stack, memory in stacks},
        )
    ]  # fmt: skip


def thinned(timeline: Timeline, most: int) -> list[int]:
    """Return which moments to show: all, or the highest of each of so many runs of them, the last of all with it."""
    count = len(timeline.times_s)
    if count <= most:
        return list(range(count))
    totals = [sum(sizes) for sizes in zip(*timeline.by_class.values(), strict=True)]
    runs = [range(part * count // (most - 1), (part + 1) * count // (most - 1)) for part in range(most - 1)]
    return sorted({*(max(run, key=totals.__getitem__) for run in runs), count - 1})


def _traces(memory: MemoryFigures) -> list[Trace]:
    timeline = memory.timeline
    assert timeline is not None, "others were left out"
    kept = thinned(timeline, _MOST_POINTS)
    times = [timeline.times_s[index] for index in kept]
    return [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "one", "name": name.value.replace("_", " "), "x": times,
            "y": [figure_of(to_gib(timeline.by_class[name][index])) for index in kept],
            "line": {"width": 0.5, "color": COLORS[name], "shape": "hv"}, "fillcolor": COLORS[name],
            "hovertemplate": "%{y:.3f} GiB",
        }
        for name in ORDER
        if any(timeline.by_class[name])
    ]  # fmt: skip


def _beside(memory: MemoryFigures, card_gib: float) -> dict[str, object]:
    """Return a line at what the card holds, if that is near, and the range of the step."""
    top = to_gib(memory.peak_allocated_bytes)
    layout: dict[str, object] = {"xaxis": {"range": [0, round(memory.step_time_s, 6)]}}
    if top > card_gib / 2:
        line = {"color": TEXT, "width": 1.5, "dash": "dash"}
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": card_gib, "y1": card_gib, "line": line}
        ]
        layout["annotations"] = [
            {"xref": "paper", "x": 0, "xanchor": "left", "y": card_gib, "yanchor": "bottom", "showarrow": False,
             "text": f"card: {card_gib:.2f} GiB"}
        ]  # fmt: skip
    return layout


def _sentence(stack: str, memory: MemoryFigures) -> str:
    peak = max(memory.steps, key=lambda step: step.allocated_bytes)
    return (
        f"{stack}: {which_step(memory)} of {memory.step_time_s:.2f} s, {memory.bound}-bound; most is held in step "
        f"{peak.step}, {peak.stage} {peak.unit}".rstrip()
    )


CHART = Chart(order=40, draw=_draw)

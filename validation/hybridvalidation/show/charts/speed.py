"""Tokens per second of every stack."""

from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.drawing import Drawing, bar_axes, figure_of
from hybridvalidation.show.kinds import Chart
from hybridvalidation.show.pictures import with_memory

_FITS, _DOES_NOT = "#0072b2", "#999999"


def _draw(run: ScenarioRun) -> list[Drawing]:
    stacks = sorted(with_memory(run), key=lambda item: (not item[1].fits, -item[1].tokens_per_s))
    if not stacks:
        return []
    groups = (("fits", _FITS, True), ("does not fit: the speed of a larger card", _DOES_NOT, False))
    traces = []
    for name, color, fits in groups:
        of_group = [(stack, memory) for stack, memory in stacks if memory.fits is fits]
        if of_group:
            traces.append({
                "type": "bar", "orientation": "h", "name": name, "y": [stack for stack, _ in of_group],
                "x": [figure_of(memory.tokens_per_s, 1) for _, memory in of_group], "marker": {"color": color},
                "customdata": [memory.bound for _, memory in of_group],
                "hovertemplate": "%{y}: %{x:,.0f} tokens/s, %{customdata}-bound<extra></extra>",
            })  # fmt: skip
    told = ", ".join(
        f"{stack} {memory.tokens_per_s:,.0f}{'' if memory.fits else ' (does not fit)'}" for stack, memory in stacks
    )
    return [
        Drawing(
            name="speed", title="Tokens per second", evidence="estimated, by a roofline",
            says=f"Tokens per second: {told}.", views={"": traces},
            layout=bar_axes("tokens/s (estimated)", len(stacks), rangemode="tozero"),
        )
    ]  # fmt: skip


CHART = Chart(order=50, draw=_draw)

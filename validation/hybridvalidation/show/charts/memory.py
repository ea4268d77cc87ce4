"""Where the memory goes at the peak: on the card and on the host by tensor class, on the card also block by block."""

from collections.abc import Mapping, Sequence

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.units import to_gib
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.drawing import Drawing, Trace, bar_axes, figure_of, upright_line
from hybridvalidation.show.kinds import Chart
from hybridvalidation.show.pictures import COLORS, ORDER, with_memory
from hybridvalidation.show.plots.peak import LARGEST_SHARE, OTHER_COLORS, has_host, on_card, on_host

_COLORS = {name.value: color for name, color in COLORS.items()} | OTHER_COLORS
_PALE = 0.4
"""Opacity of stacks that do not fit."""
_HOW = "planned, by a dry run; stacks that do not fit are pale"


def _draw_card(run: ScenarioRun) -> list[Drawing]:
    card = run.scenario.card.resolve()
    name = f"{card.name.removeprefix('NVIDIA GeForce ')}: {to_gib(card.memory_bytes):.2f} GiB"
    stacks = _stacks(run)
    parts = [on_card(memory, to_gib(card.context_bytes)) for _, memory in stacks]
    return _bars("card", "On the card at the peak, by tensor class", stacks, parts, card.memory_bytes, name)


def _draw_host(run: ScenarioRun) -> list[Drawing]:
    stacks, host = _stacks(run), run.rank_host
    if not has_host(stacks):
        return []
    limit = None if host.memory_gib is None else host.tensor_bytes
    name = "" if limit is None else f"host memory for tensors: {to_gib(limit):.1f} GiB"
    parts = [on_host(memory) for _, memory in stacks]
    each = "of a rank, " if run.scenario.world > 1 else ""
    return _bars("host", f"In host memory at its peak, {each}by tensor class", stacks, parts, limit, name)


def _draw_blocks(run: ScenarioRun) -> list[Drawing]:
    stacks = _stacks(run)
    units = list(dict.fromkeys(unit for _, memory in stacks for _, unit in map(_holder, memory.by_unit)))
    units.sort(key=_place)
    views = {stack: _by_unit(memory, units) for stack, memory in stacks}
    if not views:
        return []
    return [
        Drawing(
            name="blocks", title="On the card at the peak, block by block", evidence="planned, by a dry run",
            says=f"{run.scenario.says}: who holds the bytes of the peak, from {units[0]} to {units[-1]}, one bar each, "
            "for the chosen stack.",
            views=views, choice="stack",
            layout={
                "barmode": "stack", "height": 420, "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
                "xaxis": {"type": "category", "categoryorder": "array", "categoryarray": units, "tickangle": -60,
                          "automargin": True},
            },
        )
    ]  # fmt: skip


def _bars(
    name: str, title: str, stacks: Sequence[tuple[str, MemoryFigures]], parts: Sequence[Mapping[str, float]],
    limit_bytes: float | None, limit_name: str,
) -> list[Drawing]:  # fmt: skip
    if not stacks:
        return []
    names = [stack for stack, _ in stacks]
    opacity = [1.0 if memory.fits else _PALE for _, memory in stacks]
    traces = [
        _trace(part, [figure_of(sizes[part]) for sizes in parts], names, opacity)
        for part in parts[0]
        if any(sizes[part] > 0 for sizes in parts)
    ]
    sums = [sum(sizes.values()) for sizes in parts]
    layout, cut = bar_axes("GiB", len(stacks), rangemode="tozero"), ""
    if limit_bytes is not None:
        layout |= upright_line(to_gib(limit_bytes), limit_name)
        ceiling = LARGEST_SHARE * to_gib(limit_bytes)
        if max(sums) > ceiling:
            layout |= bar_axes("GiB", len(stacks), range=[0, round(ceiling, 2)])
            cut = "; long bars go on to the right: zoom out"
    told = ", ".join(
        f"{stack} {total:.1f} GiB{'' if memory.fits else ' (does not fit)'}"
        for (stack, memory), total in zip(stacks, sums, strict=True)
    )
    return [
        Drawing(
            name=name, title=title, evidence=f"{_HOW}{cut}", says=f"{title}: {told}. {limit_name}", views={"": traces},
            layout=layout,
        )
    ]  # fmt: skip


def _by_unit(memory: MemoryFigures, units: Sequence[str]) -> list[Trace]:
    held = {_holder(key): size for key, size in memory.by_unit.items()}
    traces = []
    for name in ORDER:
        of_class = {unit: held[name.value, unit] for unit in units if (name.value, unit) in held}
        if of_class:
            sizes = [figure_of(to_gib(size), 4) for size in of_class.values()]
            traces.append(_trace(name.value, list(of_class), sizes, orientation="v"))
    return traces


def _trace(
    part: str, x: Sequence[object], y: Sequence[object], opacity: Sequence[float] | None = None, orientation: str = "h"
) -> Trace:
    label = part.replace("_", " ")
    value, place = ("%{x:.2f}", "%{y}") if orientation == "h" else ("%{y:.3f}", "%{x}")
    marker: dict[str, object] = {"color": _COLORS[part], "line": {"color": "$edge", "width": 0.5}}
    if opacity is not None:
        marker["opacity"] = list(opacity)
    return {
        "type": "bar", "orientation": orientation, "name": label, "x": list(x), "y": list(y), "marker": marker,
        "hovertemplate": f"{place}<br>{label}: {value} GiB<extra></extra>",
    }  # fmt: skip


def _holder(key: str) -> tuple[str, str]:
    """Return class and unit of one of a record's holders."""
    tensor_class, _, unit = key.partition("/")
    return tensor_class, unit or "whole step"


def _place(unit: str) -> tuple[int, int, str]:
    """Return where a unit stands on the way through the model."""
    kind, _, number = unit.partition(".")
    order = ("embedding", "block", "head")
    return order.index(kind) if kind in order else len(order), int(number) if number.isdigit() else 0, unit


def _stacks(run: ScenarioRun) -> list[tuple[str, MemoryFigures]]:
    """Return the stacks with figures, those that fit first."""
    return sorted(with_memory(run), key=lambda item: not item[1].fits)


CARD = Chart(order=10, draw=_draw_card)
HOST = Chart(order=20, draw=_draw_host)
BLOCKS = Chart(order=30, draw=_draw_blocks)

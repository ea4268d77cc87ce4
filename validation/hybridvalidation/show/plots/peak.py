"""Peak by class, stack beside stack, against the card; below it what lies in host memory, against the machine's."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.units import to_gib
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.show.kinds import Plot
from hybridvalidation.show.pictures import COLORS, ORDER, card_line, title_lines, with_memory

OTHER_COLORS = {"reserved, unused": "#dddddd", "CUDA context": "#999999", "other": "#999999"}
LARGEST_SHARE = 1.5
"""Of what is there; bars are cut off above, lest they squeeze those that fit."""
LEAST_SHOWN_GIB = 0.1
"""Less on the host is the batch on its way, and needs no panel and no figure."""
_ROOM = 0.87
"""Share of the axis up to which a bar leaves room for its figure above it."""
_LONGEST_LABEL = 14
"""Letters below a bar; a longer name goes on below, behind one of its hyphens."""
_PALE = 0.35
"""Opacity of stacks that do not fit."""

Stacks = Sequence[tuple[str, MemoryFigures]]


def plot_peak(run: ScenarioRun, figure: Figure) -> None:
    """Draw a bar a stack, from the bottom what stays, then what comes and goes; those that fit come first."""
    stacks = sorted(with_memory(run), key=lambda item: not item[1].fits)
    shows_host = has_host(stacks)
    device = figure.add_subplot(2 if shows_host else 1, 1, 1)
    card = run.scenario.card.resolve()
    _draw(device, stacks, [on_card(memory, to_gib(card.context_bytes)) for _, memory in stacks], card.memory_bytes)
    card_line(device, to_gib(card.memory_bytes), card.name)
    device.set_ylabel(f"GiB on the card{device.get_ylabel()}")
    title = f"{run.scenario.says}: where the memory goes at the peak (planned)"
    device.set_title(title_lines(title, figure), fontsize=11)
    if shows_host:
        host, limit = figure.add_subplot(2, 1, 2), run.rank_host
        is_limited = limit.memory_gib is not None
        _draw(host, stacks, [on_host(memory) for _, memory in stacks], limit.tensor_bytes if is_limited else None)
        if is_limited:
            card_line(host, to_gib(int(limit.tensor_bytes)), "host memory for tensors")
        each = ", of a rank" if run.scenario.world > 1 else ""
        host.set_ylabel(f"GiB on the host{each}{host.get_ylabel()}")
    if stacks:
        labels = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels, loc="outside right center", fontsize=8)


def has_host(stacks: Stacks) -> bool:
    """Return whether any stack keeps more on the host than the batch on its way."""
    return any(to_gib(memory.host_peak_bytes) >= LEAST_SHOWN_GIB for _, memory in stacks)


def on_card(memory: MemoryFigures, context_gib: float) -> dict[str, float]:
    """Return GiB on the card at the peak, by what holds them."""
    held = {name.value: to_gib(memory.by_class[name]) for name in ORDER}
    return held | {
        "reserved, unused": to_gib(memory.peak_reserved_bytes) - sum(held.values()), "CUDA context": context_gib,
    }  # fmt: skip


def on_host(memory: MemoryFigures) -> dict[str, float]:
    """Return GiB on the host at its peak, by what holds them."""
    held = {name.value: to_gib(memory.host_by_class.get(name, 0)) for name in ORDER}
    return held | {"other": to_gib(memory.host_peak_bytes) - sum(held.values())}


def _draw(axes: Axes, stacks: Stacks, parts: Sequence[Mapping[str, float]], limit_bytes: float | None) -> None:
    """Draw stacked bars and their sums, cut off where one is far beyond the limit while another is within it."""
    colors = {name.value: color for name, color in COLORS.items()} | OTHER_COLORS
    names, bottoms = [stack for stack, _ in stacks], [0.0] * len(stacks)
    for part in parts[0] if parts else ():
        heights = [sizes[part] for sizes in parts]
        bars = axes.bar(names, heights, bottom=bottoms, label=part.replace("_", " "), color=colors[part])
        for bar, (_, memory) in zip(bars, stacks, strict=True):
            bar.set_alpha(1.0 if memory.fits else _PALE)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(names)), ["\n".join(wrap(name, _LONGEST_LABEL)) for name in names])
    ceiling = float("inf") if limit_bytes is None else LARGEST_SHARE * to_gib(int(limit_bytes))
    highest = max(bottoms, default=0.0)
    is_cut = highest > ceiling
    for index, ((_, memory), top) in enumerate(zip(stacks, bottoms, strict=True)):
        text = f"{top:.1f}" + ("" if memory.fits else "\ndoes not fit") if top >= LEAST_SHOWN_GIB else ""
        is_inside = is_cut and top > _ROOM * ceiling
        at = min(top, 0.99 * ceiling) - 0.01 * ceiling if is_inside else top
        axes.annotate(text, (index, at), ha="center", va="top" if is_inside else "bottom", fontsize=9)
    limit = 0.0 if limit_bytes is None else 1.05 * to_gib(int(limit_bytes))  # its line is drawn too
    axes.set_ylim(0, ceiling if is_cut else max(highest / _ROOM, LEAST_SHOWN_GIB, limit))
    if is_cut:
        axes.set_ylabel(" (tall bars are cut off)")


def _size(run: ScenarioRun) -> tuple[float, float]:
    stacks = with_memory(run)
    return max(9.0, 3 + 1.1 * len(stacks)), 8.0 if has_host(stacks) else 5.0


PLOT = Plot(order=10, name="peak", size=_size, draw=plot_peak)

"""Peak by class, stack beside stack, against the card."""

from matplotlib.figure import Figure

from hybridtrain.units import to_gib
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.show.kinds import Plot
from hybridvalidation.show.pictures import COLORS, ORDER, card_line, with_memory

_CONTEXT_COLOR = "#999999"
_LARGEST_SHARE = 3.0
"""Of the card's memory; bars are cut off above, lest they squeeze those that fit."""


def plot_peak(run: ScenarioRun, figure: Figure) -> None:
    """Draw a bar a stack, from the bottom what stays, then what comes and goes."""
    axes = figure.subplots()
    card = run.scenario.card.resolve()
    stacks = with_memory(run)
    names = [stack for stack, _ in stacks]
    bottoms = [0.0] * len(stacks)
    for tensor_class in ORDER:
        heights = [to_gib(memory.by_class[tensor_class]) for _, memory in stacks]
        axes.bar(names, heights, bottom=bottoms, label=tensor_class.replace("_", " "), color=COLORS[tensor_class])
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
    card_line(axes, to_gib(card.memory_bytes), card.name)
    axes.margins(y=0.12)
    axes.set_ylabel("GiB at the peak (planned)")
    if max(tops, default=0.0) + context > ceiling:
        axes.set_ylim(0, ceiling)
        axes.set_ylabel("GiB at the peak (planned; tall bars are cut off)")
    axes.set_title(f"{run.scenario.says}: where the memory goes", fontsize=11)
    if stacks:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)


PLOT = Plot(order=10, name="peak", size=lambda run: (max(9.0, 3 + 1.1 * len(run.scenario.stacks)), 5), draw=plot_peak)

"""A ladder as a picture: the differences of all arms, a column for each rung that has any."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from hybridvalidation.study.ladder.equivalence import Finding, judge_rung
from hybridvalidation.study.ladder.protocol import LadderFile, Made

_COLORS = {
    Finding.EQUIVALENT: "#009e73", Finding.WORSE: "#d55e00", Finding.BETTER: "#0072b2", Finding.INCONCLUSIVE: "#000000",
    Finding.UNFINISHED: "#999999",
}  # fmt: skip
_SHOWN = 6.0
"""Margins shown to either side; what lies beyond is an arrow with its figure."""


def write_ladder_plot(ladder: LadderFile, made: Made, folder: Path) -> Path:
    """Write the picture as PNG and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    judged_by_rung = [
        (rung, found)
        for rung in ladder.rungs
        if (found := [one for one in judge_rung(ladder, made, rung) if one.comparison.interval])
    ]
    begun = {one.comparison.arm.name for _, found in judged_by_rung for one in found}
    names = [arm.name for arm in ladder.arms if arm.name in begun]
    edge = _SHOWN * ladder.margin_nats
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3 + 3.2 * max(1, len(judged_by_rung)), 1.8 + 0.27 * len(names)), layout="constrained")
        row = figure.subplots(1, max(1, len(judged_by_rung)), sharey=True, squeeze=False)[0]
        for axes, (rung, found) in zip(row, judged_by_rung, strict=False):
            axes.axvspan(-ladder.margin_nats, ladder.margin_nats, color="#009e73", alpha=0.15, linewidth=0)
            axes.axvline(0, color="#999999", linewidth=0.8)
            for judged in found:
                interval, place = judged.comparison.interval, names.index(judged.comparison.arm.name)
                assert interval is not None, "others were left out"
                color = _COLORS[judged.finding]
                if abs(interval.mean) > edge:
                    side = edge if interval.mean > 0 else -edge
                    axes.annotate(
                        f"{interval.mean:+.3f}", (side, place), color=color, fontsize=8, ha="center", va="center"
                    )
                    continue
                error = [[interval.mean - interval.low], [interval.high - interval.mean]]
                axes.errorbar([interval.mean], [place], xerr=error, color=color, marker="o", markersize=4, capsize=2)
            axes.set_xlim(-1.15 * edge, 1.15 * edge)
            axes.set_title(f"{rung.name}, {rung.tokens_per_param:.0f} tokens a parameter", fontsize=9)
        for axes in row:
            axes.set_yticks(range(len(names)), names)
        row[0].invert_yaxis()
        figure.supxlabel(
            "validation loss above the compared arm's, nats a token\n(executed; mean and 95 % over paired seeds)\n"
            "band: registered margin; green equivalent, red worse,\nblue better, black inconclusive, grey unfinished",
            fontsize=9,
        )
        path = folder / f"study-{ladder.name}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
    return path

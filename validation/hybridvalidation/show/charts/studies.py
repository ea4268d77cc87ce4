"""Studies: compute factors of methods, harm of settings, and the model sizes of a ladder of quality."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import TEXT, Drawing, bar_axes, figure_of, interval_trace, upright_line
from hybridvalidation.show.kinds import PageChart
from hybridvalidation.study.equivalence import Finding, judge_size
from hybridvalidation.study.factors import harms, method_figures
from hybridvalidation.study.protocol import LadderFile, LadderMade, Made, StudyFile, ladders, read_study, studies
from hybridvalidation.study.report import verdict_sentence

_COLORS = {
    Finding.EQUIVALENT: "#009e73", Finding.WORSE: "#d55e00", Finding.BETTER: "#0072b2", Finding.INCONCLUSIVE: "#8c6d31",
    Finding.UNFINISHED: "#999999",
}  # fmt: skip
_HOW = "executed on the CPU; bars: 95 % interval over paired seeds"


def _draw(files: ScenarioFiles, results: Path) -> Mapping[str, Sequence[Drawing]]:
    drawings: dict[str, Sequence[Drawing]] = {}
    for study in studies(files.folder):
        if made := read_study(results, study):
            drawings[f"study-{study.name}"] = (
                _factors(study, made) if study.largest_harm_pct is None else _harm(study, made)
            )
    for ladder in ladders(files.folder):
        if runs := read_study(results, ladder):
            drawings[f"study-{ladder.name}"] = _sizes(ladder, runs)
    return drawings


def _factors(study: StudyFile, made: Made) -> list[Drawing]:
    found = [figures for method in study.methods if (figures := method_figures(study, made, method.name)) is not None]
    if not found:
        return []
    points = [(figures.name, figures.factor) for figures in found]
    return [
        Drawing(
            name="factor", title="Compute factor against AdamW",
            evidence=f"{_HOW}; above 1: less compute for the same loss",
            says=verdict_sentence(study, made),
            views={"": [interval_trace("compute factor", points, "#0072b2", digits=2)]},
            layout=bar_axes("compute factor", len(points)) | upright_line(1.0, "AdamW"),
        )
    ]  # fmt: skip


def _harm(study: StudyFile, made: Made) -> list[Drawing]:
    found = [harm for harm in harms(study, made) if harm.percents]
    if not found:
        return []
    trace = {
        "type": "scatter", "mode": "markers", "name": "one seed",
        "marker": {"color": "#0072b2", "size": 9, "opacity": 0.8},
        "x": [figure_of(value) for harm in found for value in harm.percents],
        "y": [harm.method.name for harm in found for _ in harm.percents],
        "hovertemplate": "%{y}: %{x:+.2f} %<extra></extra>",
    }  # fmt: skip
    bound = study.largest_harm_pct or 0.0
    return [
        Drawing(
            name="harm", replaces="-harm", title="Loss above AdamW's under the same circumstances",
            says=verdict_sentence(study, made),
            evidence="executed on the CPU, one point a seed; below 0: better", views={"": [trace]},
            layout=bar_axes("% of AdamW's loss", len(found)) | upright_line(bound, f"registered bound: {bound:g} %"),
        )
    ]  # fmt: skip


def _sizes(ladder: LadderFile, made: LadderMade) -> list[Drawing]:
    views = {}
    layouts = {}
    margin = ladder.margin_nats
    for size in ladder.rungs:
        points = [
            (one.finding, f"{one.configuration.name} over {one.reference.name}", interval)
            for one in judge_size(ladder, made, size)
            if (interval := one.interval) is not None
        ]
        if not points:
            continue
        view = f"{size.name}, {size.tokens_per_param:.0f} tokens per parameter"
        views[view] = [
            interval_trace(
                finding.value, [(row, interval) for found, row, interval in points if found is finding], color
            )
            for finding, color in _COLORS.items()
            if any(found is finding for found, _, _ in points)
        ]
        band = {"type": "rect", "xref": "x", "yref": "paper", "x0": -margin, "x1": margin, "y0": 0, "y1": 1,
                "fillcolor": "#009e73", "opacity": 0.15, "line": {"width": 0}}  # fmt: skip
        zero = {"type": "line", "xref": "x", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1,
                "line": {"color": TEXT, "width": 1}}  # fmt: skip
        layouts[view] = bar_axes("nats per token above the compared configuration's loss", len(points)) | {
            "shapes": [band, zero]
        }
    if not views:
        return []
    return [
        Drawing(
            name="rungs", replaces=ladder.name, title="Loss of every configuration beside the one it is compared with",
            choice="model size", views=views,
            evidence=f"{_HOW}, without correction; band: registered margin of {margin:g} nats", layouts=layouts,
            says=verdict_sentence(ladder, made),
        )
    ]  # fmt: skip


CHART = PageChart(order=40, draw=_draw)

"""Studies: compute factors of methods, harm of settings, and the rungs of a ladder of quality."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import TEXT, Drawing, bar_axes, figure_of, interval_trace, upright_line
from hybridvalidation.show.kinds import PageChart
from hybridvalidation.study.figures import method_figures
from hybridvalidation.study.harm import harms
from hybridvalidation.study.ladder.equivalence import Finding, judge_rung
from hybridvalidation.study.ladder.protocol import LadderFile, ladder_names, read_ladder_file
from hybridvalidation.study.ladder.protocol import Made as LadderMade
from hybridvalidation.study.ladder.report import ladder_sentence
from hybridvalidation.study.ladder.runner import read_ladder
from hybridvalidation.study.protocol import Made, StudyFile
from hybridvalidation.study.report import verdict_sentence
from hybridvalidation.study.runner import read_study

_COLORS = {
    Finding.EQUIVALENT: "#009e73", Finding.WORSE: "#d55e00", Finding.BETTER: "#0072b2", Finding.INCONCLUSIVE: "#8c6d31",
    Finding.UNFINISHED: "#999999",
}  # fmt: skip
_HOW = "executed on the CPU; bars: 95 % interval over paired seeds"


def _draw(files: ScenarioFiles, results: Path) -> Mapping[str, Sequence[Drawing]]:
    drawings: dict[str, Sequence[Drawing]] = {}
    for path in sorted((files.folder / "studies").glob("*.toml")):
        study = load_toml(StudyFile, path)
        made = read_study(results, study.name)
        if made:
            drawings[f"study-{study.name}"] = (
                _factors(study, made) if study.largest_harm_pct is None else _harm(study, made)
            )
    for name in ladder_names(files.folder):
        if climbed := read_ladder(results, name):
            drawings[f"study-{name}"] = _rungs(read_ladder_file(files.folder, name), climbed)
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


def _rungs(ladder: LadderFile, made: LadderMade) -> list[Drawing]:
    views = {}
    layouts = {}
    margin = ladder.margin_nats
    for rung in ladder.rungs:
        judged = [one for one in judge_rung(ladder, made, rung) if one.comparison.interval is not None]
        points = [
            (one.finding, f"{one.comparison.arm.name} over {one.comparison.other.name}", interval)
            for one in judged
            if (interval := one.comparison.interval) is not None
        ]
        if not points:
            continue
        view = f"{rung.name}, {rung.tokens_per_param:.0f} tokens a parameter"
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
        layouts[view] = bar_axes("nats a token above the compared arm's loss", len(points)) | {"shapes": [band, zero]}
    if not views:
        return []
    return [
        Drawing(
            name="rungs", replaces=ladder.name, title="Loss of every arm beside the one it is compared with",
            choice="rung", views=views,
            evidence=f"{_HOW}, without correction; band: registered margin of {margin:g} nats", layouts=layouts,
            says=ladder_sentence(ladder, made),
        )
    ]  # fmt: skip


CHART = PageChart(order=40, draw=_draw)

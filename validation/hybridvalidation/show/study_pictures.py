"""Pictures of studies: compute factors of methods, harm of settings, and the model sizes of a quality ladder."""

from collections.abc import Mapping, Sequence

from hybridvalidation.pictures.picture import COLORS, Axis, Line, Picture, Series, View, intervals
from hybridvalidation.show.results import Results
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


def study_pictures(results: Results) -> Mapping[str, Sequence[Picture]]:
    """Return the picture of every study that has one, by the page's name."""
    found: dict[str, Sequence[Picture]] = {}
    for study in results.studies():
        made = read_study(results.folder, study.name)
        picture = (_factors if study.largest_harm_pct is None else _harm)(study, made) if made else None
        found |= {f"study-{study.name}": [picture]} if picture is not None else {}
    return found


def ladder_pictures(results: Results) -> Mapping[str, Sequence[Picture]]:
    """Return the picture of every ladder that has one, by the page's name."""
    found: dict[str, Sequence[Picture]] = {}
    for name in ladder_names(results.files.folder):
        made = read_ladder(results.folder, name)
        picture = _sizes(read_ladder_file(results.files.folder, name), made) if made else None
        found |= {f"study-{name}": [picture]} if picture is not None else {}
    return found


def _factors(study: StudyFile, made: Made) -> Picture | None:
    found = [figures for method in study.methods if (figures := method_figures(study, made, method.name)) is not None]
    points = {figures.name: figures.factor for figures in found}
    view = View(
        series=[intervals("compute factor", points, COLORS[0], digits=2)], x=Axis(title="compute factor"),
        y=Axis(names=list(points)), lines=[Line(at=1.0, text="AdamW")],
    )  # fmt: skip
    picture = Picture(
        name="factor", title="Compute factor against AdamW", says=verdict_sentence(study, made), views={"": view},
        evidence=f"{_HOW}; above 1: less compute for the same loss",
    )  # fmt: skip
    return picture if points else None


def _harm(study: StudyFile, made: Made) -> Picture | None:
    found = [harm for harm in harms(study, made) if harm.percents]
    bound = study.largest_harm_pct or 0.0
    series = Series(
        name="one seed", mark="point", color=COLORS[0], unit="%",
        x=[value for harm in found for value in harm.percents],
        y=[harm.method.name for harm in found for _ in harm.percents],
    )  # fmt: skip
    view = View(
        series=[series], x=Axis(title="% of AdamW's loss"), y=Axis(names=[harm.method.name for harm in found]),
        lines=[Line(at=bound, text=f"registered bound: {bound:g} %")],
    )  # fmt: skip
    picture = Picture(
        name="harm", title="Loss above AdamW's under the same circumstances", views={"": view},
        says=verdict_sentence(study, made), evidence="executed on the CPU, one point per seed; below 0: better",
    )  # fmt: skip
    return picture if found else None


def _sizes(ladder: LadderFile, made: LadderMade) -> Picture | None:
    views, margin = {}, ladder.margin_nats
    for rung in ladder.rungs:
        points = [
            (one.finding, f"{one.comparison.arm.name} over {one.comparison.other.name}", one.comparison.interval)
            for one in judge_rung(ladder, made, rung)
            if one.comparison.interval is not None
        ]
        of_finding = {
            finding: {row: interval for found, row, interval in points if found is finding} for finding in _COLORS
        }
        if points:
            views[f"{rung.name}, {rung.tokens_per_param:.0f} tokens per parameter"] = View(
                series=[
                    intervals(finding.value, mine, _COLORS[finding], digits=4)
                    for finding, mine in of_finding.items()
                    if mine
                ],
                x=Axis(title="nats per token above the compared configuration's loss"), band=(-margin, margin),
                y=Axis(names=[row for _, row, _ in points]), lines=[Line(at=0, text="")],
            )  # fmt: skip
    picture = Picture(
        name=f"study-{ladder.name}", title="Loss of every configuration beside the one it is compared with",
        evidence=f"{_HOW}, without correction; band: registered margin of {margin:g} nats", choice="model size",
        views=views, says=ladder_sentence(ladder, made),
    )  # fmt: skip
    return picture if views else None

"""Pictures of studies: compute factors of methods, harm of settings, and the model sizes of a quality ladder."""

from collections.abc import Mapping, Sequence

from hybridvalidation.judge.statistics import Interval
from hybridvalidation.pictures.picture import COLORS, Axis, Line, Picture, Series, View
from hybridvalidation.show.results import Results
from hybridvalidation.study.equivalence import Finding, judge_size
from hybridvalidation.study.factors import harms, method_figures
from hybridvalidation.study.protocol import LadderFile, LadderMade, Made, StudyFile, all_studies, read_study
from hybridvalidation.study.report import verdict_sentence

_COLORS = {
    Finding.EQUIVALENT: "#009e73", Finding.WORSE: "#d55e00", Finding.BETTER: "#0072b2", Finding.INCONCLUSIVE: "#8c6d31",
    Finding.UNFINISHED: "#999999",
}  # fmt: skip
_HOW = "executed on the CPU; bars: 95 % interval over paired seeds"


def study_pictures(results: Results) -> Mapping[str, Sequence[Picture]]:
    """Return the picture of every study that has one, by the page's name."""
    found = {}
    for study in all_studies(results.files.folder):
        if made := read_study(results.folder, study):
            if isinstance(study, LadderFile):
                picture = _sizes(study, made)
            else:
                picture = (_factors if study.largest_harm_pct is None else _harm)(study, made)
            found[f"study-{study.name}"] = picture
    return {name: [picture] for name, picture in found.items() if picture is not None}


def _factors(study: StudyFile, made: Made) -> Picture | None:
    found = [figures for method in study.methods if (figures := method_figures(study, made, method.name)) is not None]
    points = [(figures.name, figures.factor) for figures in found]
    view = View(
        series=[_intervals("compute factor", points, COLORS[0], digits=2)], x=Axis(title="compute factor"),
        y=Axis(names=[name for name, _ in points]), lines=[Line(at=1.0, text="AdamW")],
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
        name="harm", replaces="-harm", title="Loss above AdamW's under the same circumstances", views={"": view},
        says=verdict_sentence(study, made), evidence="executed on the CPU, one point per seed; below 0: better",
    )  # fmt: skip
    return picture if found else None


def _sizes(ladder: LadderFile, made: LadderMade) -> Picture | None:
    views, margin = {}, ladder.margin_nats
    for size in ladder.rungs:
        points = [
            (one.finding, f"{one.configuration.name} over {one.reference.name}", one.interval)
            for one in judge_size(ladder, made, size)
            if one.interval is not None
        ]
        of_finding = {
            finding: [(row, interval) for found, row, interval in points if found is finding] for finding in _COLORS
        }
        if points:
            views[f"{size.name}, {size.tokens_per_param:.0f} tokens per parameter"] = View(
                series=[
                    _intervals(finding.value, mine, _COLORS[finding]) for finding, mine in of_finding.items() if mine
                ],
                x=Axis(title="nats per token above the compared configuration's loss"), band=(-margin, margin),
                y=Axis(names=[row for _, row, _ in points]), lines=[Line(at=0, text="")],
            )  # fmt: skip
    picture = Picture(
        name="sizes", replaces=ladder.name, title="Loss of every configuration beside the one it is compared with",
        evidence=f"{_HOW}, without correction; band: registered margin of {margin:g} nats", choice="model size",
        views=views, says=verdict_sentence(ladder, made),
    )  # fmt: skip
    return picture if views else None


def _intervals(name: str, points: Sequence[tuple[str, Interval]], color: str, *, digits: int = 4) -> Series:
    return Series(
        name=name, mark="point", color=color, digits=digits, x=[interval.mean for _, interval in points],
        y=[row for row, _ in points], low=[interval.low for _, interval in points],
        high=[interval.high for _, interval in points],
        notes=[f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]" for _, interval in points],
    )  # fmt: skip

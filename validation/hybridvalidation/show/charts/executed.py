"""What executed runs held beside what was planned of them, on every tier."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.units import to_gib
from hybridvalidation.experiments.executed import ExecutedRun, TierPeaks, read_executed
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import Drawing, Trace, bar_axes, figure_of
from hybridvalidation.show.kinds import PageChart

_TIERS = {"card": "device_bytes", "host": "host_bytes", "disk": "disk_bytes"}


def _draw(_files: ScenarioFiles, results: Path) -> Mapping[str, Sequence[Drawing]]:
    runs = list({run.key: run for run in read_executed(results / "records")}.values())
    if not runs:
        return {}
    names = [_name(run, number) for number, run in enumerate(runs, 1)]
    views = {
        tier: [
            _bars("planned", [_gib(run.planned, field) for run in runs], names, "#56b4e9"),
            _bars("executed", [_gib(run.executed, field) for run in runs], names, "#0072b2"),
        ]
        for tier, field in _TIERS.items()
        if any(getattr(run.executed, field) for run in runs)
    }
    equal = sum(run.is_equal for run in runs)
    return {
        "executed": [
            Drawing(
                name="executed", title="Planned and executed, most bytes at once", choice="where", views=views,
                evidence="executed: trained with real arithmetic on the CPU, bytes counted; planned: by a dry run",
                says=f"{equal} of {len(runs)} executed runs held what was planned, event by event.",
                layout=bar_axes("GiB", 2 * len(runs), rangemode="tozero") | {"barmode": "group"},
            )
        ]
    }  # fmt: skip


def _bars(name: str, sizes: Sequence[float], rows: Sequence[str], color: str) -> Trace:
    return {
        "type": "bar", "orientation": "h", "name": name, "x": list(sizes), "y": list(rows), "marker": {"color": color},
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:.3f}} GiB<extra></extra>",
    }  # fmt: skip


def _gib(peaks: TierPeaks, field: str) -> float:
    return figure_of(to_gib(getattr(peaks, field)))


def _name(run: ExecutedRun, number: int) -> str:
    return f"{number}: {run.model}, {run.stack}"


CHART = PageChart(order=20, draw=_draw)

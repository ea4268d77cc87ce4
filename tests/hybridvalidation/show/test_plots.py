from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hybridtrain.dry_runs import dry_run
from hybridtrain.models.model_config import BatchWorkload, ModelSpec, Workload
from hybridtrain.plan.compose import compose
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.card import find_card
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.runs.figures import memory_figures
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.scenario import CardSpec, Scenario
from hybridvalidation.show.pictures import write_plots
from hybridvalidation.show.plots.peak import plot_peak
from tiny_models import GPT2_UNTIED

SCENARIO = Scenario(
    name="tiny", says="a tiny model", model=ModelSpec(shape=GPT2_UNTIED), card=CardSpec(name="rtx-3090"),
    workload=BatchWorkload(batch_size=1, seq_len=8), stacks=("vanilla", "lean"),
)  # fmt: skip
PLANNED = memory_figures(
    dry_run(GPT2_UNTIED, compose([]), find_card("rtx-3090"), Workload(micro_batch_size=1, seq_len=8))
)


def run_of(**weights_gib: int) -> ScenarioRun:
    records = {}
    for stack, gib in weights_gib.items():
        size = gib * GIB
        memory = replace(
            PLANNED, fits=gib < 24, peak_reserved_bytes=size, device_used_bytes=size,
            by_class=dict.fromkeys(PLANNED.by_class, 0) | {"weight": size},
        )  # fmt: skip
        records["dry_run", stack] = StackRun(
            key="k", kind="dry_run", scenario="tiny", stack=stack, evidence=Evidence.PLANNED, outcome=Outcome.OK,
            started_at="2026-01-01T00:00:00+00:00", duration_s=1.0, environment=read_environment(), plan={},
            memory=memory,
        )  # fmt: skip
    return ScenarioRun(scenario=SCENARIO, stacks={}, records=records, num_cached=0)


@pytest.mark.parametrize(("vanilla_gib", "is_cut"), [(60, False), (900, True)])
def test_a_stack_that_fits_is_seen_beside_one_many_times_the_card(vanilla_gib: int, is_cut: bool) -> None:
    figure = Figure()
    plot_peak(run_of(vanilla=vanilla_gib, lean=12), figure)
    (axes,) = figure.axes
    _, top = axes.get_ylim()
    assert top <= 3 * 24 + 1e-9
    assert ("cut off" in axes.get_ylabel()) is is_cut
    assert [text.get_text() for text in axes.texts] == [f"{vanilla_gib}.0\ndoes not fit", "12.0"]
    assert all(0 < text.xy[1] < top for text in axes.texts)  # type: ignore[attr-defined]


def test_a_scenario_that_trains_nothing_has_no_picture_of_accuracy(tmp_path: Path) -> None:
    paths = write_plots(run_of(vanilla=30, lean=12), tmp_path)
    names = {path.name for path in paths}
    assert {"tiny-peak.png", "tiny-timeline.png"} <= names
    assert "tiny-accuracy.png" not in names

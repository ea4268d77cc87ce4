from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hybridtrain.models.model_config import BatchWorkload, Workload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.figures import memory_figures
from hybridtrain.run.environment import read_environment
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.scenario import CardSpec, Scenario
from hybridvalidation.show.pictures import write_plots
from hybridvalidation.show.plots import timeline
from hybridvalidation.show.plots.peak import PLOT, plot_peak
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
            started_at="2026-01-01T00:00:00+00:00", duration_s=1.0, environment=read_environment(), asked={}, plan={},
            memory=memory,
        )  # fmt: skip
    return ScenarioRun(scenario=SCENARIO, stacks={}, records=records, num_cached=0)


@pytest.mark.parametrize(("vanilla_gib", "is_cut"), [(30, False), (900, True)])
def test_a_stack_that_fits_is_seen_beside_one_many_times_the_card(vanilla_gib: int, is_cut: bool) -> None:
    figure = Figure()
    plot_peak(run_of(vanilla=vanilla_gib, lean=12), figure)
    (axes,) = figure.axes
    _, top = axes.get_ylim()
    assert top <= 1.5 * 24 + 1e-9
    assert ("cut off" in axes.get_ylabel()) is is_cut
    assert [text.get_text() for text in axes.texts] == ["12.4", f"{vanilla_gib}.4\ndoes not fit"]  # with the context
    assert all(0 < text.xy[1] < top for text in axes.texts)  # type: ignore[attr-defined]


def test_names_below_bars_do_not_overlap() -> None:
    names = [f"very-long-name-of-{number}" for number in range(10)]
    run = replace(run_of(**dict.fromkeys(names, 12)), scenario=replace(SCENARIO, stacks=tuple(names)))
    figure = Figure(figsize=PLOT.size(run))
    plot_peak(run, figure)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == 10
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_host_memory_has_a_panel_of_its_own_with_its_limit() -> None:
    run = run_of(vanilla=30, lean=12)
    record = run.records["dry_run", "lean"]
    assert record.memory is not None
    memory = replace(record.memory, host_peak_bytes=50 * GIB, host_by_class={"weight": 40 * GIB})
    records = {**run.records, ("dry_run", "lean"): replace(record, memory=memory)}
    figure = Figure()
    limited = replace(SCENARIO, host=Host(memory_gib=68, reserved_gib=4))
    plot_peak(replace(run, scenario=limited, records=records), figure)
    card, host = figure.axes
    assert [text.get_text() for text in host.texts] == ["50.0", ""]
    assert "host memory for tensors: 64.0 GiB" in host.get_legend_handles_labels()[1]
    assert len(card.texts) == 2


def test_timelines_are_of_stacks_that_fit_and_as_high_as_a_page() -> None:
    figure = Figure()
    timeline.PLOT.draw(run_of(vanilla=30, lean=12), figure)
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith("lean")
    assert "do not fit: vanilla" in figure.get_suptitle()
    many = replace(SCENARIO, stacks=tuple(f"s{number}" for number in range(12)))
    run = replace(run_of(**{f"s{number}": 12 for number in range(12)}), scenario=many)
    assert timeline.PLOT.size(run)[1] <= 12


def test_a_scenario_that_trains_nothing_has_no_picture_of_accuracy(tmp_path: Path) -> None:
    paths = write_plots(run_of(vanilla=30, lean=12), tmp_path)
    names = {path.name for path in paths}
    assert {"tiny-peak.png", "tiny-timeline.png"} <= names
    assert "tiny-accuracy.png" not in names

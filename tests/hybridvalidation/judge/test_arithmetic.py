from dataclasses import replace
from typing import Any

import pytest

from hybridtrain.models.model_config import BatchWorkload, Workload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.figures import Timeline, memory_figures
from hybridtrain.run.environment import read_environment
from hybridtrain.units import GB
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.case import Case, Metric
from hybridvalidation.judge.metrics import compute_metric
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.scenario import CardSpec, Scenario, StatedParts, Target
from tiny_models import GPT2_UNTIED

PLANNED = memory_figures(
    dry_run(GPT2_UNTIED, compose([]), find_card("rtx-3090"), Workload(micro_batch_size=1, seq_len=8)),
    with_timeline=False,
)
ENVIRONMENT = read_environment()
EVERYTHING = StatedParts(weight=4, grad=4, optim_state=8, activation_gb=20)


def planned(stack: str, *, interval: int = 0, weight: int = 0, kept: int = 0, **changes: Any) -> StackRun:
    by_class = dict.fromkeys(PLANNED.by_class, (0,)) | {"weight": (weight,), "activation": (kept,)}
    memory = replace(PLANNED, timeline=Timeline(times_s=(0.0,), by_class=by_class), **changes)
    return StackRun(
        key="k", kind="dry_run", scenario="mine", stack=stack, evidence=Evidence.PLANNED, outcome=Outcome.OK,
        started_at="2026-01-01T00:00:00+00:00", duration_s=1.0, environment=ENVIRONMENT,
        asked={}, plan={"recompute_every": str(interval)}, memory=memory,
    )  # fmt: skip


def asked(
    name: str, *records: StackRun, preset: str = "llama-7b", parts: StatedParts | None = None, baseline: str = "vanilla"
) -> Metric | None:
    scenario = Scenario(
        name="mine", description="mine", model=ModelSpec(preset=preset), card=CardSpec(name="rtx-3090"),
        workload=BatchWorkload(batch_size=1, seq_len=8), stacks=("vanilla", "lean"),
    )  # fmt: skip
    run = ScenarioRun(
        scenario=scenario, stacks={}, records={("dry_run", item.stack): item for item in records}, num_cached=0
    )
    target = Target(
        id="stated", source=("000",), description="stated", metric=name, direction="equal", value=1.0, parts=parts
    )
    return compute_metric(Case(run=run, target=target, stack="lean", baseline=baseline))


def answer(name: str, *records: StackRun, **question: Any) -> Metric:
    found = asked(name, *records, **question)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("parts", "gigabytes"),
    [  # bytes per parameter of the 13.14B model, and what is stated beside
        (EVERYTHING, 16 * 13.14 + 20),
        (StatedParts(weight=2, grad=2, optim_state=2, activation_gb=5), 6 * 13.14 + 5),
        (StatedParts(weight=2, grad=2, activation_gb=5), 4 * 13.14 + 5),
    ],
)
def test_a_total_is_the_sum_of_its_parts(parts: StatedParts, gigabytes: float) -> None:
    found = answer("sum_of_parts_gb", preset="llama-13b-57l", parts=parts)
    assert found.value == pytest.approx(gigabytes, rel=1e-3)  # 13.14B has four digits
    assert (found.evidence, found.unit, found.fits) == (Evidence.ARITHMETIC, "GB", True)


def test_a_total_stands_beside_what_is_planned() -> None:
    sizes = dict.fromkeys(PLANNED.by_class, 0) | {
        "weight": 2 * GB, "grad": 3 * GB, "optim_state": 4 * GB, "master": GB, "activation": 6 * GB, "boundary": GB,
    }  # fmt: skip
    record = planned("lean", peak_allocated_bytes=17 * GB, by_class=sizes)
    found = answer("sum_of_parts_gb", record, parts=EVERYTHING)
    assert found.remark == (
        "4 + 4 + 8 bytes for each of 6.74B parameters and 20 GB of activations as stated; planned: weights 2.00, "
        "gradients 3.00, optimizer 5.00, activations 7.00"
    )
    assert found.decider is not None
    assert (found.decider.value, found.decider.evidence, found.decider.is_saving) == (17.0, Evidence.PLANNED, False)


def test_a_total_is_of_as_many_parameters_as_its_document_counts() -> None:
    found = answer("sum_of_parts_gb", parts=StatedParts(weight=4, grad=4, optim_state=8, num_params=7e9))
    assert found.value == pytest.approx(16 * 7.0, rel=1e-12)  # float64
    assert "this model has 6.74B" in found.remark


def test_a_layer_is_counted_with_all_that_it_needs() -> None:
    found = answer("bytes_per_layer_mb", parts=StatedParts(weight=2, grad=2, optim_state=8))
    assert found.value == pytest.approx(12 * 202.4, rel=1e-3)  # MB; 202.4M parameters
    assert "weights alone 405 MB, 32 blocks 77.7 GB" in found.remark


@pytest.mark.parametrize(
    ("name", "interval", "stated"),
    [
        ("stored_activation_reduction_pct", 8, 87.5),
        ("stored_activation_reduction_pct", 0, 0.0),
        ("stored_activation_reduction_pct", 5, 100 * (1 - 7 / 32)),  # the last segment is shorter
        ("time_averaged_activation_reduction_pct", 8, 100 * (1 - 0.3 * 4 / 32)),
    ],
)
def test_kept_inputs_are_counted_and_the_peak_decides(name: str, interval: int, stated: float) -> None:
    found = answer(name, planned("vanilla", kept=100), planned("lean", interval=interval, kept=39))
    assert found.value == pytest.approx(stated, rel=1e-12)  # float64
    assert found.evidence is Evidence.ARITHMETIC
    assert found.decider is not None
    assert found.decider.value == pytest.approx(61.0, rel=1e-12)
    assert found.decider.evidence is Evidence.PLANNED


def test_int8_is_told_by_its_codes_and_decided_by_what_is_on_the_card() -> None:
    records = (planned("mixed", weight=200), planned("lean", weight=120), planned("vanilla", weight=400))
    found = answer("weight_bytes_reduction_pct", *records, baseline="mixed")
    assert found.value == pytest.approx(100 * (1 - (1 + 4 / 256) / 2), rel=1e-12)
    assert "105 MB of scales" in found.remark
    assert found.decider is not None
    assert found.decider.value == pytest.approx(40.0, rel=1e-12)


def test_weights_of_one_phase_do_not_lower_the_peak_of_another() -> None:
    found = answer("time_averaged_weight_reduction_pct")
    assert found.value == pytest.approx(40.0, rel=1e-12)
    assert found.decider is not None
    assert found.decider.value == 0.0
    assert "6.74 GB of weights in Predict, 13.48 GB in Full" in found.remark


def test_optimizer_state_is_told_by_its_codes_beside_what_is_planned() -> None:
    sizes = dict.fromkeys(PLANNED.by_class, 0)
    records = [
        planned(stack, by_class=sizes | {"optim_state": size}) for stack, size in (("vanilla", 80), ("lean", 21))
    ]
    found = answer("optimizer_bytes_reduction_pct", *records, preset="llama-13b-57l")
    assert found.value == pytest.approx(100 * (1 - 2 * (1 + 4 / 256) / 8), rel=1e-12)  # float64
    assert found.evidence is Evidence.ARITHMETIC
    assert found.remark == "105.14 to 26.70 GB"
    assert found.decider is not None
    assert (found.decider.value, found.decider.evidence) == (73.75, Evidence.PLANNED)


@pytest.mark.parametrize(
    "name",
    [
        "stored_activation_reduction_pct", "time_averaged_activation_reduction_pct", "weight_bytes_reduction_pct",
        "optimizer_bytes_reduction_pct",
    ],
)  # fmt: skip
def test_without_the_figure_that_decides_nothing_is_told(name: str) -> None:
    assert asked(name, planned("lean", interval=8)) is None

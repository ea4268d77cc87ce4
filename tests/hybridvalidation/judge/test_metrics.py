from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest

from hybridtrain.models.model_config import BatchWorkload, Workload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.figures import Timeline, memory_figures
from hybridtrain.planning.time_error import RATIO_ERROR, TIME_ERROR, WAITING_ERROR
from hybridtrain.run.environment import read_environment
from hybridtrain.units import GB, GIB
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.case import Case, Metric
from hybridvalidation.judge.metrics import accuracy_retention, compute_metric, perplexity_ratio
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import AccuracyFigures, MeasuredFigures, SeedResult, StackRun
from hybridvalidation.scenario import AccuracySpec, CardSpec, Scenario, Target
from tiny_models import GPT2_UNTIED

ROUNDING = 1e-12  # relative, of a few float64 operations
T95_OF_3 = 4.303  # two-sided 95 % quantile of Student's t with 2 degrees of freedom
SCENARIO = Scenario(
    name="tiny", description="a tiny model", model=ModelSpec(shape=GPT2_UNTIED), card=CardSpec(name="rtx-3090"),
    workload=BatchWorkload(batch_size=1, seq_len=8), stacks=("vanilla", "lean"),
    accuracy=AccuracySpec(
        proxy=replace(GPT2_UNTIED, vocab_size=256), seeds=(0, 1, 2), num_steps=1, batch_size=1, seq_len=8,
        lr=0.1, validation_batches=1,
    ),
)  # fmt: skip
PLANNED = memory_figures(
    dry_run(GPT2_UNTIED, compose([]), find_card("rtx-3090"), Workload(micro_batch_size=1, seq_len=8)),
    with_timeline=False,
)
ENVIRONMENT = read_environment()


def record(kind: str, stack: str, **figures: Any) -> StackRun:
    return StackRun(
        key="k", kind=kind, scenario="tiny", stack=stack, evidence=Evidence.PLANNED, outcome=Outcome.OK,
        started_at="2026-01-01T00:00:00+00:00", duration_s=1.0, environment=ENVIRONMENT, asked={}, plan={}, **figures,
    )  # fmt: skip


def run_of(*records: StackRun) -> ScenarioRun:
    by_place = {(item.kind, item.stack): item for item in records}
    return ScenarioRun(scenario=SCENARIO, stacks={}, records=by_place, num_cached=0)


def planned(stack: str, **changes: Any) -> StackRun:
    return record("dry_run", stack, memory=replace(PLANNED, **changes))


def executed(
    stack: str, accuracies: Sequence[float], losses: Sequence[float] = (), seeds: Sequence[int] = (0, 1, 2)
) -> StackRun:
    results = tuple(
        SeedResult(seed=seed, validation_loss=loss, validation_accuracy=accuracy, final_train_loss=1.0)
        for seed, accuracy, loss in zip(seeds, accuracies, losses or [1.0] * len(accuracies), strict=True)
    )
    figures = AccuracyFigures(
        num_params=1_230_000, num_tokens=4096, num_validation_tokens=64, corpus="embedded", corpus_digest="d",
        seeds=results,
    )  # fmt: skip
    return record("accuracy", stack, accuracy=figures)


def measured(stack: str) -> StackRun:
    figures = MeasuredFigures(
        peak_allocated_bytes=GIB, peak_reserved_bytes=2 * GIB, device_used_bytes=3 * GIB, num_alloc_retries=0,
        step_times_s=(1.0, 2.0, 3.0), tokens_per_s=123.0, cap_bytes=16 * GIB,
    )  # fmt: skip
    return record("measured", stack, measured=figures)


def asked(run: ScenarioRun, name: str, stack: str, baseline: str = "vanilla") -> Metric | None:
    target = Target(id="stated", source=("000",), description="stated", metric=name, direction="max", value=1.0)
    return compute_metric(Case(run=run, target=target, stack=stack, baseline=baseline))


@pytest.mark.parametrize(("name", "divisor", "unit"), [("peak_vram_gib", GIB, "GiB"), ("peak_vram_gb", GB, "GB")])
def test_the_peak_is_what_the_device_shows(name: str, divisor: int, unit: str) -> None:
    run = run_of(planned("lean", device_used_bytes=5 * divisor, peak_allocated_bytes=4 * divisor))
    found = asked(run, name, "lean")
    assert found is not None
    assert (found.value, found.unit, found.evidence, found.fits) == (5.0, unit, Evidence.PLANNED, True)
    assert found.remark == f"allocated 4.00 {unit}"
    assert found.decimal == (5 * GIB / GB if unit == "GiB" else None)  # of GB that are stated, GiB is one reading


def test_a_peak_tells_what_lies_elsewhere() -> None:
    run = run_of(planned("lean", peak_allocated_bytes=4 * GIB, host_peak_bytes=7 * GIB, disk_peak_bytes=9 * GIB))
    found = asked(run, "peak_vram_gib", "lean")
    assert found is not None
    assert found.remark == "allocated 4.00 GiB, host 7.00 GiB, disk 9.00 GiB"


def test_a_measured_peak_replaces_the_planned_one() -> None:
    found = asked(run_of(planned("lean"), measured("lean")), "peak_vram_gib", "lean")
    assert found is not None
    assert (found.value, found.evidence) == (3.0, Evidence.MEASURED)


def test_a_measured_run_out_of_memory_is_no_measurement() -> None:
    run = run_of(planned("lean"), record("measured", "lean"))
    found = asked(run, "peak_vram_gib", "lean")
    assert found is not None
    assert found.evidence is Evidence.PLANNED


def test_speed_is_estimated_until_it_is_measured() -> None:
    estimated = asked(run_of(planned("lean", tokens_per_s=77.0)), "tokens_per_s", "lean")
    found = asked(run_of(planned("lean", tokens_per_s=77.0), measured("lean")), "tokens_per_s", "lean")
    assert estimated is not None
    assert found is not None
    assert (estimated.value, estimated.evidence) == (77.0, Evidence.ESTIMATED)
    assert (found.value, found.evidence) == (123.0, Evidence.MEASURED)


@pytest.mark.parametrize(
    ("waits", "error", "ratio"),
    [(0.03, TIME_ERROR, RATIO_ERROR), (0.05, WAITING_ERROR, WAITING_ERROR), (0.5, WAITING_ERROR, WAITING_ERROR)],
)
def test_a_step_that_waits_has_the_error_of_recorded_ones_that_do(waits: float, error: float, ratio: float) -> None:
    times = {Bottleneck.COMPUTE.value: 2 * (1 - waits), Bottleneck.TRANSFER.value: waits, Bottleneck.DISK.value: waits}
    lean = planned("lean", tokens_per_s=30.0, step_time_s=2.0, time_by_bound=times)
    plain = planned("vanilla", tokens_per_s=40.0, step_time_s=2.0, time_by_bound={Bottleneck.COMPUTE.value: 2.0})
    for name, wide in {"tokens_per_s": error, "relative_throughput_x": ratio}.items():
        found = asked(run_of(lean, plain), name, "lean")
        assert found is not None
        assert found.error is not None
        assert found.error.high / found.value == pytest.approx(1 + wide, rel=ROUNDING)
        assert ("waits 50% of its step; recorded steps test 4% to 18%" in found.remark) is (waits == 0.5)
        assert found.is_untested is (waits == 0.5)


@pytest.mark.parametrize("name", ["tokens_per_s", "peak_vram_gib"])
def test_a_step_of_other_size_than_the_scenarios_is_told(name: str) -> None:
    same, other = (asked(run_of(planned("lean", tokens_per_step=count)), name, "lean") for count in (8, 4096))
    assert same is not None
    assert other is not None
    assert "tokens per step" not in same.remark
    assert other.remark.startswith("at 4,096 tokens per step, while the scenario has 8")


@pytest.mark.parametrize("fits", [True, False])
def test_relative_speed_says_when_the_baseline_cannot_run(fits: bool) -> None:
    run = run_of(planned("lean", tokens_per_s=30.0), planned("vanilla", tokens_per_s=40.0, fits=fits))
    found = asked(run, "relative_throughput_x", "lean")
    assert found is not None
    assert found.value == 0.75
    assert found.fits
    assert ("does not fit" in found.remark) is not fits


def test_reductions_are_against_the_unoptimised_run() -> None:
    run = run_of(planned("lean", peak_allocated_bytes=250), planned("vanilla", peak_allocated_bytes=1000))
    peak = asked(run, "peak_vram_reduction_pct", "lean")
    assert peak is not None
    assert (peak.value, peak.evidence) == (75.0, Evidence.PLANNED)


@pytest.mark.parametrize(
    ("name", "value"), [("relative_throughput_x", 0.8), ("slowdown_x", 1.25), ("step_time_overhead_pct", 25.0)]
)
def test_speed_is_told_against_the_baseline(name: str, value: float) -> None:
    run = run_of(planned("lean", tokens_per_s=32.0), planned("vanilla", tokens_per_s=40.0))
    found = asked(run, name, "lean")
    assert found is not None
    assert found.value == pytest.approx(value, rel=ROUNDING)
    assert found.evidence is Evidence.ESTIMATED


def through_a_step(**sizes: tuple[int, ...]) -> Timeline:
    moments = len(next(iter(sizes.values())))
    return Timeline(
        times_s=tuple(float(moment) for moment in range(moments)),
        by_class=dict.fromkeys(PLANNED.by_class, (0,) * moments) | sizes,
    )


def test_kept_bytes_are_compared_at_each_runs_own_peak_of_them() -> None:
    # Both classes together at one moment: 80 + 20, not 90 + 20; and not what they hold at the peak of all classes.
    vanilla = through_a_step(activation=(10, 80, 90), boundary=(20, 20, 0), grad=(0, 0, 500))
    lean = through_a_step(activation=(10, 20), boundary=(5, 5), grad=(900, 0))
    run = run_of(planned("vanilla", timeline=vanilla), planned("lean", timeline=lean))
    found = asked(run, "activation_peak_reduction_pct", "lean")
    assert found is not None
    assert (found.value, found.evidence) == (75.0, Evidence.PLANNED)


@pytest.mark.parametrize("name", ["slowdown_x", "relative_throughput_x"])
def test_a_speed_is_told_against_no_step_of_other_tokens(name: str) -> None:
    run = run_of(planned("lean", tokens_per_step=4096), planned("vanilla", tokens_per_step=512))
    assert asked(run, name, "lean") is None


def test_a_speed_against_bf16_has_that_against_fp32_beside_it() -> None:
    speeds = {"lean": 30.0, "mixed": 60.0, "vanilla": 20.0}
    run = run_of(*(planned(stack, tokens_per_s=speed) for stack, speed in speeds.items()))
    found = asked(run, "slowdown_x", "lean", baseline="mixed")
    assert found is not None
    assert found.value == pytest.approx(2.0, rel=ROUNDING)
    assert found.remark == "against mixed; 0.67 x against vanilla"
    assert found.error is not None
    assert found.error.low < 2.0 < found.error.high


def cycle(stack: str, predicted: int, whole: int) -> StackRun:
    step = PLANNED.steps[-1]
    steps = (replace(step, phase="full"), replace(step, phase="predict", allocated_bytes=predicted))
    return planned(stack, steps=steps, peak_allocated_bytes=whole)


def test_of_a_cycle_the_whole_peak_decides() -> None:
    run = run_of(planned("vanilla", peak_allocated_bytes=1000), cycle("lean", predicted=170, whole=1160))
    found = asked(run, "predict_phase_vram_reduction_pct", "lean")
    assert found is not None
    assert found.value == pytest.approx(83.0, rel=ROUNDING)
    assert found.decider is not None
    assert found.decider.value == pytest.approx(-16.0, rel=ROUNDING)


@pytest.mark.parametrize("name", ["peak_vram_reduction_pct", "step_time_overhead_pct"])
def test_other_batches_than_the_baselines_are_told(name: str) -> None:
    run = run_of(planned("lean", tokens_per_step=4096), planned("vanilla", tokens_per_step=512))
    found = asked(run, name, "lean")
    assert found is not None
    assert "against vanilla, 4,096 tokens per step against 512" in found.remark


def test_parameters_are_compared_at_their_peak_with_the_named_stack() -> None:
    run = run_of(
        planned("vanilla", timeline=through_a_step(weight=(400, 400))),
        planned("mixed", timeline=through_a_step(weight=(200, 200))),
        planned("lean", timeline=through_a_step(weight=(40, 50), activation=(9, 0))),
    )
    assert asked(run, "parameter_peak_reduction_pct", "lean").value == 87.5  # type: ignore[union-attr]
    against = asked(run, "parameter_peak_reduction_pct", "lean", baseline="mixed")
    assert against is not None
    assert against.value == 75.0
    assert "against mixed" in against.remark


@pytest.mark.parametrize(
    "name",
    ["peak_vram_gib", "tokens_per_s", "relative_throughput_x", "peak_vram_reduction_pct", "step_time_overhead_pct"],
)
def test_a_metric_knows_that_its_stack_does_not_fit(name: str) -> None:
    found = asked(run_of(planned("lean", fits=False), planned("vanilla")), name, "lean")
    assert found is not None
    assert not found.fits


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("peak_vram_gib", []),
        ("tokens_per_s", []),
        ("relative_throughput_x", [planned("lean")]),
        ("relative_throughput_x", [planned("vanilla")]),
        ("peak_vram_reduction_pct", [planned("lean")]),
        ("slowdown_x", [planned("lean")]),
        ("step_time_overhead_pct", [planned("vanilla")]),
        ("activation_peak_reduction_pct", [planned("lean")]),
        ("activation_peak_reduction_pct", [planned("lean"), planned("vanilla")]),  # without what happened in the step
        ("accuracy_loss_pct", [executed("lean", [0.1, 0.2, 0.3])]),
        ("optimizer_bytes_reduction_pct", [planned("vanilla")]),
        ("accuracy_retention_pct", [executed("lean", [0.1, 0.2, 0.3])]),
        ("accuracy_retention_pct", [executed("vanilla", [0.1, 0.2, 0.3])]),
        ("accuracy_retention_pct", [record("accuracy", "lean"), executed("vanilla", [0.1, 0.2, 0.3])]),
        ("hybrid_speedup", [planned("lean"), planned("vanilla")]),
    ],
)
def test_without_evidence_there_is_no_metric(name: str, records: Sequence[StackRun]) -> None:
    assert asked(run_of(*records), name, "lean") is None


def test_accuracy_is_paired_by_seed() -> None:
    # Ratios 101, 100 and 99 %: mean 100, deviation 1, standard error 1 / sqrt(3).
    run = run_of(executed("lean", [0.404, 0.2, 0.297]), executed("vanilla", [0.4, 0.2, 0.3]))
    found = accuracy_retention(run, "lean")
    assert found is not None
    assert found.mean == pytest.approx(100.0, rel=ROUNDING)
    assert found.high - found.low == pytest.approx(2 * T95_OF_3 / 3**0.5, rel=1e-9)  # float64, differences of ratios
    metric = asked(run, "accuracy_retention_pct", "lean")
    assert metric is not None
    assert (metric.interval, metric.evidence) == (found, Evidence.EXECUTED)
    assert "1.23M parameters, 3 seeds" in metric.remark


def test_a_loss_of_accuracy_is_what_is_not_retained() -> None:
    run = run_of(executed("lean", [0.396, 0.2, 0.297]), executed("vanilla", [0.4, 0.2, 0.3]))  # 99, 100 and 99 %
    loss, kept = asked(run, "accuracy_loss_pct", "lean"), accuracy_retention(run, "lean")
    assert loss is not None
    assert loss.interval is not None
    assert kept is not None
    assert loss.value == pytest.approx(2 / 3, rel=1e-9)  # float64, differences of ratios
    assert (loss.interval.low, loss.interval.high) == (100 - kept.high, 100 - kept.low)
    assert loss.evidence is Evidence.EXECUTED


def test_accumulation_is_told_by_how_far_the_weights_end_apart() -> None:
    alone = executed("lean", [0.1] * 3)
    assert asked(run_of(alone), "relative_weight_difference", "lean") is None
    assert alone.accuracy is not None
    compared = replace(alone, accuracy=replace(alone.accuracy, accumulation_difference=3e-7))
    found = asked(run_of(compared), "relative_weight_difference", "lean")
    assert found is not None
    assert (found.value, found.evidence) == (3e-7, Evidence.EXECUTED)


def test_accuracy_is_compared_with_the_named_stack() -> None:
    accuracies = {"vanilla": 0.4, "mixed": 0.2, "lean": 0.1}
    run = run_of(*(executed(stack, [accuracy] * 3) for stack, accuracy in accuracies.items()))
    found = asked(run, "accuracy_retention_pct", "lean", baseline="mixed")
    assert found is not None
    assert found.value == pytest.approx(50.0, rel=ROUNDING)


def test_the_baseline_retains_all_of_itself() -> None:
    found = accuracy_retention(run_of(executed("vanilla", [0.1, 0.2, 0.3])), "vanilla")
    assert found is not None
    assert (found.low, found.mean, found.high) == (100.0, 100.0, 100.0)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    lean = executed("lean", [1, 1, 1], losses=[log(2.02), log(3.0), log(3.96)])
    vanilla = executed("vanilla", [1, 1, 1], losses=[log(2.0), log(3.0), log(4.0)])
    found = perplexity_ratio(run_of(lean, vanilla), "lean")
    assert found is not None
    assert found.mean == pytest.approx(100.0, rel=ROUNDING)


def test_a_baseline_that_predicts_nothing_right_proves_nothing() -> None:
    run = run_of(executed("lean", [0.1, 0.1, 0.1]), executed("vanilla", [0.0, 0.1, 0.1]))
    assert accuracy_retention(run, "lean") is None


def test_a_loss_beyond_every_exponent_is_told() -> None:
    # Two runs that went astray: exp(800) is no float64, the ratio of both perplexities is.
    lean = executed("lean", [0.1] * 3, losses=[800.0] * 3)
    vanilla = executed("vanilla", [0.1] * 3, losses=[799.0] * 3)
    found = perplexity_ratio(run_of(lean, vanilla), "lean")
    assert found is not None
    assert found.mean == pytest.approx(100 * exp(1.0), rel=ROUNDING)


@pytest.mark.parametrize("seeds", [(3, 4, 5), (0, 1, 2, 3)], ids=["others", "more"])
def test_runs_of_different_seeds_are_not_paired(seeds: Sequence[int]) -> None:
    # As when `validate` was stopped half-way after the seeds had been changed.
    run = run_of(executed("lean", [0.1] * len(seeds), seeds=seeds), executed("vanilla", [0.1] * 3))
    assert accuracy_retention(run, "lean") is None

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from hybridtrain.planning.time_error import TIME_ERROR
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge import joint as joint_module
from hybridvalidation.judge import verdict as verdict_module
from hybridvalidation.judge.case import Decider, Metric
from hybridvalidation.judge.joint import JointVerdict, judge_all, judge_jointly
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.time_error import within_error
from hybridvalidation.judge.verdict import Status, Verdict, judge, judge_metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import (
    AccuracySpec,
    BatchWorkload,
    CardSpec,
    ModelSpec,
    Scenario,
    ScenarioTarget,
    Target,
)
from tiny_models import GPT2_UNTIED

STACKS = ("vanilla", "lean", "tight")
ACCURACY = AccuracySpec(
    proxy=replace(GPT2_UNTIED, vocab_size=256), seeds=(0, 1, 2), num_steps=1, batch_size=1, seq_len=8, lr=0.1,
    validation_batches=1,
)  # fmt: skip


def run_of(*targets: ScenarioTarget) -> ScenarioRun:
    scenario = Scenario(
        name="tiny", description="a tiny model", model=ModelSpec(shape=GPT2_UNTIED), card=CardSpec(name="rtx-3090"),
        workload=BatchWorkload(batch_size=1, seq_len=8), stacks=STACKS, accuracy=ACCURACY, targets=targets,
    )  # fmt: skip
    return ScenarioRun(scenario=scenario, stacks={}, records={}, num_cached=0)


def target(direction: str = "max", metric: str = "peak_vram_gib", **bounds: float) -> Target:
    return Target(
        id="stated", source=("000",), description="stated", metric=metric,
        direction=direction,  # type: ignore[arg-type]
        **bounds,  # type: ignore[arg-type]
    )  # fmt: skip


def planned(value: float, *, fits: bool = True, interval: Interval | None = None, remark: str = "") -> Metric:
    return Metric(value, Evidence.PLANNED, "GiB", interval=interval, fits=fits, remark=remark)


def judged_one(monkeypatch: pytest.MonkeyPatch, stated: Target, metric: Metric | None) -> Verdict:
    monkeypatch.setattr(verdict_module, "compute_metric", lambda _case: metric)
    return judge(run_of(), stated, "lean", ScenarioTarget(id="stated"))


@pytest.mark.parametrize(
    ("stated", "value", "status"),
    [
        (target("max", value=4.0), 3.99, Status.HOLDS),
        (target("max", value=4.0), 4.0, Status.HOLDS),
        (target("max", value=4.0), 4.01, Status.REFUTED),
        (target("min", value=4.0), 4.01, Status.HOLDS),
        (target("min", value=4.0), 4.0, Status.HOLDS),
        (target("min", value=4.0), 3.99, Status.REFUTED),
        (target("range", low=5.0, high=10.0), 5.0, Status.HOLDS),
        (target("range", low=5.0, high=10.0), 10.0, Status.HOLDS),
        (target("range", low=5.0, high=10.0), 4.9, Status.REFUTED),
        (target("range", low=5.0, high=10.0), 10.1, Status.REFUTED),
        (target("equal", value=200.0), 201.9, Status.HOLDS),  # within one percent of a figure of few digits
        (target("equal", value=200.0), 198.1, Status.HOLDS),
        (target("equal", value=200.0), 202.1, Status.REFUTED),
        (target("equal", value=200.0), 197.9, Status.REFUTED),
    ],
)
def test_a_value_is_compared_with_what_is_stated(
    monkeypatch: pytest.MonkeyPatch, stated: Target, value: float, status: Status
) -> None:
    found = judged_one(monkeypatch, stated, planned(value))
    assert (found.status, found.value, found.evidence) == (status, value, Evidence.PLANNED)
    assert (found.target, found.description, found.stack) == ("stated", "stated", "lean")


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [
        (99.6, 100.4, Status.HOLDS),
        (99.5, 100.5, Status.HOLDS),
        (99.4, 100.6, Status.UNPROVEN),
        (98.0, 99.4, Status.REFUTED),
    ],
)
def test_an_interval_must_lie_on_one_side(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float, status: Status
) -> None:
    metric = planned((low + high) / 2, interval=Interval((low + high) / 2, low, high))
    found = judged_one(monkeypatch, target("min", value=99.5), metric)
    assert found.status is status
    assert f"95 % interval {low:.2f} to {high:.2f}" in found.reason


def test_the_reason_names_figure_bound_evidence_and_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged_one(monkeypatch, target("max", value=4.0), planned(3.217, remark="allocated 3.10 GiB"))
    assert found.reason == "lean: 3.22 GiB meets at most 4, planned; allocated 3.10 GiB."


def test_large_figures_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Metric(12345.6, Evidence.ESTIMATED, "tokens/s")
    found = judged_one(monkeypatch, target("min", value=20000), metric)
    assert found.reason == "lean: 12,346 tokens/s misses at least 20000, estimated."


def test_small_figures_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Metric(3.4e-7, Evidence.EXECUTED, "of the weights")
    found = judged_one(monkeypatch, target("max", value=1e-5), metric)
    assert found.reason == "lean: 3.4e-07 of the weights meets at most 1e-05, executed."


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (target("range", low=5, high=10), "meets 5 to 10"),
        (target("equal", value=7), "meets the stated 7"),
    ],
)
def test_ranges_and_equalities_are_named(monkeypatch: pytest.MonkeyPatch, stated: Target, words: str) -> None:
    assert words in judged_one(monkeypatch, stated, planned(7.0)).reason


def test_without_evidence_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged_one(monkeypatch, target(value=4.0), None)
    assert (found.status, found.evidence, found.value) == (Status.UNPROVEN, None, None)
    assert found.reason == "lean: no dry run of lean."


@pytest.mark.parametrize("metric", ["peak_vram_gib", "tokens_per_s", "relative_throughput_x"])
def test_a_stack_that_runs_out_of_memory_meets_nothing(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    found = judged_one(monkeypatch, target("min", metric, value=4.0), planned(5.0, fits=False))
    if metric != "peak_vram_gib":  # that a stack needs more than the card has is what the next test is about
        assert found.status is Status.REFUTED
    assert "runs out of memory" in found.reason


def test_a_saving_is_judged_though_the_stack_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = target("min", "peak_vram_reduction_pct", value=40.0)
    assert judged_one(monkeypatch, stated, planned(45.0, fits=False)).status is Status.HOLDS


@pytest.mark.parametrize(
    "stated",
    [target("min", value=16.0), target("equal", value=30.0)],  # as 13b-16gb-oom and vanilla-7b-memory
    ids=["needs-more-than-the-card", "needs-exactly"],
)
def test_a_statement_on_what_an_oversize_run_takes_is_not_refuted_by_its_size(
    monkeypatch: pytest.MonkeyPatch, stated: Target
) -> None:
    assert judged_one(monkeypatch, stated, planned(30.0, fits=False)).status is Status.HOLDS


def saving(stated: float, deciding: float) -> Metric:
    decider = Decider(deciding, Evidence.PLANNED, "is an average over steps", "the peak of Full")
    return Metric(stated, Evidence.ARITHMETIC, "%", remark="4 of 32 kept", decider=decider)


@pytest.mark.parametrize(
    ("direction", "value", "stated", "deciding", "status"),
    [
        ("min", 96.0, 96.25, 61.0, Status.MISLEADING),
        ("min", 96.0, 96.25, 96.0, Status.HOLDS),
        ("min", 96.0, 95.0, 61.0, Status.REFUTED),  # not even right as it was got
        ("min", 96.0, 95.0, 99.0, Status.REFUTED),
        ("equal", 87.5, 87.5, 61.0, Status.MISLEADING),
        ("equal", 87.5, 87.5, 87.0, Status.HOLDS),
        ("equal", 87.5, 87.5, 95.0, Status.HOLDS),  # the peak falls even further
        ("max", 10.0, 9.0, 11.0, Status.MISLEADING),
    ],
)
def test_a_right_figure_that_does_not_decide_is_misleading(
    monkeypatch: pytest.MonkeyPatch, direction: str, value: float, stated: float, deciding: float, status: Status
) -> None:
    metric = saving(stated, deciding)
    found = judged_one(monkeypatch, target(direction, "activation_peak_reduction_pct", value=value), metric)
    assert (found.status, found.value, found.decider) == (status, stated, metric.decider)


def test_a_misleading_figure_comes_with_the_one_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged_one(monkeypatch, target("min", value=96.0), saving(96.25, 61.0))
    assert found.reason == (
        "lean: 96.25 % meets at least 96, arithmetic, but is an average over steps; the deciding figure, the peak of "
        "Full: 61.00 %, planned; 4 of 32 kept."
    )


@pytest.mark.parametrize(
    ("deciding", "status"), [(124.9, Status.BY_DEFINITION), (153.0, Status.MISLEADING), (99.0, Status.MISLEADING)]
)
def test_a_total_that_follows_from_its_parts_is_called_so_where_the_plan_agrees(
    monkeypatch: pytest.MonkeyPatch, deciding: float, status: Status
) -> None:
    decider = Decider(deciding, Evidence.PLANNED, "adds up parts", "the peak", is_saving=False)
    stated = replace(target("equal", "sum_of_parts_gb", value=124.0), by_definition="adds up parts that are stated")
    found = judged_one(monkeypatch, stated, Metric(124.0, Evidence.ARITHMETIC, "GB", decider=decider))
    assert found.status is status
    assert "met by definition: adds up parts that are stated" in found.reason


def test_the_kind_of_evidence_that_decides_is_named_behind_the_figures_own(monkeypatch: pytest.MonkeyPatch) -> None:
    [own, other] = [
        judged_one(monkeypatch, target("min", "time_averaged", value=90.0), replace(saving(96.0, 74.0), evidence=kind))
        for kind in (Evidence.PLANNED, Evidence.EXECUTED)
    ]
    assert (own.shown_by, other.shown_by) == ("planned", "executed; planned decides")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (0.99 * 0.9 / (1 + TIME_ERROR), Status.REFUTED),
        (1.01 * 0.9 / (1 + TIME_ERROR), Status.UNDECIDED),
        (0.99 * 0.9 / (1 - TIME_ERROR), Status.UNDECIDED),
        (1.01 * 0.9 / (1 - TIME_ERROR), Status.HOLDS),
    ],
)
def test_a_difference_below_the_time_models_error_is_undecided(
    monkeypatch: pytest.MonkeyPatch, value: float, status: Status
) -> None:
    metric = Metric(value, Evidence.ESTIMATED, "x", error=within_error(value))
    found = judged_one(monkeypatch, target("min", "relative_throughput_x", value=0.9), metric)
    assert found.status is status
    assert "by the time model's own error)" in found.reason  # whatever it decides


@pytest.mark.parametrize(("value", "is_outside"), [(4.0, False), (7.0, False), (3.9, True), (7.1, False)])
def test_a_bound_kept_from_outside_of_the_stated_range_is_told(
    monkeypatch: pytest.MonkeyPatch, value: float, *, is_outside: bool
) -> None:
    found = judged_one(monkeypatch, target("max", value=7.0, low=4.0, high=7.0), planned(value))
    assert found.is_outside is is_outside
    assert ("outside of the stated 4 to 7" in found.reason) is is_outside
    assert found.status is (Status.REFUTED if value > 7 else Status.HOLDS)


@pytest.mark.parametrize(
    ("stated", "value", "decimal", "word"),
    [
        (target("max", value=7.0), 6.6, 7.1, "misses"),
        (target("max", value=7.0), 6.6, 6.9, ""),
        (target("max", value=7.0), 6.6, None, ""),
        (target("max", value=7.0), 7.1, 7.6, ""),
        (target("min", value=16.0), 15.2, 16.3, "meets"),
        (target("range", low=5.0, high=10.0), 4.8, 5.2, "meets"),
        (target("range", low=5.0, high=10.0), 9.6, 10.3, "misses"),
    ],
)
def test_where_gb_and_gib_decide_differently_nothing_is_decided(
    monkeypatch: pytest.MonkeyPatch, stated: Target, value: float, decimal: float | None, word: str
) -> None:
    found = judged_one(monkeypatch, stated, replace(planned(value), decimal=decimal))
    assert (found.status is Status.UNDECIDED) is bool(word)
    assert (
        (f"in GB of 10^9 bytes {decimal:.2f}, which {word} it, so the verdict depends on the unit" in found.reason)
        if word
        else True
    )


@pytest.mark.parametrize("value", [6.0, 8.0])
def test_a_bound_that_rejects_no_harm_is_told_of_what_holds(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    metric = replace(planned(value, remark="seen"), blunt="the control keeps it")
    found = judged_one(monkeypatch, target("max", value=7.0), metric)
    assert found.reason.endswith("; seen; the control keeps it." if value < 7 else "; seen.")
    assert found.is_blunt is (value < 7)


def test_the_error_of_an_overhead_is_that_of_the_ratio_behind_it() -> None:
    error = within_error(1 / 1.28, lambda ratio: 100 * (1 / ratio - 1))
    assert (error.mean, error.low) == pytest.approx((28.0, 100 * (1.28 / (1 + TIME_ERROR) - 1)))
    assert error.high == pytest.approx(100 * (1.28 / (1 - TIME_ERROR) - 1))


def test_each_target_is_compared_with_the_stack_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verdict_module, "compute_metric", lambda case: planned({"vanilla": 1.0, "lean": 2.0}[case.baseline])
    )
    run = run_of(
        ScenarioTarget(id="stated", stacks=("tight",)), ScenarioTarget(id="stated", stacks=("tight",), baseline="lean")
    )
    assert [found.value for found in judge_all(run, {"stated": target(value=4.0)})] == [1.0, 2.0]


def jointly(
    monkeypatch: pytest.MonkeyPatch, rows: Mapping[str, Mapping[str, Metric | None]], fits: Sequence[str] = STACKS
) -> tuple[JointVerdict, list[Verdict]]:
    """Judge rows that want at most 4 of some metric, by the name of the metric."""
    monkeypatch.setattr(verdict_module, "compute_metric", lambda case: rows[case.target.metric].get(case.stack))
    monkeypatch.setattr(joint_module, "_fits", lambda _run, stack: stack in fits)
    targets = {name: replace(target(metric=name, value=4.0), id=name) for name in rows}
    run = run_of(*(ScenarioTarget(id=name) for name in rows))
    found = judge_jointly(run, targets)
    assert found is not None
    return found, judge_all(run, targets)


def values(*figures: float) -> dict[str, Metric | None]:
    return {stack: planned(value) for stack, value in zip(STACKS, figures, strict=True)}


def test_no_stack_picks_another_stacks_cherries(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each row is held by some stack, and none holds all: as 7b-16gb was once judged, by the best stack per row.
    found, verdicts = jointly(monkeypatch, {"a": values(3, 3, 9), "b": values(9, 3, 3), "c": values(3, 9, 3)})
    assert "No stack holds all 3 rows" in found.sentence
    assert {verdict.stack for verdict in verdicts} == {found.best}
    assert sum(verdict.status is Status.REFUTED for verdict in verdicts) == 1
    missed = next(verdict.target for verdict in verdicts if verdict.status is Status.REFUTED)
    assert [len(stacks) for stacks in found.alone(missed).values()] == [2]


def test_a_stack_that_may_hold_all_rows_is_nearer_than_one_that_surely_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_row = replace(planned(3.9), evidence=Evidence.ESTIMATED, error=Interval(3.9, 3.5, 4.3))
    rows: dict[str, dict[str, Metric | None]] = {
        "a": {"vanilla": planned(9), "lean": planned(1), "tight": open_row},
        "b": {"vanilla": planned(9), "lean": planned(1), "tight": open_row},
        "c": {"vanilla": planned(9), "lean": planned(5), "tight": planned(3)},
    }
    found, _ = jointly(monkeypatch, rows)
    assert found.sentence == "No stack holds all 3 rows: nearest is tight, which lacks a (undecided), b (undecided)."
    assert found.alone("a") == {Status.HOLDS: ["lean"]}


def test_the_stack_that_holds_all_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, verdicts = jointly(monkeypatch, {"a": values(1, 3, 9), "b": values(9, 3, 1)})
    assert (found.best, found.sentence) == ("lean", "lean holds all 2 rows.")
    assert all(verdict.is_of_scenario for verdict in verdicts)


def test_of_several_the_one_with_the_widest_narrowest_margin_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = jointly(monkeypatch, {"a": values(0.1, 2, 3), "b": values(3.9, 2, 3)})
    assert list(found.stacks) == ["lean", "tight", "vanilla"]
    assert found.sentence == "lean holds all 2 rows; so do tight, vanilla."


def test_what_is_not_known_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = jointly(monkeypatch, {"a": values(3, 3, 9), "b": {"vanilla": planned(9), "lean": None, "tight": None}})
    assert found.sentence == "No stack holds all 2 rows: nearest is lean, which lacks b (unproven)."


def test_a_verdict_that_was_reached_elsewhere_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_module, "compute_metric", lambda case: planned(3) if case.target.id == "a" else None)
    monkeypatch.setattr(joint_module, "_fits", lambda *_: True)
    targets = {name: replace(target(value=4.0), id=name) for name in ("a", "b")}
    run = run_of(ScenarioTarget(id="a"), ScenarioTarget(id="b"))
    elsewhere = {("b", "tight"): judge_metric(targets["b"], "tight", planned(2))}
    found = judge_jointly(run, targets, elsewhere)
    assert found is not None
    assert found.sentence == "tight holds all 2 rows."
    assert [verdict.stack for verdict in judge_all(run, targets, elsewhere)] == ["tight", "tight"]


def test_a_stack_that_does_not_fit_is_no_candidate_beside_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = jointly(monkeypatch, {"a": values(3, 9, 9)}, fits=("lean", "tight"))
    assert set(found.stacks) == {"lean", "tight"}
    found, _ = jointly(monkeypatch, {"a": values(3, 9, 9)}, fits=())
    assert set(found.stacks) == set(STACKS)


@pytest.mark.parametrize(
    ("needs", "shown", "status"),
    [((30.0, 18.0, 20.0), "lean", Status.HOLDS), ((30.0, 15.0, 9.0), "tight", Status.REFUTED)],
)
def test_a_need_is_refuted_by_the_one_stack_that_does_with_less(
    monkeypatch: pytest.MonkeyPatch, needs: tuple[float, ...], shown: str, status: Status
) -> None:
    # "13B does not fit 16 GB" speaks of every stack: vanilla, which does not fit, must not prove it.
    found = {stack: planned(value, fits=value < 16) for stack, value in zip(STACKS, needs, strict=True)}
    monkeypatch.setattr(verdict_module, "compute_metric", lambda case: found[case.stack])
    (verdict,) = judge_all(run_of(ScenarioTarget(id="stated")), {"stated": target("min", value=16.0)})
    assert (verdict.stack, verdict.status) == (shown, status)


def test_rows_on_stacks_are_judged_on_each_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_module, "compute_metric", lambda case: planned(len(case.target.metric)))
    targets = {name: replace(target(value=4.0), id=name) for name in ("a", "b")}
    run = run_of(ScenarioTarget(id="b", stacks=("tight", "lean")), ScenarioTarget(id="a", stacks=("vanilla",)))
    verdicts = judge_all(run, targets)
    assert [(item.target, item.stack) for item in verdicts] == [("b", "tight"), ("b", "lean"), ("a", "vanilla")]
    assert judge_jointly(run, targets) is None


@pytest.mark.parametrize(
    ("metric", "because"),
    [
        (Metric(3.0, Evidence.PLANNED, "GiB"), "3.00 GiB meets at most 4"),
        (Metric(5.0, Evidence.PLANNED, "GiB"), "5.00 GiB misses at most 4"),
        (Metric(3.0, Evidence.PLANNED, "GiB", fits=False), "3.00 GiB, but it runs out of memory"),
        (Metric(3.0, Evidence.PLANNED, "GiB", decimal=4.5), "3.00 GiB may meet or miss at most 4"),
        (
            Metric(3.0, Evidence.ARITHMETIC, "GiB", decider=Decider(5.0, Evidence.PLANNED, "is a part", "the peak")),
            "3.00 GiB as stated, but 5.00 GiB decides",
        ),
    ],
)
def test_the_reason_is_also_told_in_few_words(monkeypatch: pytest.MonkeyPatch, metric: Metric, because: str) -> None:
    found = judged_one(monkeypatch, target("max", "peak_vram_gib", value=4.0), metric)
    assert found.because == because
    assert len(found.because.split()) <= 12

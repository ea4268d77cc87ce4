from dataclasses import replace
from typing import Any

import pytest

from hybridtrain.models.model_config import BatchWorkload, Workload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.figures import RefusedRequest, StepPeaks, memory_figures
from hybridtrain.reports.tables import MARKDOWN, TERMINAL
from hybridtrain.run.environment import read_environment
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.judge.verdict import Status, Verdict
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import AccuracyFigures, MeasuredFigures, SeedResult, StackRun
from hybridvalidation.scenario import AccuracySpec, CardSpec, Scenario
from hybridvalidation.show.pages.scenario import (
    class_table,
    headline,
    measured_table,
    outcome_lines,
    phase_table,
    summary_table,
)
from tiny_models import GPT2_UNTIED

SCENARIO = Scenario(
    name="tiny", description="A tiny model", model=ModelSpec(shape=GPT2_UNTIED), card=CardSpec(name="rtx-3090"),
    workload=BatchWorkload(batch_size=2, seq_len=8), stacks=("vanilla", "lean"),
    accuracy=AccuracySpec(
        proxy=replace(GPT2_UNTIED, vocab_size=256), seeds=(0, 1, 2), num_steps=1, batch_size=1, seq_len=8,
        lr=0.1, validation_batches=1,
    ),
)  # fmt: skip
BY_CLASS = {name.value: (index + 1) * GIB for index, name in enumerate(TensorClass)}
STEPS = tuple(
    StepPeaks(
        step=step, allocated_bytes=total * GIB, active_bytes=total * GIB, reserved_bytes=total * GIB,
        by_class=BY_CLASS, stage=stage, unit=unit,
    )
    for step, total, stage, unit in ((1, 20, "update", ""), (2, 28, "backward", "head"))
)  # fmt: skip
PLANNED = replace(
    memory_figures(
        dry_run(GPT2_UNTIED, compose([]), find_card("rtx-3090"), Workload(micro_batch_size=1, seq_len=8)),
        with_timeline=False,
    ),
    peak_allocated_bytes=28 * GIB, peak_reserved_bytes=30 * GIB, device_used_bytes=31 * GIB, by_class=BY_CLASS,
    host_peak_bytes=40 * GIB, disk_peak_bytes=50 * GIB, steps=STEPS, step_time_s=0.25, tokens_per_s=4096.4,
    bound="compute",
)  # fmt: skip
OOM = RefusedRequest(
    step=2, stage="backward", unit="block.3", requested_bytes=3 * GIB, allocated_bytes=22 * GIB,
    reserved_bytes=23 * GIB, capacity_bytes=24 * GIB, by_class={"weight": 9 * GIB, "grad": 0, "activation": 13 * GIB},
    by_unit={},
)  # fmt: skip
MEASURED = MeasuredFigures(
    peak_allocated_bytes=28 * GIB, peak_reserved_bytes=24 * GIB, device_used_bytes=62 * GIB, num_alloc_retries=0,
    step_times_s=(1.0,), tokens_per_s=2048.2, cap_bytes=16 * GIB,
)  # fmt: skip
ENVIRONMENT = read_environment()


def record(kind: str, stack: str, outcome: Outcome = Outcome.OK, message: str = "", **figures: Any) -> StackRun:
    return StackRun(
        key="k", kind=kind, scenario="tiny", stack=stack, evidence=Evidence.PLANNED, outcome=outcome,
        message=message, started_at="2026-01-01T00:00:00+00:00", duration_s=1.0, environment=ENVIRONMENT, asked={},
        plan={}, **figures,
    )  # fmt: skip


def run_of(*records: StackRun) -> ScenarioRun:
    by_place = {(item.kind, item.stack): item for item in records}
    return ScenarioRun(scenario=SCENARIO, stacks={}, records=by_place, num_cached=0)


def executed(stack: str, accuracy: float) -> StackRun:
    seeds = tuple(
        SeedResult(seed=seed, validation_loss=1.0, validation_accuracy=accuracy, final_train_loss=1.0)
        for seed in range(3)
    )
    figures = AccuracyFigures(
        num_params=1, num_tokens=1, num_validation_tokens=1, corpus="embedded", corpus_digest="d", seeds=seeds
    )
    return record("accuracy", stack, accuracy=figures)


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table of Markdown; of one that was split at seven columns those of all parts, as one."""
    parts = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "--" not in line]
        for part in text.split("\n\n")
    ]
    assert all(len(row) <= 7 for part in parts for row in part)
    assert all([row[0] for row in part] == [row[0] for row in parts[0]] for part in parts)
    return [row + [cell for part in parts[1:] for cell in part[number][1:]] for number, row in enumerate(parts[0])]


def test_the_headline_says_what_is_run_on_what() -> None:
    assert headline(run_of()) == (
        "A tiny model: 41.7k parameters on NVIDIA GeForce RTX 3090 (23.56 GiB), 16 tokens per step (2 x 8)"
    )


def test_the_summary_has_a_row_per_stack_and_every_figure() -> None:
    run = run_of(
        record("dry_run", "vanilla", memory=PLANNED), record("dry_run", "lean", memory=replace(PLANNED, fits=False)),
        executed("vanilla", 0.5), executed("lean", 0.4),
    )  # fmt: skip
    head, vanilla, lean = rows(summary_table(run, MARKDOWN))
    assert head[:4] == ["stack", "fits", "device GiB", "tokens/s"]
    figures = ["31.00", "4,096", "40.00", "0.250", "compute", "28.00", "30.00", "50.00", "8"]
    whole = "100.00 [100.00, 100.00]"
    assert vanilla == ["vanilla", "barely", *figures, whole, whole]
    assert lean == ["lean", "NO", *figures, "80.00 [80.00, 80.00]", whole]


def test_a_stack_without_records_is_unknown_and_claims_nothing() -> None:
    _, vanilla, _ = rows(summary_table(run_of(), MARKDOWN))
    assert vanilla == ["vanilla", "unknown", *["-"] * 9]  # nothing was trained: no columns of accuracy
    _, lean = rows(summary_table(run_of(), MARKDOWN, ["lean"], only_main=True))
    assert lean == ["lean", "unknown", *["-"] * 5]


def test_phases_are_told_apart_where_a_stack_has_several() -> None:
    steps = tuple(replace(step, phase=phase) for step, phase in zip(STEPS, ("full", "predict"), strict=True))
    run = run_of(
        record("dry_run", "vanilla", memory=PLANNED), record("dry_run", "lean", memory=replace(PLANNED, steps=steps))
    )
    assert rows(phase_table(run, MARKDOWN)) == [["stack", "full", "predict"], ["lean", "20.00", "28.00"]]
    assert phase_table(run_of(record("dry_run", "vanilla", memory=PLANNED)), MARKDOWN) == ""


def test_a_stack_within_the_margin_of_the_card_fits_barely() -> None:
    card = run_of().scenario.card.resolve()
    for used, told in ((card.memory_bytes - card.margin_bytes, "yes"), (card.memory_bytes, "barely")):
        run = run_of(record("dry_run", "lean", memory=replace(PLANNED, device_used_bytes=used)))
        assert rows(summary_table(run, MARKDOWN))[2][:2] == ["lean", told]


def test_a_stack_that_host_memory_refuses_says_so() -> None:
    run = run_of(record("dry_run", "lean", memory=replace(PLANNED, fits=False, fits_host=False)))
    assert rows(summary_table(run, MARKDOWN))[2][:2] == ["lean", "NO, host"]


def test_the_class_table_shows_the_holders_of_the_larger_step() -> None:
    head, vanilla, lean = rows(class_table(run_of(record("dry_run", "vanilla", memory=PLANNED)), MARKDOWN))
    assert head[1:-1] == [name.replace("_", " ") for name in TensorClass]
    assert vanilla[1:-1] == [f"{index + 1}.00" for index in range(len(TensorClass))]
    assert vanilla[-1] == "step 2, backward head"
    assert lean[1:] == ["-"] * (len(TensorClass) + 1)


def test_plan_and_measurement_stand_side_by_side() -> None:
    run = run_of(record("dry_run", "lean", memory=PLANNED), record("measured", "lean", measured=MEASURED))
    _, lean = rows(measured_table(run, MARKDOWN))
    assert lean == [
        "lean", "ok", "28.00 / 28.00 GiB (+0.0 %)", "30.00 / 24.00 GiB (+25.0 %)", "31.00 / 62.00 GiB (-50.0 %)",
        "4,096 / 2,048",
    ]  # fmt: skip


def test_a_measurement_that_ran_out_of_memory_has_no_figures() -> None:
    run = run_of(
        record("dry_run", "lean", memory=PLANNED), record("measured", "lean", Outcome.OUT_OF_MEMORY, "too small")
    )
    assert rows(measured_table(run, MARKDOWN))[1] == ["lean", "out_of_memory", "-", "-", "-", "-"]


def test_without_measurements_there_is_no_such_table() -> None:
    assert measured_table(run_of(record("dry_run", "lean", memory=PLANNED)), TERMINAL) == ""


def test_a_refused_request_is_told_in_a_sentence() -> None:
    memory = replace(PLANNED, fits=False, oom=OOM)
    (line,) = outcome_lines(run_of(record("dry_run", "lean", Outcome.OUT_OF_MEMORY, memory=memory)))
    assert line == (
        "lean: out of memory (step 2, backward block.3): 3.00 GiB requested with 22.00 of 24.00 GiB allocated "
        "(activation 13.00 GiB, weight 9.00 GiB)."
    )


def test_a_refusal_while_the_model_is_built_says_so() -> None:
    memory = replace(PLANNED, fits=False, oom=replace(OOM, step=0, stage="build", unit=""))
    (line,) = outcome_lines(run_of(record("dry_run", "lean", Outcome.OUT_OF_MEMORY, memory=memory)))
    assert line.startswith("lean: out of memory (while the model is built): 3.00 GiB requested")


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.DIVERGED])
def test_a_run_that_failed_tells_why(outcome: Outcome) -> None:
    run = run_of(record("accuracy", "lean", outcome, "loss is nan"), executed("vanilla", 0.5))
    assert outcome_lines(run) == [f"lean: accuracy ended as {outcome}: loss is nan"]


def test_a_host_that_is_too_small_is_told_with_what_is_missing() -> None:
    memory = replace(PLANNED, fits=False, fits_host=False, host_peak_bytes=100 * GIB)
    run = run_of(record("dry_run", "lean", Outcome.OUT_OF_MEMORY, memory=memory))
    (line,) = outcome_lines(replace(run, scenario=replace(SCENARIO, host=Host(memory_gib=68, reserved_gib=4))))
    assert line == ("lean: dry_run ended as out_of_memory: 100.00 GiB of host memory needed, 64.00 GiB are there")


def test_a_reason_is_never_blank() -> None:
    run = run_of(record("accuracy", "lean", Outcome.DIVERGED), executed("vanilla", 0.5))
    assert outcome_lines(run) == ["lean: accuracy ended as diverged: no reason was recorded"]


def test_a_run_that_went_well_needs_no_sentence() -> None:
    assert outcome_lines(run_of(record("dry_run", "lean", memory=PLANNED), executed("lean", 0.5))) == []


def test_verdicts_are_told_with_evidence_and_reason() -> None:
    reason = "lean: 3.20 GiB meets at most 4, planned."
    small = Verdict(
        target="small",
        description="s",
        stack="lean",
        status=Status.HOLDS,
        reason=reason,
        because="3.20 GiB meets at most 4",
        evidence=Evidence.PLANNED,
        value=3.2,
    )
    fast = replace(
        small, target="fast", status=Status.UNPROVEN, reason="none", because="no record", evidence=None, value=None
    )
    lines = verdict_table([small, fast], TERMINAL).splitlines()
    assert lines[2].split() == ["small", "holds", *small.because.split(), "planned", *reason.split()]
    assert lines[3].split() == ["fast", "unproven", "no", "record", "-", "none"]
    shown, notes = verdict_table([small, fast], MARKDOWN).split("\n\n")
    assert rows(shown)[1:] == [
        ["small", "holds", small.because, "planned", "1"],
        ["fast", "unproven", "no record", "-", "2"],
    ]
    assert notes.splitlines() == [f"1. {reason}", "2. none"]

"""What each optimization saves, and how exact each phase is, as a dry run and a training run tell it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_runs import fresh_hybrid, hybrid_config, run_steps
from hybridtrain.data.corpus import open_corpus
from hybridtrain.models.model_config import BatchWorkload, Workload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import (
    ActivationOffload,
    GradAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    PredictMemory,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import DryRunInputs, dry_run
from hybridtrain.planning.savings import arithmetic_line, arithmetic_savings, planned_savings, savings_table, without
from hybridtrain.reports.dry_run_report import phase_precision, phase_table
from hybridtrain.run.train import train
from hybridtrain.trainer_config import GuardConfig, LrSchedule, TrainerConfig
from hybridtrain.training_file import TrainFile
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridvalidation.scenario_files import scenario_folder
from tiny_models import GPT2_UNTIED

STACK = [
    MixedPrecision(), GradientCheckpointing(recompute_every=2), ActivationOffload(), WeightStreaming(),
    GradAccumulation(grad_accum_steps=2),
]  # fmt: skip
WORK = Workload(micro_batch_size=2, seq_len=16)


def test_a_saving_is_the_difference_of_two_dry_runs() -> None:
    card, host, config = find_card("rtx-3090"), Host(), TrainerConfig()
    setup = DryRunInputs(model=GPT2_UNTIED, plan=compose(STACK), card=card, workload=WORK, host=host, config=config)
    whole = setup.dry_run()
    found = {saving.kind: saving for saving in planned_savings(STACK, whole, setup)}
    assert list(found) == [item.kind for item in STACK]
    resident = dry_run(GPT2_UNTIED, compose(without(STACK, STACK[3])), card, WORK, host=host, config=config)
    streaming = found["weight_streaming"]
    assert streaming.device_bytes == resident.device_used_bytes - whole.device_used_bytes
    assert streaming.host_bytes == resident.host_peak_bytes - whole.host_peak_bytes < 0
    assert (
        streaming.tokens_per_s_without == resident.tokens_per_s >= whole.tokens_per_s
    )  # launches bind so small a step
    assert found["gradient_checkpointing"].refused == "needed by activation_offload"
    accumulation = found["grad_accumulation"]  # as many tokens in one micro-batch
    assert accumulation.tokens_per_s_without == pytest.approx(whole.tokens_per_step / accumulation.step_time_without_s)
    text = savings_table(tuple(found.values()), whole)
    assert "mixed_precision: compute_dtype bfloat16, master.codec float32" in text
    assert "needed by activation_offload" in text


def test_arithmetic_says_what_is_saved_without_a_dry_run() -> None:
    found = {kind: saved for kind, _, saved in arithmetic_savings(STACK, GPT2_UNTIED, WORK, AdamWConfig())}
    assert found["gradient_checkpointing"] is None
    assert found["weight_streaming"] > 0  # type: ignore[operator]
    assert arithmetic_line("a", "b 1", None) == "a (b 1): others in the stack need it"
    assert arithmetic_line("a", "", 3 * 2**30) == "a: saves 3.00 GiB of the card (arithmetic)"
    assert arithmetic_line("a", "", -(2**20)) == "a: takes 1.00 MiB of the card (arithmetic)"


def test_a_training_run_tells_savings_and_what_it_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    shape = replace(GPT2_UNTIED, vocab_size=256)
    file = TrainFile(
        model=ModelSpec(shape=shape), workload=BatchWorkload(batch_size=4, seq_len=16), optimizations=tuple(STACK),
        num_steps=2, sample_tokens=0,
    )  # fmt: skip
    said: list[str] = []
    result = train(
        file, open_corpus(text, vocab_size=256), tmp_path / "run", resume=False, say=said.append, progress=False
    )
    assert said[0].startswith("mixed_precision (compute_dtype bfloat16, master float32")
    assert said[1].endswith("others in the stack need it")
    assert "saves" in said[3]
    assert said[-1].startswith("2 steps: ")
    assert "to the device" in said[-1]
    trace = dry_run(shape, compose(STACK), find_card("rtx-3090"), WORK, config=TrainerConfig()).trace
    planned = Counter[str]()
    for op in (op for step in range(2) for op in trace.step_ops(step)):
        planned[op.lane.value] += op.bytes_moved
    assert result.performance is not None
    told = result.performance.as_mapping()["bytes_per_step"]
    assert told == {lane: planned[lane] / 2 for lane in ("copy in", "copy out")}  # byte for byte what the plan says
    assert [entry["kind"] for entry in result.as_mapping()["optimizations"]] == [  # type: ignore[index, union-attr, attr-defined]
        item.kind for item in STACK
    ]


def test_a_training_run_tells_settings_that_it_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    file = TrainFile(
        model=ModelSpec(shape=replace(GPT2_UNTIED, vocab_size=256)), workload=BatchWorkload(batch_size=1, seq_len=16),
        optimizations=(GradientCheckpointing(recompute_every=9), PredictMemory()), num_steps=1, sample_tokens=0,
        schedule=LrSchedule(kind="constant", warmup_steps=0, final_fraction=0.5), guard=GuardConfig(max_faults=3),
    )  # fmt: skip
    said: list[str] = []
    train(file, open_corpus(text, vocab_size=256), tmp_path / "run", resume=False, say=said.append, progress=False)
    assert [line for line in said if line.startswith("not as asked: ")] == [
        "not as asked: recompute_every: 9 asked, 4 used; the model has 4 blocks",
        "not as asked: predict_memory: acts in predict alone, which this run does not have",
        "not as asked: schedule.final_fraction: 0.5 asked, none used; a constant learning rate stays",
        "not as asked: guard.max_faults: 3 asked, none used; on_nan = 'stop' and on_spike = 'say' skip no batch",
    ]


def test_phases_of_one_precision_have_no_table_and_state_that_leaves_has() -> None:
    files = scenario_folder(None)
    assert phase_precision(files.stack("tight").plan()) is None
    rows = phase_precision(files.stack("phase2").plan())
    assert rows is not None
    assert {phase: row["compute"] for phase, row in rows.items()} == {
        "warmup": "float32", "full": "float32", "predict": "bfloat16", "correct": "float32",
    }  # fmt: skip
    assert rows["full"]["optimizer_state"] == "float32 on device"
    assert rows["predict"]["optimizer_state"] == rows["predict"]["master"] == "float32 on host"


def test_four_phases_of_their_own_precision_train_through_a_cycle() -> None:
    stack = scenario_folder(None).stack("hybrid-precisions")
    rows = phase_precision(stack.plan())
    assert rows is not None
    state = "float32 on device"
    assert rows == {
        "warmup": {"compute": "float32", "weights": "float32 on device", "master": "none", "gradients": state,
                   "optimizer_state": state},
        "full": {"compute": "bfloat16", "weights": "bfloat16 on device", "master": state,
                 "gradients": state, "optimizer_state": state},
        "predict": {"compute": "bfloat16", "weights": "int8 on device", "master": "float32 on host",
                    "gradients": "none", "optimizer_state": "float32 on host"},
        "correct": {"compute": "bfloat16", "weights": "bfloat16 on device", "master": state,
                    "gradients": state, "optimizer_state": state},
    }  # fmt: skip
    assert phase_table(rows).splitlines()[0].split() == [
        "phase", "compute", "weights", "master", "gradients", "optimizer", "state",
    ]  # fmt: skip
    hybrid = fresh_hybrid(GPT2_UNTIED, stack.optimizations, hybrid_config(fuse=False))
    results = run_steps(hybrid)
    assert {result.phase for result in results} == set(Phase)
    assert any(result.is_predicted for result in results)
    losses = [result.loss for result in results if result.phase is not Phase.PREDICT and result.loss is not None]
    assert len(losses) == hybrid.trainer.steps_done
    assert max(losses) < 6  # log(101) = 4.6: nothing blew up at a border

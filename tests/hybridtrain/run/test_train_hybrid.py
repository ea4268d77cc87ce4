"""``hybridtrain train`` through the hybrid cycle: what it logs, how it goes on, what it refuses, what it says."""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.checkpoint.generations import generations
from hybridtrain.checkpoint.manifest import read_generation
from hybridtrain.cli.main import main
from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.byte_tokens import TokenArray, encode_bytes
from hybridtrain.errors import HostMemoryError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.phase import Phase
from hybridtrain.run import train_data
from hybridtrain.run.train_log import RunMonitor
from hybridtrain.trainer import Trainer
from hybridtrain.training_file import load_config
from tiny_files import shape_file

ROOT = Path(__file__).parents[3]
NUM_STEPS = 12
HEAD = f"""\
num_steps = {NUM_STEPS}
save_every = 1
sample_tokens = 0
"""
BODY = f"""\
[model.shape]
{shape_file(num_blocks=1, tied=True)}[workload]
batch_size = 2
seq_len = 8
[schedule]
warmup_steps = 2
total_steps = 12
[optimizer]
lr = 3e-3
"""
LINE = {
    "step", "phase", "loss", "lr", "grad_norm", "tokens_per_s", "seconds", "peak_bytes", "predicted_steps", "move_rms",
    "forecast_loss", "prediction_error", "confidence", "scale", "is_rolled_back", "cost",
    "effective_batch",
}  # fmt: skip
STACK = '[[optimizations]]\nkind = "predictor_state"\npredictor = "{}"\n'
MOVES = '[[optimizations]]\nkind = "predict_memory"\n'
ACCUMULATES = '[[optimizations]]\nkind = "grad_accumulation"\ngrad_accum_steps = 2\n'
KINDS = {
    "fused": ("", "slow_gradient", ""),
    "own": ("fuse = false\n", "slow_gradient", ""),
    "moved": ("", "slow_gradient", MOVES),
    "interval": ("correction_interval = 1.0\nmax_move = 100.0\n", "slow_gradient", ""),
    "dropped": ("correction_interval = 1.0\nmax_move = 100.0\n", "slow_gradient", MOVES + 'preset = "aggressive"\n'),
    "copy": ('rollback = "copy"\nmonitor = "probe"\nprobe_every = 1\n', "slow_gradient", ""),
    "every_step": ('monitor = "every_step"\n', "slow_gradient", ""),
    "probe_gradients": ('correction = "probe_gradients"\nfuse = false\n', "slow_gradient", ACCUMULATES),
    "linear": ('predictor = "linear"\n', "linear", ""),
    "mlp": ('predictor = "mlp"\nadapt_lr = true\n', "slow_gradient", ""),
}


def file_of(kind: str) -> str:
    hybrid, predictor, more = KINDS[kind]
    table = f"[hybrid]\nfull_steps = 3\nslow = {{ beta = 0.9 }}\n{hybrid}"
    return HEAD + BODY + table + STACK.format(predictor) + more


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    Path("text.txt").write_text("".join(f"{number} quick brown foxes jump over the lazy dog\n" for number in range(60)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(text: str, out: str = "run", *arguments: str) -> int:
    Path("train.toml").write_text(text)
    return main(["train", "train.toml", "--data", "text.txt", "--out", out, *arguments])


def log_of(out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in {"tokens_per_s", "seconds"}} for line in lines]


def state_of(out: str) -> dict[str, Any]:
    generation = read_generation(generations(Path(out, "checkpoints"))[-1])
    values = {name: tensor.read(slice(0, prod(tensor.shape))) for name, tensor in generation.tensors().items()}
    return {"tensors": values, "cycle": generation.cycle, "settings": generation.settings}


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# --- the log ----------------------------------------------------------------------------------------------------


def test_each_phase_step_has_a_line() -> None:
    assert train(file_of("own")) == 0
    log = log_of()
    assert all(set(line) == LINE for line in log)
    cycle = ["full", "full", "full", "predict", "correct", "full", "full", "predict"]
    phases = ["warmup", "warmup", *cycle, "correct", "full", "full", "predict", "correct"]
    assert [line["phase"] for line in log] == phases
    assert [line["step"] for line in log if line["phase"] != "predict"] == list(range(1, NUM_STEPS + 1))
    for line, before in zip(log[1:], log, strict=False):
        if line["phase"] != "predict":
            assert (line["predicted_steps"], line["cost"]) == (0, 3)
            assert math.isfinite(line["loss"])
            assert line["tokens_per_s"] > 0
            assert line["effective_batch"] == 2
            continue
        assert (line["step"], line["lr"]) == (before["step"], before["lr"])
        assert (line["loss"], line["grad_norm"], line["tokens_per_s"], line["cost"]) == (None, None, 0, 0)
        assert line["effective_batch"] == 0
        assert line["predicted_steps"] > 0
        assert line["move_rms"] > 0
        assert not line["is_rolled_back"]


def test_a_fused_jump_is_told_in_the_line_of_its_step() -> None:
    assert train(file_of("fused")) == 0
    log = log_of()
    assert [line["step"] for line in log] == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in log if line["predicted_steps"]] == [5, 8, 11]


def test_jumps_within_and_outside_of_an_update_are_the_same() -> None:
    assert train(file_of("fused"), "fused") == train(file_of("own"), "own") == 0
    losses = [[line["loss"] for line in log_of(out) if line["loss"] is not None] for out in ("fused", "own")]
    # The same sum in another order: rounding of float32, carried through seven steps.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_probes_cost_forward_passes() -> None:
    assert train(file_of("copy")) == 0
    assert [line["cost"] for line in log_of() if line["phase"] == "predict"] == [2, 2, 2]


def test_errors_of_forecasts_are_logged() -> None:
    text = file_of("own").replace(f"num_steps = {NUM_STEPS}", "num_steps = 60").replace("save_every = 1", "")
    assert train(text.replace("[hybrid]", '[hybrid]\nforecaster = "ema"')) == 0
    log = log_of()
    assert sum(line["prediction_error"] is not None for line in log) > 5
    assert any(line["forecast_loss"] is not None for line in log if line["phase"] == "predict")
    assert all(line["forecast_loss"] is None for line in log if line["phase"] != "predict")


def test_loggers_get_no_name_twice_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, str]] = []

    def record(_monitor: RunMonitor, step: int, phase: Phase, metrics: dict[str, float | None]) -> None:
        drawn.extend((step, name) for name, value in metrics.items() if value is not None)
        assert ("predict_peak_bytes" in metrics) == (phase is Phase.PREDICT)

    monkeypatch.setattr(RunMonitor, "record_step", record)
    assert train(file_of("copy")) == 0
    assert len(drawn) == len(set(drawn))
    assert {"loss", "predicted_steps", "move_rms", "scale", "confidence"} <= {name for _, name in drawn}


# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "percent"), [("copy", 2), ("linear", 2), ("probe_gradients", 10), ("own", 0)])
def test_the_probe_split_is_a_part_of_the_training_tokens(
    kind: str, percent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[TokenArray, int]] = []

    class Spied(BatchSampler):
        def __init__(self, tokens: TokenArray, *, seed: int, **settings: Any) -> None:
            seen.append((tokens, seed))
            super().__init__(tokens, seed=seed, **settings)

    monkeypatch.setattr(train_data, "BatchSampler", Spied)
    assert train(file_of(kind)) == 0
    (learned, seed), *probes = seen
    content = Path("text.txt").read_bytes()
    num_training = len(content) + 1 - (len(content) + 1) // 10  # the last tenth is held out for validation
    if not percent:
        assert (len(learned), probes) == (num_training, [])
        return
    ((probe, probe_seed),) = probes
    assert probe_seed != seed
    assert len(probe) == num_training * percent // 100
    assert [*learned, *probe] == [*encode_bytes(content)[:num_training]]
    assert f"{len(probe):,} of {num_training:,} training tokens are reserved as probe split" in capsys.readouterr().out


# --- going on ---------------------------------------------------------------------------------------------------


def stop_every(monkeypatch: pytest.MonkeyPatch, calls: int, after: int = 0) -> None:
    """Let the user stop each process before its n-th true step of those after so many of the run."""
    step = Trainer.step
    numbers = count(1)

    def stopped(trainer: Trainer, *arguments: Any, **settings: Any) -> Any:
        if trainer.steps_done >= after and next(numbers) % calls == 0:
            raise HostMemoryError("stopped; what is being saved is")  # the user's own way is at once
        return step(trainer, *arguments, **settings)

    monkeypatch.setattr(Trainer, "step", stopped)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_at_every_border_goes_on_to_the_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(file_of(kind), "whole") == 0
    stop_every(monkeypatch, 2)
    starts, arguments = 1, []
    while train(file_of(kind), "parts", *arguments) != 0:
        arguments = ["--resume"]
        starts += 1
        assert starts <= NUM_STEPS
    assert starts == NUM_STEPS
    assert without_times(log_of("parts")) == without_times(log_of("whole"))
    assert same(state_of("parts"), state_of("whole"))


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("kind", ["fused", "own", "copy"])
def test_jumps_that_are_taken_back_go_on_to_the_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        file_of(kind)
        .replace("beta = 0.9", "beta = 0.9, alpha = 3000.0")
        .replace("full_steps", "max_move = 1e5\nmax_relative_move = 1e5\nfull_steps")
    )
    text = text.replace(f"num_steps = {NUM_STEPS}", "num_steps = 34").replace("warmup_steps = 2", "warmup_steps = 24")
    text = text.replace("total_steps = 12", "total_steps = 40")
    assert train(text, "whole") == 0
    taken_back = [line for line in log_of("whole") if line["is_rolled_back"]]
    assert len(taken_back) >= 2
    assert f"{len(taken_back)} jumps rolled back" in capsys.readouterr().out
    stop_every(monkeypatch, 3, after=24)  # the first jump is near
    arguments: list[str] = []
    while train(text, "parts", *arguments) != 0:
        arguments = ["--resume"]
    assert without_times(log_of("parts")) == without_times(log_of("whole"))
    assert same(state_of("parts"), state_of("whole"))


@pytest.mark.parametrize("kind", ["own", "copy"])
def test_lines_that_were_not_saved_are_neither_lost_nor_doubled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = file_of(kind).replace("save_every = 1", "save_every = 5")  # a jump follows step 5
    assert train(text, "whole") == 0
    with monkeypatch.context() as patch:
        stop_every(patch, 9)
        assert train(text, "parts") != 0
    assert Counter(line["phase"] for line in log_of("parts"))["predict"] == 2
    assert train(text, "parts", "--resume") == 0
    assert without_times(log_of("parts")) == without_times(log_of("whole"))
    assert same(state_of("parts"), state_of("whole"))


def test_a_longer_run_begins_with_the_jump_that_was_due() -> None:
    text = file_of("own")
    assert train(text, "whole") == 0
    assert train(text.replace(f"num_steps = {NUM_STEPS}", "num_steps = 5"), "parts") == 0
    assert log_of("parts")[-1]["phase"] == "full"  # no jump after the last step: nothing would correct it
    assert train(text, "parts", "--resume") == 0
    assert without_times(log_of("parts")) == without_times(log_of("whole"))


def test_a_state_of_another_cycle_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = file_of("own").replace(f"num_steps = {NUM_STEPS}", "num_steps = 2")
    assert train(text) == 0
    assert train(file_of("fused"), "run", "--resume") == 2
    assert "hybrid.fuse: false in the checkpoint, true in this run" in capsys.readouterr().err


# --- what is refused --------------------------------------------------------------------------------------------

STATE = STACK.format("slow_gradient")
EMA = 'kind = "ademamix"\n'
NO_STATE = "kind = 'predictor_state' and predictor = "


@pytest.mark.parametrize(
    ("tail", "faults"),
    [
        ("[hybrid]\n", [f"but the stack stores none; set [[optimizations]] with {NO_STATE}'slow_gradient'"]),
        ('[hybrid]\npredictor = "rssm"\n' + STACK.format("linear"), ["the stack stores that of 'linear'"]),
        ('[hybrid]\npredictor = "linear"\n' + STATE, ["needs the state of predictor 'linear'"]),
        (EMA + "slow = {}\n", ["optimizer.kind: AdEMAMix needs the state of predictor 'slow_gradient'"]),
        (EMA + "slow = {}\n" + STACK.format("linear"), ["the stack stores that of 'linear'"]),
        (EMA + "slow = {}\n[hybrid]\n" + STATE, ["AdEMAMix already moves along slow_gradient's average;"]),
        ('[hybrid]\npredictor = "rssm"\npredictor_budget_mib = 1\n' + STATE, ["hybrid.predictor_budget_mib: 1.0 is too little for forecaster 'rssm'"]),  # noqa: E501
        ("[hybrid]\nfull_steps = 0\nmonitor = 3\n" + STATE, ["$.hybrid.monitor: 3 is not one of off"]),
        ("[hybrid]\nfull_step = 5\n" + STATE, ["$.hybrid.full_step: is an unknown key", "did you mean 'full_steps'?"]),
        ("[hybrid]\nfull_steps = 0\nstrength = -1\n" + STATE, ["full_steps: 0 must", "$.hybrid: strength: -1"]),
        (EMA + "slow = { beta = 1.5 }\n", ["$.optimizer.slow: beta: 1.5 must be in (0, 1)"]),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_refused_at_once(
    tail: str, faults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(HEAD + BODY + tail) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybridtrain: train.toml: ")
    assert all(fault in error for fault in faults)
    assert not Path("run").exists()


def test_all_faults_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = HEAD + BODY + EMA + "slow = {}\n[hybrid]\npredictor = 'linear'\n" + STATE
    text = text.replace("save_every = 1", "save_every = 0").replace("seq_len = 8", "seq_len = 800")
    assert train(text) == 2
    head, *faults = capsys.readouterr().err.splitlines()
    assert head == "hybridtrain: train.toml: 4 faults"
    paths = {fault.strip().split(": ")[1] for fault in faults}
    assert paths == {"save_every", "workload.seq_len", "hybrid.predictor", "optimizer.kind"}


# --- what is said -----------------------------------------------------------------------------------------------


def test_the_end_says_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(file_of("own")) == 0
    out = capsys.readouterr().out
    assert "hybrid: steps 2 warmup, 7 full, 3 predict, 3 correct\n" in out
    assert "  3 jumps, 0 of them within an update, " in out
    assert "0 jumps rolled back, 0 divergences; cost 36 forward passes, 12 plain steps cost 36 (+0.0 %)\n" in out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("max_predict_steps = 0", "no jump: max_predict_steps is 0"),
        ("warmup_steps = 50", "no jump: the run ends before"),
    ],
)
def test_a_run_without_jumps_says_why(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = file_of("own").replace("full_steps = 3", f"full_steps = 3\n{option}")
    assert train(text) == 0
    assert words in capsys.readouterr().out


def test_a_run_too_short_for_its_forecaster_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, warns in (("mlp", True), ("own", False)):
        assert train(file_of(kind), kind) == 0
        told = (
            "warning: forecaster 'mlp' trains from step 125 on, but num_steps is 12: it will forecast like its baseline"
        )
        assert (told in capsys.readouterr().out) is warns


def test_statistics_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(file_of("fused"), "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["last_step"] == log_of()[-1]
    assert found["hybrid"]["steps_by_phase"] == {"warmup": 2, "full": 7, "predict": 0, "correct": 3}
    assert found["hybrid"]["jumps"] == 3
    assert found["hybrid"]["cost"] == 36


# --- memory -----------------------------------------------------------------------------------------------------


def test_the_profile_has_every_phase() -> None:
    assert train(file_of("moved"), "run", "--profile-memory", "memory.csv") == 0
    with Path("memory.csv").open(encoding="utf-8") as file:
        rows = [(int(row["step"]), row["phase"]) for row in csv.DictReader(file)]
    assert rows == [(line["step"], line["phase"]) for line in log_of()]
    assert {phase for _, phase in rows} == {"warmup", "full", "predict", "correct"}


def test_state_that_leaves_for_a_jump_is_no_part_of_its_peak() -> None:
    peaks = {}
    for kind in ("own", "moved"):
        assert train(file_of(kind), kind) == 0
        peaks[kind] = {line["phase"]: line["peak_bytes"] for line in log_of(kind)}
    assert peaks["moved"]["predict"] < peaks["own"]["predict"]
    assert peaks["moved"]["full"] == peaks["own"]["full"]


# --- the guide --------------------------------------------------------------------------------------------------


def test_the_guide_has_every_option_and_its_default() -> None:
    guide = (ROOT / "docs" / "hybrid-training.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]*) \|", guide, re.MULTILINE))
    defaults = {f"slow.{field.name}": field.default for field in fields(SlowMomentum)}
    defaults |= {field.name: field.default for field in fields(HybridConfig) if field.name != "slow"}
    for name, default in defaults.items():
        told = rows[name].strip("`") if default is None else json.dumps(default)
        assert rows[name].strip("`") == told, name


def test_the_example_of_the_guide_is_sound() -> None:
    example = load_config(ROOT / "examples" / "train-hybrid.toml")
    assert example.hybrid is not None
    assert example.hybrid.needs_probe


# --- AdEMAMix, the smooth form ----------------------------------------------------------------------------------


def test_ademamix_is_a_plain_run_that_goes_on_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + BODY + EMA + "slow = { beta = 0.9, alpha = 2.0 }\n" + STATE
    assert train(text, "whole") == train(HEAD + BODY, "plain") == 0
    whole, plain = log_of("whole"), log_of("plain")
    assert set(whole[0]) == set(plain[0]) == {
        "step", "loss", "lr", "grad_norm", "tokens_per_s", "peak_bytes", "effective_batch",
    }  # fmt: skip
    assert whole[0]["loss"] == plain[0]["loss"]
    assert whole[-1]["loss"] != plain[-1]["loss"]
    with monkeypatch.context() as patch:
        stop_every(patch, 7)
        assert train(text, "parts") != 0
    assert train(text, "parts", "--resume") == 0
    assert without_times(log_of("parts")) == without_times(whole)
    assert same(state_of("parts"), state_of("whole"))

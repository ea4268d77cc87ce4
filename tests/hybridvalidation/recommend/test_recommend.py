"""The search for a stack: it fits, it is the fastest of what was tried, and it says what is missing."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from hybridtrain import recommendation
from hybridtrain.config.encode import to_toml
from hybridtrain.errors import ConfigError, OutOfMemoryError
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.recommendation import ARRANGEMENTS, LEVELS, Question, Recommendation, recommend
from hybridtrain.virtual_gpu.card import Card, Host
from hybridvalidation.cli.main import main
from hybridvalidation.recommend import command
from hybridvalidation.recommend.command import parse_size
from hybridvalidation.scenario_files import ScenarioFiles

MODEL = ModelConfig(
    family="llama", vocab_size=512, max_seq_len=128, num_blocks=8, width=512, num_heads=8, num_kv_heads=8,
    ffn_width=1376,
)  # fmt: skip


def question(card_mib: int, host_gib: float = 8.0) -> Question:
    card = Card(
        name="small", memory_mib=card_mib, compute_capability="8.9", tflops_bf16=10.0, tflops_fp32=5.0,
        memory_gbps=200.0, pcie_gbps=16.0, context_mib=64,
    )  # fmt: skip
    return Question(MODEL, card, Host(memory_gib=host_gib, reserved_gib=1.0), seq_len=128, num_sequences=8)


@cache
def ask(asked: Question) -> Recommendation:
    return recommend(asked, lambda _text: None)


def test_a_large_card_keeps_everything_and_exact_numbers() -> None:
    found = ask(question(2048))
    assert found.run.fits
    assert found.chosen.level is LEVELS[0]
    assert found.chosen.keep_last == MODEL.num_blocks


def test_a_small_card_streams() -> None:
    roomy, tight = ask(question(2048)), ask(question(250))
    assert tight.run.fits
    assert tight.run.device_used_bytes <= 250 * 2**20 < roomy.run.device_used_bytes
    assert tight.chosen.arrangement.offloads_state
    assert tight.run.tokens_per_s <= roomy.run.tokens_per_s


def test_the_figures_are_those_of_the_whole_run_of_the_chosen_stack() -> None:
    asked = question(250)
    found = ask(asked)
    again = asked.run(found.chosen)
    assert found.chosen.tokens_per_s == found.run.tokens_per_s == again.tokens_per_s
    assert found.run.tokens_per_step == 8 * 128


def test_little_host_memory_asks_for_fewer_bytes() -> None:
    rich, poor = ask(question(250)), ask(question(250, host_gib=1.0 + 0.1))
    assert poor.run.host_peak_bytes <= 0.1 * 2**30 < rich.run.host_peak_bytes


def test_nothing_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"nothing fits: .* on the card and .* of host memory .*--seq"):
        ask(question(80))


def test_every_arrangement_composes_with_every_level() -> None:
    for level in LEVELS:
        for arrangement in ARRANGEMENTS:
            stack = arrangement.optimizations(level, 4, 0)
            assert len({optimization.kind for optimization in stack}) == len(stack)


@pytest.mark.parametrize(("text", "size"), [("64GiB", 64 * 2**30), ("128GB", 128 * 10**9), ("1.5GiB", 3 * 2**29)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--host-memory") == size


@pytest.mark.parametrize("text", ["64", "GiB", "-1GiB", "0GB", "64 TiB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a size above 0"):
        parse_size(text, "--host-memory")


def test_the_written_stack_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    arguments = ["--model", "gpt2-small", "--card", "rtx-4060-ti-16gb", "--seq", "128", "--tokens-per-step", "256"]
    assert main(["recommend", *arguments, "--json", "--write", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    stack = ScenarioFiles(Path("scenarios")).stack(str(path))
    assert stack.name == "mine"
    assert stack.plan().for_phase("full").grad_accum_steps == answer["num_micro_batches"]
    assert answer["evidence"] == {"memory": "planned", "time": "estimated"}


def test_what_is_missing_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend"]) == 2
    err = capsys.readouterr().err
    assert "--model: missing" in err
    assert "--card: missing" in err


def asked_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Question:
    """Return the question that the command asks; nothing is searched."""
    seen: list[Question] = []

    def note(question: Question, _say: object) -> Recommendation:
        seen.append(question)
        raise OutOfMemoryError("nothing was searched")

    monkeypatch.setattr(command, "recommend", note)
    assert main(["recommend", *arguments]) == 1
    return seen[0]


@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_has_a_default_question(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked_for(monkeypatch, "--model", model, "--card", "rtx-4090")
    assert question.seq_len == min(2048, PRESETS[model].max_seq_len)
    assert question.seq_len * question.num_sequences == 131072
    assert question.host.memory_gib == 64


def test_positions_that_are_no_power_of_two_have_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(to_toml(replace(MODEL, max_seq_len=777)))
    question = asked_for(monkeypatch, "--model", str(path), "--card", "rtx-4090")
    assert (question.seq_len, question.num_sequences) == (777, 131072 // 777)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_block_of_a_tied_model_is_as_large_as_that_of_another(family: Literal["llama", "gpt2"], tied: bool) -> None:
    model = replace(MODEL, family=family, tied=tied, vocab_size=32768)  # an embedding larger than all blocks
    block = 4 * 512 * 512 + (3 * 512 * 1376 + 2 * 512 if family == "llama" else 2 * 512 * 1376 + 9 * 512 + 1376)
    assert recommendation._blocks_within(5.5 * 2 * block, model, LEVELS[0]) == 5
    assert recommendation._blocks_within(100.0 * 2 * block, model, LEVELS[0]) == model.num_blocks

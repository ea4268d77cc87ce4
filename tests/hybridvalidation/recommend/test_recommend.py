"""The search for a stack: it fits, it is the fastest of what was tried, and it says what is missing."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from hybridtrain import dry_runs, recommendation
from hybridtrain.config.encode import to_toml
from hybridtrain.data.batches import TokenBatch
from hybridtrain.dry_runs import record_steps
from hybridtrain.errors import ConfigError, OutOfMemoryError
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.recommendation import ARRANGEMENTS, LEVELS, Candidate, Question, Recommendation, recommend
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.card import Card, Host
from hybridtrain.virtual_gpu.ledger import LedgerTrace
from hybridvalidation.cli.main import main
from hybridvalidation.recommend import command
from hybridvalidation.recommend.command import parse_size
from hybridvalidation.scenario_files import ScenarioFiles

SEQ_LEN, NUM_SEQUENCES = 512, 2
MODEL = ModelConfig(
    family="llama", vocab_size=512, max_seq_len=SEQ_LEN, num_blocks=3, width=512, num_heads=8, num_kv_heads=8,
    ffn_width=1376,
)  # fmt: skip
"""3 blocks, so that some can be kept, or streamed through the slots of others."""
SMALL = 148
"""MiB of a card that holds neither state nor the weights of all blocks."""


def question(card_mib: int, host_gib: float = 8.0) -> Question:
    card = Card(
        name="small", memory_mib=card_mib, compute_capability="8.9", tflops_bf16=10.0, tflops_fp32=5.0,
        memory_gbps=200.0, pcie_gbps=16.0, context_mib=64,
    )  # fmt: skip
    return Question(MODEL, card, Host(memory_gib=host_gib, reserved_gib=1.0), SEQ_LEN, NUM_SEQUENCES)


KNOWN: dict[object, tuple[LedgerTrace, dict[str, object]]] = {}


def recorded_once(
    model: ModelConfig, plan: MemoryPlan, batches: Sequence[Sequence[TokenBatch]], transfer: VirtualTransfer,
    config: TrainerConfig, hybrid: None,
) -> LedgerTrace:  # fmt: skip
    """Record the steps of a plan once for all cards and hosts: they only play the ledger again."""
    key = model, repr(plan), tuple(len(step) for step in batches), batches[0][0].token_ids_BT.shape, config
    if key not in KNOWN:
        KNOWN[key] = record_steps(model, plan, batches, transfer, config, hybrid), vars(transfer)
    trace, account = KNOWN[key]
    vars(transfer).update(account)
    return trace


@cache
def ask(asked: Question) -> Recommendation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_runs, "record_steps", recorded_once)
        return recommend(asked, lambda _text: None)


def test_a_large_card_keeps_everything_and_exact_numbers() -> None:
    found = ask(question(2048))
    assert found.run.fits
    assert found.chosen.level is LEVELS[0]
    assert found.chosen.keep_last == MODEL.num_blocks


def test_a_small_card_streams() -> None:
    roomy, tight = ask(question(2048)), ask(question(SMALL))
    assert tight.run.fits
    assert tight.run.device_used_bytes <= SMALL * 2**20 < roomy.run.device_used_bytes
    assert tight.chosen.arrangement.offloads_state
    assert tight.chosen.arrangement.streams
    assert tight.run.tokens_per_s <= roomy.run.tokens_per_s


def test_the_figures_are_those_of_the_whole_run_of_the_chosen_stack() -> None:
    asked = question(SMALL)
    found = ask(asked)
    again = asked.run(found.chosen)
    assert found.chosen.tokens_per_s == found.run.tokens_per_s == again.tokens_per_s
    assert found.run.tokens_per_step == NUM_SEQUENCES * SEQ_LEN


def test_little_host_memory_asks_for_fewer_bytes() -> None:
    rich, poor = ask(question(SMALL)), ask(question(SMALL, host_gib=1.0 + 0.04))
    assert poor.run.host_peak_bytes <= 0.04 * 2**30 < rich.run.host_peak_bytes


def test_nothing_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"nothing fits: .* on the card and .* of host memory .*--seq"):
        ask(replace(question(80), num_sequences=1))  # of one size, so that no level is tried twice


def test_short_runs_extended_in_straight_lines_are_the_whole_run() -> None:
    # The searches above are of models as deep as the probes.
    asked = replace(question(2048), model=replace(MODEL, num_blocks=8), num_sequences=4)
    line = recommendation._Line(asked, LEVELS[1], ARRANGEMENTS[2], 1)
    candidate = Candidate(
        level=LEVELS[1], arrangement=ARRANGEMENTS[2], micro_batch_size=1, num_micro_batches=4, keep_last=0
    )
    whole = asked.run(candidate)
    assert line.seconds(0) == pytest.approx(whole.time.seconds)
    assert line._extended(lambda run: run.host_peak_bytes) == whole.host_peak_bytes
    found = line._extended(lambda run: run.peak_reserved_bytes)
    assert found == pytest.approx(whole.peak_reserved_bytes, abs=2 * 2**20)  # one of the allocator's segments


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
    path, model = tmp_path / "mine.toml", tmp_path / "model.toml"
    model.write_text(to_toml(replace(MODEL, num_blocks=1, max_seq_len=16384)))  # two sequences, too long for one visit
    arguments = ["--model", str(model), "--card", "rtx-4060-ti-16gb", "--seq", "16384", "--tokens-per-step", "32768"]
    assert main(["recommend", *arguments, "--json", "--write", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    stack = ScenarioFiles(Path("scenarios")).stack(str(path))
    assert stack.name == "mine"
    assert stack.plan().for_phase("full").grad_accum_steps == answer["num_micro_batches"] == 2
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
    model = replace(
        MODEL, num_blocks=8, family=family, tied=tied, vocab_size=32768
    )  # an embedding larger than all blocks
    block = 4 * 512 * 512 + (3 * 512 * 1376 + 2 * 512 if family == "llama" else 2 * 512 * 1376 + 9 * 512 + 1376)
    assert recommendation._blocks_within(5.5 * 2 * block, model, LEVELS[0]) == 5
    assert recommendation._blocks_within(100.0 * 2 * block, model, LEVELS[0]) == model.num_blocks

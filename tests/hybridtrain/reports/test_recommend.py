"""The search for a stack: it fits, it is the fastest of what was tried, and it says what is missing."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.config.encode import to_toml
from hybridtrain.errors import ConfigError, OutOfMemoryError
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.planning import fitting
from hybridtrain.planning.candidates import ARRANGEMENTS, LEVELS, Candidate, FitRequest
from hybridtrain.planning.fitting import Recommendation, TrainingOption, confirmed, recommend
from hybridtrain.reports import recommend_report as command
from hybridtrain.sizes import parse_size
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, Card, FitVerdict, Host, find_card
from hybridvalidation.scenario_files import ScenarioFiles

SEQ_LEN, NUM_SEQUENCES = 512, 2
MODEL = ModelConfig(
    family="llama", vocab_size=512, max_seq_len=SEQ_LEN, num_blocks=3, width=512, num_heads=8, num_kv_heads=8,
    ffn_width=1376,
)  # fmt: skip
"""3 blocks, so that some can be kept, or streamed through the slots of others."""
SMALL = 156
"""MiB of a card that holds neither state nor the weights of all blocks."""


def request(card_mib: int, host_gib: float = 8.0) -> FitRequest:
    card = Card(
        name="small", memory_mib=card_mib, compute_capability="8.9", tflops_bf16=5.0, tflops_fp32=2.5,
        memory_gbps=200.0, pcie_gbps=16.0, context_mib=64,
    )  # fmt: skip
    return FitRequest(MODEL, card, Host(memory_gib=host_gib, reserved_gib=1.0), SEQ_LEN, NUM_SEQUENCES)


@cache
def ask(asked: FitRequest) -> Recommendation:
    return recommend(asked, lambda _text: None)


def test_a_large_card_keeps_everything_and_exact_numbers() -> None:
    found = ask(request(2048))
    assert found.run.fits
    assert found.chosen.level is LEVELS[0]
    assert found.chosen.keep_last == MODEL.num_blocks


def test_what_can_move_reserved_bytes_and_the_margin_stay_free() -> None:
    for asked in (request(2048), request(SMALL)):
        found = ask(asked)
        assert (
            found.run.device_used_bytes + found.option.margin_bytes + asked.card.margin_bytes <= asked.card.memory_bytes
        )
        assert found.run.verdict is FitVerdict.FITS
        size = f"{asked.card.margin_bytes / 2**20:.2f} MiB"
        assert f"a margin of 5 % ({size})" in command.RecommendReport(answer=found, model="mine").as_text()


def test_a_small_card_streams() -> None:
    roomy, tight = ask(request(2048)), ask(request(SMALL))
    assert tight.run.fits
    assert tight.run.device_used_bytes <= SMALL * 2**20 < roomy.run.device_used_bytes
    assert tight.chosen.arrangement.offloads_state
    assert tight.chosen.arrangement.streams
    assert tight.option.tokens_per_s <= roomy.option.tokens_per_s


def test_the_figures_are_those_of_a_run_of_the_chosen_stack_with_every_block() -> None:
    asked = request(SMALL)
    found = ask(asked)
    assert found.option.micro_batches_run == found.chosen.num_micro_batches  # no more than are run
    again = asked.run(found.chosen)
    assert found.option.tokens_per_s == again.tokens_per_s
    assert found.option.device_bytes == again.device_used_bytes
    assert found.option.host_bytes == again.host_peak_bytes


def test_little_host_memory_asks_for_fewer_bytes() -> None:
    rich, poor = ask(request(SMALL)), ask(request(SMALL, host_gib=1.0 + 0.04))
    assert poor.run.host_peak_bytes <= 0.04 * 2**30 < rich.run.host_peak_bytes


def test_nothing_fits() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"nothing fits: .* on the card and .* of host memory .*5 % of the card free.*--seq"
    ):
        ask(replace(request(80), num_sequences=1))  # of one size, so that no level is tried twice


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


def asked_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> FitRequest:
    """Return the request that the command asks; nothing is searched."""
    return asked_with_share(monkeypatch, *arguments)[0]


def asked_with_share(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[FitRequest, float]:
    """Return it with the share of the card that stays free."""
    seen: list[tuple[FitRequest, float]] = []

    def note(request: FitRequest, _say: object, *, free_share: float) -> Recommendation:
        seen.append((request, free_share))
        raise OutOfMemoryError("nothing was searched")

    monkeypatch.setattr(command, "recommend", note)
    assert main(["recommend", *arguments]) == 1
    return seen[0]


@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_has_a_default_question(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked_for(monkeypatch, "--model", model, "--card", "rtx-4090")
    assert request.seq_len == min(2048, PRESETS[model].max_seq_len)
    assert request.seq_len * request.num_sequences == 131072
    assert request.host.memory_gib == 64


def test_a_scenarios_stated_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    request, share = asked_with_share(monkeypatch, "--scenario", "7b-16gb", "--tokens-per-step", "131072")
    assert (request.card.memory_mib, request.num_sequences, share) == (14 * 1024, 128, 0.0)
    request, share = asked_with_share(monkeypatch, "--scenario", "7b-16gb", "--device-budget", "10GiB")
    assert (request.card.memory_mib, request.num_sequences, share) == (10 * 1024, 8, 0.0)


def test_a_budget_beyond_the_margin_leaves_the_margin_free(monkeypatch: pytest.MonkeyPatch) -> None:
    card = find_card("rtx-4090")
    model = ["--model", "gpt2-small", "--card", "rtx-4090"]
    for budget in ("23GiB", "23.5GiB"):
        assert asked_with_share(monkeypatch, *model, "--device-budget", budget)[0].card == card
        assert asked_with_share(monkeypatch, *model, "--device-budget", budget)[1] == MARGIN_SHARE
    assert asked_with_share(monkeypatch, *model)[1] == MARGIN_SHARE


def test_a_budget_below_what_cuda_takes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--model", "gpt2-small", "--card", "rtx-4090", "--device-budget", "0.1GiB"]) == 2
    assert "102.40 MiB must be above the CUDA context's" in capsys.readouterr().err


def test_a_budget_above_the_card_is_refused_and_not_lowered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--model", "gpt2-small", "--card", "rtx-4090", "--device-budget", "48GiB"]) == 2
    assert "48GiB is above NVIDIA GeForce RTX 4090, which has" in capsys.readouterr().err


def test_positions_that_are_no_power_of_two_have_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(to_toml(replace(MODEL, max_seq_len=777)))
    request = asked_for(monkeypatch, "--model", str(path), "--card", "rtx-4090")
    assert (request.seq_len, request.num_sequences) == (777, 131072 // 777)


@pytest.mark.parametrize("waits", [True, False])
def test_blocks_stay_on_the_card_where_the_bus_is_waited_for(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    monkeypatch.setattr(fitting, "_WAITS", 0.0 if waits else 1.0)
    asked = replace(request(2048), card=replace(request(2048).card, pcie_gbps=0.1))
    candidate = Candidate(
        level=LEVELS[2], arrangement=ARRANGEMENTS[2], micro_batch_size=1, num_micro_batches=2, keep_last=0
    )
    option = TrainingOption(method="full", candidate=candidate, device_bytes=0, host_bytes=0, fits=True)
    streamed = confirmed(asked, option, free_share=0.0, leaves_margin=True)
    found = fitting._with_resident_blocks(asked, streamed, 0.0)
    assert found.candidate.resident_layers == (MODEL.num_blocks if waits else 0)
    assert (found.tokens_per_s > streamed.tokens_per_s) is waits


def test_each_setting_has_a_reason() -> None:
    roomy, tight = (command.RecommendReport(answer=ask(request(mib)), model="mine") for mib in (2048, SMALL))
    why = roomy.as_mapping()["reasons"]
    assert isinstance(why, dict)
    assert list(why) == ["precision", "accumulation", "checkpointing", "offload", "predict_memory"]
    assert "the most exact precision" in why["precision"]
    assert " less, on card and host" in why["precision"]
    assert why["checkpointing"].startswith("every block keeps")
    assert why["offload"].startswith("none")
    assert tight.answer.chosen.arrangement.name in tight.as_mapping()["reasons"]["offload"]  # type: ignore[index]
    assert all(sentence in roomy.as_text() for sentence in why.values())

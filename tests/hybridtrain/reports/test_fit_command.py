"""``hybridtrain fit``: a table, JSON, and files that are read back."""

import json
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.main import main
from hybridtrain.config.encode import to_toml
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.planning.candidates import ARRANGEMENTS, LEVELS, Candidate
from hybridtrain.planning.fitting import levels_of, speed
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.reports.fit_report import FitReport, fit_command
from hybridtrain.training_file import load_config
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.equivalence import Finding, judge_size, last_analysis
from hybridvalidation.study.protocol import ladders, read_study
from hybridvalidation.study.quality_notes import ladder_notes

MODEL = ModelConfig(
    family="llama", vocab_size=256, max_seq_len=128, num_blocks=2, width=128, num_heads=2, num_kv_heads=2,
    ffn_width=256,
)  # fmt: skip


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    model = tmp_path / "model.toml"
    model.write_text(to_toml(MODEL))
    return ["fit", str(model), "--card", "rtx-4090", "--tokens-per-step", "256"]


def test_the_files_of_every_way_are_read_back(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "options"
    assert main([*arguments, "--tokens", "5000", "--method", "lora,qlora", "--json", "--write", str(folder)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seq_len"] == MODEL.max_seq_len
    assert [option["method"] for option in answer["options"]]
    first = next(option for option in answer["options"] if option["precision"] == answer["recommended"])
    assert first["evidence"]["memory"] == "planned"
    assert first["hours"] == pytest.approx(answer["tokens"] / first["tokens_per_s"] / 3600)
    for option in answer["options"]:
        file = load_config(folder / f"train-{option['precision']}.toml")
        stack = ScenarioFiles(Path("scenarios")).stack(str(folder / f"{option['precision']}.toml"))
        assert file.optimizations == stack.optimizations
        assert file.workload.batch_size == 2
        assert file.model.resolve() == MODEL
        assert (file.num_steps, file.schedule.total_steps, file.schedule.warmup_steps) == (20, 20, 2)  # of 256 tokens


def test_several_cards_are_asked_for_by_number_and_link(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = [*arguments, "--world", "2", "--link", "nvlink", "--write", str(tmp_path / "options")]
    assert main([*several, "--method", "full", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["world"], answer["link"], answer["tokens_per_step"]) == (2, "nvlink", 256)
    for option in answer["options"]:
        assert option["command"].startswith("torchrun --nproc-per-node 2 -m hybridtrain train ")
        assert option["micro_batch_size"] * option["num_micro_batches"] == 1  # of two sequences each card has one
        file = load_config(tmp_path / "options" / f"train-{option['precision']}.toml")
        assert file.workload.batch_size == 2
        assert compose(file.optimizations).for_phase(Phase.FULL).grad_accum_steps == 2
    assert main([*several, "--method", "lora", "--quick"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "; 2 x RTX 4090: 23.52 GiB, 5 % free; host: 60.00 GiB of a machine of 2 cards" in told
    assert main([*arguments, "--world", "3"]) == 2
    assert "2 sequences of 128 tokens must be a multiple of 3 cards" in capsys.readouterr().err


def test_the_answer_is_short_and_its_first_lines_decide(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = fit_command(FitArguments(model=arguments[1], card="rtx-4090", tokens_per_step=256), confirm=False)
    for width in (80, 100, 120):
        for view in (report, replace(report, shows_least=True)):
            lines = view.as_text(width).splitlines()
            assert len(lines) <= 25 + len(arguments[1]) // width  # the temporary folder's name takes lines of its own
            assert max(map(len, lines)) <= width
            assert lines[0].startswith("Fits. Fastest: ")
            assert any(line.startswith("Least card memory: ") for line in lines[:3])
            head = next(i for i, line in enumerate(lines) if line.startswith("method "))
            assert len(re.split("  +", lines[head].strip())) == (6 if width == 80 else 7)
            rows = [re.split("  +", line.strip()) for line in lines[head + 1 : head + 9]]
            numbers = [float(row[2 if view.shows_least else 4].lstrip("~").replace(",", "")) for row in rows]
            assert numbers == sorted(numbers, reverse=not view.shows_least)
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*arguments, "--quick", "--explain", "--method", "full"]) == 0
    explained = capsys.readouterr()
    assert explained.out.startswith("Fits. Fastest: ")
    assert "bf16-int8-state" in explained.out
    assert "trying exact" in explained.err


def test_the_smallest_of_each_method_are_shown_by_memory(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--least", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    sizes = [option["device_used_bytes"] for option in answer["least"]]
    assert sizes == sorted(sizes)
    assert len(sizes) == len(answer["options"])
    assert answer["least_memory"] == answer["least"][0]["precision"]
    assert answer["fastest"] == answer["options"][0]["precision"]
    assert "planned" in [option["evidence"]["memory"] for option in answer["least"]]
    for option in answer["least"]:
        assert (option["micro_batch_size"], option["kept_blocks"]) == (1, 0)


def test_where_the_fastest_offloads_the_fastest_without_offload_is_told() -> None:
    def asked(card: str) -> FitReport:
        return fit_command(FitArguments(model="gpt2-large", card=card), methods=["lora"], confirm=False)

    narrow, wide = asked("rtx-3050-laptop-4gb"), asked("rtx-4090")
    assert narrow.resident is not None
    assert not narrow.options[0].candidate.arrangement.is_resident
    assert speed(narrow.resident) < speed(narrow.options[0])
    assert narrow.as_text().splitlines()[1].startswith("Without offload: LoRA, bf16: ~3.")
    assert wide.resident is None
    assert wide.options[0].candidate.arrangement.is_resident


def test_a_way_that_only_the_margin_has_no_room_for_fits_barely(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "card.toml"

    def options(memory_mib: int, *options: str) -> tuple[list[dict[str, Any]], int]:
        card.write_text(
            f'name = "small"\nmemory_mib = {memory_mib}\ncompute_capability = "8.9"\ntflops_bf16 = 10.0\n'
            "tflops_fp32 = 5.0\nmemory_gbps = 200.0\npcie_gbps = 16.0\ncontext_mib = 64\n"
        )
        code = main([*arguments, "--card", str(card), "--method", "lora", "--quick", "--json", *options])
        return json.loads(capsys.readouterr().out)["options"], code

    smallest = options(66)[0][0]
    assert (smallest["fits"], smallest["verdict"]) == (False, "does not fit")
    needed_mib = ceil(smallest["device_used_bytes"] / 2**20)
    barely, code = options(needed_mib)
    assert (barely[0]["fits"], barely[0]["verdict"], code) == (False, "fits barely", 1)
    roomy, code = options(2048)
    assert (roomy[0]["fits"], roomy[0]["verdict"], code) == (True, "fits", 0)


def test_the_answer_names_the_margin_and_what_of_the_card_has_no_source(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    of_one_without = [*arguments, "--method", "lora", "--quick", "--card", "rtx-4080"]
    assert main(of_one_without) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "RTX 4080: 15.57 GiB (not all published, --explain), 5 % free" in told
    assert main([*of_one_without, "--explain"]) == 0
    assert find_card("rtx-4080").note in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["./nofolder", "some/where/else", "a--b/c"])
def test_a_folder_that_is_not_there_is_no_fault_of_the_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", name, "--card", "rtx-4090"]) == 2
    assert f"'{name}' is n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--method", "lore", "must be one of full, lora, qlora"),
        ("--margin", "100", "from 0 to below 100"),
    ],
)
def test_wrong_options(
    arguments: list[str], option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, option, value]) == 2
    assert said in capsys.readouterr().err


def test_quality_is_what_ladders_on_record_say(tmp_path: Path) -> None:
    candidates = [
        Candidate(level=level, arrangement=ARRANGEMENTS[0], micro_batch_size=1, num_micro_batches=1, keep_last=0)
        for level in LEVELS
    ]
    notes = ladder_notes(candidates, ScenarioFiles(Path("scenarios")), Path("results"))
    judged = [
        (ladder, one)
        for ladder in ladders(Path("scenarios"))
        for size in ladder.rungs
        for one in judge_size(ladder, read_study(Path("results"), ladder), size)
    ]
    for level, arm in (("exact", "mixed"), ("bf16-int8-state", "tight")):
        ladder, found = max(  # a decision before an open question of a larger model
            (item for item in judged if item[1].configuration.name == arm and item[1].is_finished),
            key=lambda item: (item[1].finding is not Finding.INCONCLUSIVE, item[1].scale),
        )
        note, interval = notes[level], found.interval
        assert note.text.startswith(found.finding)
        assert f"{interval.mean:+.4f} nats" in note.text
        assert "executed at" in note.text
        assert note.params == found.scale[0]
        undecided = f"undecided, {interval.low:+.3f} to {interval.high:+.3f} nats per token"
        told = {Finding.NO_HARM: f"no harm above {ladder.margin_nats:g} nats per token"}
        assert note.verdict == told.get(found.finding, undecided)
    assert "int8-factored" not in notes  # no arm stores weights in 8 bits under factored state
    unmade = ladder_notes(candidates, ScenarioFiles(Path("scenarios")), tmp_path)
    assert all(note.text.startswith("unfinished") for note in unmade.values())
    assert {note.verdict for note in unmade.values()} == {"no comparison with the baseline"}


def test_adapters_are_compared_with_the_baseline_and_not_with_each_other() -> None:
    candidates = [
        Candidate(level=level, arrangement=ARRANGEMENTS[0], micro_batch_size=1, num_micro_batches=1, keep_last=0)
        for method in ("lora", "qlora")
        for level in levels_of(method)
    ]
    notes = ladder_notes(candidates, ScenarioFiles(Path("scenarios")), Path("results"))
    ladder = next(each for each in ladders(Path("scenarios")) if each.name == "quality-ladder")
    made, full = read_study(Path("results"), ladder), ladder.configuration("fine-tuned")
    for name in ("lora", "qlora"):
        size = next(each for each in ladder.rungs if each.model.num_params == notes[name].params)
        direct = last_analysis(ladder, made, size, ladder.configuration(name), full)
        assert direct.is_finished
        assert notes[name].verdict == f"worse by {direct.interval.mean:.3f} nats per token"
    assert "against lora" in notes["qlora"].text  # as it was registered
    assert "against fine-tuned" in notes["qlora"].text


@pytest.mark.parametrize("quantity", ["batch", "seq", "card", "host"])
def test_a_solution_names_its_value_and_its_limit(
    arguments: list[str], quantity: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = [part for part in arguments if quantity != "card" or part not in {"--card", "rtx-4090"}]
    asked += ["--solve", quantity, "--method", "lora,qlora", "--margin", "97"]  # of 23.52 GiB 0.71 are left
    if quantity == "card":
        asked[-1] = "5"
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["solve"] == quantity
    assert {each["precision"] for each in answer["solutions"]} == {"lora", "qlora"}
    for each in answer["solutions"]:
        found = each["resident"]
        assert found["evidence"]["memory"] == "planned"
        assert found["limit"]
        if quantity == "seq":
            assert (found["value"], found["limit"]) == (128, "the model's positions (128)")
        if quantity == "host":
            assert (found["value"], found["offload"]) == (0, "none")  # a batch on its way is not told
        if quantity == "batch":
            assert found["value"] == found["micro_batch_size"] > 1
            assert found["device_used_bytes"] <= 0.03 * answer["card_bytes"]
    assert main([*asked, "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match("(Largest micro-batch|Longest sequence|Smallest card|Least host memory without disk): ", lines[0])
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--solve", "bytes"], 'Choose from: "batch", "seq", "card", "host"'),
        (["--solve", "card"], "--card: --solve card finds it; leave it out"),
        (["--solve", "seq", "--seq", "64"], "--seq: --solve seq finds it; leave it out"),
        (["--solve", "batch", "--least"], "--least: --solve batch does without it; leave it out"),
        (["--solve", "batch", "--method", "lore"], "must be one of full, lora, qlora"),
    ],
)
def test_wrong_options_of_a_solution(
    arguments: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *options]) == 2
    assert said in capsys.readouterr().err


def test_a_card_is_asked_for_where_none_is_sought(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments[:2]) == 2
    assert "--card: missing; name one (hybridtrain list cards)" in capsys.readouterr().err

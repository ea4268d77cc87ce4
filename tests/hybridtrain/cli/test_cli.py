import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from command import Command
from hybridkernels.adamw_int8 import cpu_build
from hybridtrain.cli import machine
from hybridtrain.data.token_file import TokenFormat, write_token_file
from hybridtrain.models.layers import Head
from hybridtrain.models.model_config import PRESETS
from hybridtrain.planning.dry_runs import DryRun, DryRunInputs
from hybridtrain.virtual_gpu.cards.card import CardLimit, card_catalogue
from hybridvalidation import scenario_files
from hybridvalidation.experiments import stack_runs
from hybridvalidation.scenario_files import ScenarioFiles
from inline_child import InlineChild
from tiny_files import CARD, scenario_file, shape_file

MIB = 2**20
SHAPE = shape_file(num_blocks=2, tied=True)
SCENARIO = scenario_file(
    ["vanilla", "lean"], SHAPE, seq_len=8, num_steps=10, targets='\n[[targets]]\nid = "small"\nstacks = ["lean"]\n'
)
STACKS = {
    "vanilla": 'name = "vanilla"\ndescription = "nothing on"\n',
    "lean": """\
name = "lean"
description = "bfloat16, every block recomputed, in two pieces"

[[optimizations]]
kind = "mixed_precision"
master = "absent"

[[optimizations]]
kind = "gradient_checkpointing"
recompute_every = 1

[[optimizations]]
kind = "int8_optimizer"

[[optimizations]]
kind = "grad_accumulation"
grad_accum_steps = 2
accumulator = "bfloat16"
""",
}
OFFLOADS = """\
name = "lean"
description = "optimizer state on the host"
[[optimizations]]
kind = "optimizer_offload"
"""
TARGETS = """\
[[target]]
id = "small"
source = ["000"]
description = "a tiny model trains in 1 GiB"
metric = "peak_vram_gib"
direction = "max"
value = 1.0
"""
NINE_FAULTS = """\
name = "broken"
stacks = "vanilla"
[model]
preset = "gpt2-smal"
[card]
name = "rtx-3091"
[workload]
batch_size = "four"
seq_len = true
sequence = 3
[accuracy]
seeds = [0, 1.5, 2]
num_steps = 3
batch_size = 2
seq_len = 8
lr = 1e-3
validation_batches = 1
[accuracy.proxy]
family = "gpt3"
vocab_size = 256
max_seq_len = 8
num_blocks = 1
width = 8
num_heads = 1
num_kv_heads = 1
ffn_width = 8
"""
NINE_PATHS = [
    "$.description", "$.stacks", "$.model", "$.card", "$.workload.sequence", "$.workload.batch_size",
    "$.workload.seq_len", "$.accuracy.seeds[1]", "$.accuracy.proxy.family",
]  # fmt: skip
TRAIN = f"""\
num_steps = 4
save_every = 2
sample_tokens = 4
[model.shape]
{SHAPE}
[workload]
batch_size = 2
seq_len = 8
[optimizer]
lr = 1e-3
[schedule]
warmup_steps = 0
total_steps = 10
"""
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on tiny tensors and wait for each other on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with everything a user has: scenarios, model, card, training file, text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    stacks = tmp_path / "scenarios" / "stacks"
    stacks.mkdir(parents=True)
    for name, text in STACKS.items():
        (stacks / f"{name}.toml").write_text(text)
    files = {
        "scenarios/mine.toml": SCENARIO, "scenarios/targets.toml": TARGETS, "model.toml": SHAPE, "card.toml": CARD,
        "train.toml": TRAIN, "text.txt": TEXT,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def change(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def dry_run(model: str = "model.toml", stack: str = "vanilla", card: str = "card.toml", seq: int = 8) -> list[str]:
    return ["dry-run", "--model", model, "--stack", stack, "--card", card, "--micro-batch", "2", "--seq", str(seq)]


def train(out: str = "run", data: str = "text.txt") -> list[str]:
    return ["train", "train.toml", "--data", data, "--out", out]


def log_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def losses(out: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in log_of(out)]


# --- faulty files and arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["validate", "gate", "report"])
def test_nine_faults_of_a_scenario_are_told_at_once(command: Command, verb: str) -> None:
    Path("scenarios/broken.toml").write_text(NINE_FAULTS)
    assert command(verb, "broken") == 2
    head, *faults = command.err.splitlines()
    assert head == "hybridtrain: scenarios/broken.toml: 9 faults"
    assert sorted(fault.strip().split(": ")[0] for fault in faults) == sorted(NINE_PATHS)
    assert command.out == ""
    assert not Path("results").exists()


def test_nine_faults_say_what_is_allowed(command: Command) -> None:
    Path("scenarios/broken.toml").write_text(NINE_FAULTS)
    command("validate", "broken")
    for words in (
        "$.description: is missing; a string is required",
        "$.stacks: found 'vanilla' (a string); an array is required",
        "did you mean 'gpt2-small'?",
        "did you mean 'rtx-3090'?",
        "$.workload.batch_size: found 'four' (a string); an integer is required",
        "$.workload.seq_len: found True (a boolean); an integer is required",
        "$.workload.sequence: is an unknown key (found 3); allowed: batch_size, seq_len",
        "$.accuracy.seeds[1]: found 1.5 (a number); an integer is required",
        "$.accuracy.proxy.family: 'gpt3' is not one of gpt2, llama, mistral, ",
        "mixtral, qwen3_moe; did you mean 'gpt2'?",
    ):
        assert words in command.err


def test_nine_faults_are_nine_entries_of_the_json(command: Command) -> None:
    Path("scenarios/broken.toml").write_text(NINE_FAULTS)
    found = command.json("validate", "broken", code=2)
    assert found["error"] == "ConfigError"
    assert sorted(fault.split(": ")[0] for fault in found["faults"]) == sorted(NINE_PATHS)
    assert "scenarios/broken.toml" in found["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["validate", "mime"], "scenario 'mime' is unknown; did you mean 'mine'? Known: mine."),
        (["gate", "mime"], "scenario 'mime' is unknown; did you mean 'mine'?"),
        (["report", "mime"], "scenario 'mime' is unknown; did you mean 'mine'?"),
        (dry_run(model="gpt2-smal"), "model 'gpt2-smal' is unknown; did you mean 'gpt2-small'?"),
        (dry_run(stack="lea"), "stack 'lea' is unknown; did you mean 'lean'? Known: lean, vanilla."),
        (dry_run(card="4070-ti"), "card '4070-ti' is unknown; did you mean 'rtx-4070-ti'?"),
        (dry_run(model="modl.toml"), "modl.toml: 1 fault\n  does not exist; did you mean 'model.toml'?"),
        (dry_run(card="gone/card.toml"), "does not exist: there is no folder gone"),
        (dry_run(stack="scenarios"), "stack 'scenarios' is unknown"),
        (["validate", "mime.toml"], "mime.toml: 1 fault\n  does not exist"),
        (["train", "trian.toml"], "trian.toml: 1 fault\n  does not exist; did you mean 'train.toml'?"),
        (dry_run(seq=17), "seq_len: 17 is above the model's max_seq_len (16)"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(command: Command, arguments: list[str], words: str) -> None:
    assert command(*arguments) == 2
    assert words in command.err
    assert command.err.startswith("hybridtrain: ")
    assert command.out == ""


def test_an_unknown_target_suggests_the_nearest(command: Command) -> None:
    change("scenarios/mine.toml", 'id = "small"', 'id = "smal"')
    assert command("validate", "mine") == 2
    assert "$.targets[0].id: target 'smal' is unknown; did you mean 'small'?" in command.err


def test_an_unknown_optimization_suggests_the_nearest(command: Command) -> None:
    change("scenarios/stacks/lean.toml", "int8_optimizer", "int8_optimiser")
    assert command(*dry_run(stack="lean")) == 2
    assert "scenarios/stacks/lean.toml: 1 fault" in command.err
    assert "$.optimizations[2].kind: 'int8_optimiser' is not one of" in command.err
    assert "did you mean 'int8_optimizer'?" in command.err


@pytest.mark.parametrize("verb", ["validate", "gate"])
def test_a_stack_that_contradicts_itself_is_a_wrong_file_and_named(command: Command, verb: str) -> None:
    with Path("scenarios/stacks/lean.toml").open("a") as file:
        file.write('\n[[optimizations]]\nkind = "int8_optimizer"\n')
    assert command(verb, "mine") == 2
    assert "lean" in command.err
    assert "'int8_optimizer' appears 2 times in the stack; keep one of them." in command.err


def test_a_training_file_that_contradicts_itself_is_a_wrong_file_and_named(command: Command) -> None:
    with Path("train.toml").open("a") as file:
        file.write('[[optimizations]]\nkind = "int8_optimizer"\n' * 2)
    assert command(*train()) == 2
    assert "train.toml" in command.err
    assert "'int8_optimizer' appears 2 times" in command.err


@pytest.mark.parametrize("figure", ["0", "-3", "two", "2.5", ""])
@pytest.mark.parametrize("option", ["--micro-batch", "--seq", "--accum"])
def test_a_count_must_be_a_whole_number(command: Command, option: str, figure: str) -> None:
    assert command(*dry_run(), f"{option}={figure}") == 2
    assert f"argument {option}: " in command.err
    assert "must be" in command.err


def test_a_missing_argument_is_named(command: Command) -> None:
    assert command("dry-run", "--model", "gpt2-small") == 2
    assert "--stack, --card, --micro-batch, --seq" in command.err
    assert "usage: hybridtrain dry-run" in command.err


def test_an_unknown_verb_names_the_known_ones(command: Command) -> None:
    assert command("valdate", "mine") == 2
    assert f"verb 'valdate' is not one of {', '.join(VERBS)}; did you mean 'validate'?" in command.err


def test_an_unknown_option_names_the_nearest_and_all(command: Command) -> None:
    assert command("gate", "--acept") == 2
    assert (
        "is not one of --accept, --jobs, --json, --markdown, --reason, --results, --scenarios; did you" in command.err
    )


def test_an_option_without_its_value_is_told(command: Command) -> None:
    assert command(*dry_run(), "--accum") == 2
    assert "--accum needs a value" in command.err


VERBS = (
    "fit", "dry-run", "virtual", "recommend", "train", "export", "quantize", "dummy-weights", "doctor", "list",
    "guide", "validate", "execute", "evidence", "bench", "study", "recorded", "peers", "atlas", "gate", "report",
    "records", "snapshots",
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(command: Command, verb: str) -> None:
    assert command(verb, "--help") == 0
    assert f"Usage: hybridtrain {verb}" in command.out
    assert f"Example: hybridtrain {verb}" in command.out


def test_help_version_names_and_logs_need_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--help", "--version", "list", "list cards", "guide", "guide gate", *(f"{verb} --help" for verb in VERBS)]
    Path("log.txt").write_text("CUDA out of memory")
    asked.append("doctor --from log.txt")
    program = f"""\
import sys
from hybridtrain.cli.main import main
for line in {asked}:
    assert main(line.split()) == 0, line
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_tells_exit_codes_in_colours_unless_there_should_be_none() -> None:
    def told(**environment: str) -> str:
        wanted = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | environment
        command = [sys.executable, "-m", "hybridtrain", "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=wanted).stdout

    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")  # bold is none
    plain = told(FORCE_COLOR="1", NO_COLOR="1")
    assert "Exit codes: 0 it went well" in plain
    assert not colour.search(plain)
    assert colour.search(told(FORCE_COLOR="1"))


@pytest.mark.parametrize(
    "arguments", [["dry-run"], [*dry_run(), "--seq=0"], ["gate", "--acept"]], ids=["missing", "wrong", "unknown"]
)
def test_a_wrong_argument_is_told_as_json_too(command: Command, arguments: list[str]) -> None:
    assert set(command.json(*arguments, code=2)) == {"error", "message", "faults"}


@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ("scenarios/mine.toml", ["validate", "mine"]),
        ("scenarios/mine.toml", ["gate"]),
        ("scenarios/targets.toml", ["list"]),
        ("scenarios/targets.toml", ["validate", "mine"]),
        ("scenarios/stacks/lean.toml", ["report", "mine"]),
        ("model.toml", dry_run()),
        ("card.toml", dry_run()),
        ("train.toml", train()),
    ],
)
def test_errors_are_one_json_object(command: Command, file: str, arguments: list[str]) -> None:
    Path(file).write_bytes(b"\xff\0 = [")
    found = command.json(*arguments, code=2)
    assert set(found) == {"error", "message", "faults"}
    assert file.rpartition("/")[2] in found["message"]


@pytest.mark.parametrize("option", ["--out", "--snapshot", "--trace", "--results"])
def test_an_output_that_cannot_be_written_is_no_traceback(command: Command, option: str) -> None:
    Path("file").write_text("")  # where a folder is needed
    verbs = {"--out": train(), "--results": ["gate", "mine", "--accept"]}
    assert command(*verbs.get(option, dry_run()), option, "file/x") in {1, 2}
    assert "file" in command.err


def test_an_output_that_is_a_folder_is_no_traceback(command: Command) -> None:
    Path("folder").mkdir()
    assert command(*dry_run(), "--trace", "folder") in {1, 2}
    assert "folder" in command.err


# --- dry-run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
def test_dry_run_json_holds_the_documented_figures(command: Command, stack: str) -> None:
    found = command.json(*dry_run(stack=stack))
    figures = {
        "params": int, "peak_allocated_bytes": int, "peak_reserved_bytes": int, "device_used_bytes": int,
        "reserved_range": dict,
        "host_peak_bytes": int, "by_class": dict, "fits": bool, "step_time_s": float, "tokens_per_s": float,
        "bound": str, "host_by_class": dict, "disk_peak_bytes": int, "fits_host": bool, "fits_card": bool,
        "host_needed_bytes": int, "host_memory_bytes": int, "verdict": str, "margin_bytes": int, "card_note": str,
    }  # fmt: skip
    details = {"peak_active_bytes", "steps", "oom", "evidence", "fitting_stacks", "phases", "savings", "world", "ranks"}
    details |= {"link", "changes"}
    assert set(found) == figures.keys() | details
    assert {name: type(found[name]) for name in figures} == figures
    assert list(found["by_class"]) == [
        "weight", "master", "grad", "optim_state", "boundary", "activation", "workspace",
    ]  # fmt: skip
    assert sum(found["by_class"].values()) == found["peak_allocated_bytes"]
    moves = found["reserved_range"]
    assert moves["planned_bytes"] == found["peak_reserved_bytes"]
    assert moves["margin_bytes"] >= 0
    assert moves["by_change"].keys() == {"driver", "evaluation", "lengths"}
    assert found["params"] == 256 * 32 + 16 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 64 + 9 * 32 + 64) + 2 * 32
    assert found["device_used_bytes"] == found["peak_reserved_bytes"] + MIB
    assert found["peak_allocated_bytes"] <= found["peak_active_bytes"] <= found["peak_reserved_bytes"]
    assert found["host_peak_bytes"] == 2 * 8 * 8
    assert found["bound"] in {"compute", "memory", "transfer", "optimizer"}
    assert (found["host_needed_bytes"], found["host_memory_bytes"]) == (2 * 8 * 8 + 4 * 2**30, 64 * 2**30)
    assert (found["fits"], found["oom"], found["fitting_stacks"]) == (True, None, None)
    assert (found["verdict"], found["margin_bytes"]) == ("fits", round(0.05 * 64 * MIB))
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert max(step["allocated_bytes"] for step in found["steps"]) == found["peak_allocated_bytes"]


def test_tokens_per_s_are_those_of_the_whole_step(command: Command) -> None:
    found = command.json(*dry_run(), "--accum", "3")
    # float64 rounding of one division
    assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(2 * 8 * 3, rel=1e-12)


def test_dry_run_text_says_the_same(command: Command) -> None:
    figures = command.json(*dry_run())
    assert command(*dry_run()) == 0
    used = figures["device_used_bytes"] / MIB
    first, *rest = command.out.splitlines()
    assert first == f"FITS: model.toml with stack vanilla takes {used:.2f} MiB of 64.00 MiB on Tiny card (planned)"
    told = dict(line.split(maxsplit=1) for line in rest)
    assert f"per step of 16 tokens, bottleneck: {figures['bound']} (estimated; 80 % interval: " in told["speed"]
    assert told["peak"].startswith(f"{figures['peak_allocated_bytes'] / MIB:.2f} MiB allocated, ")
    assert told["parameters"] == "25.9k"
    held = {name.replace("_", " ") for name, size in figures["by_class"].items() if size}
    assert all(f"{name} " in command.out for name in held)


def test_a_plan_within_the_margin_fits_barely(command: Command) -> None:
    used = command.json(*dry_run())["device_used_bytes"]
    change("card.toml", "memory_mib = 64", f"memory_mib = {used // MIB}")  # segments and context are whole MiB
    found = command.json(*dry_run())
    assert (found["fits"], found["verdict"], found["device_used_bytes"]) == (True, "fits barely", used)
    assert command(*dry_run()) == 0
    told = f"within the margin of 5 % for other drivers, libraries and a display ({0.05 * used / MIB:.2f} MiB)"
    assert command.out.splitlines()[0].endswith(f"on Tiny card (planned); {told}")
    change("card.toml", f"memory_mib = {used // MIB}", f"memory_mib = {ceil(used / MIB / 0.95)}")
    assert command.json(*dry_run())["verdict"] == "fits"


def test_a_card_without_sources_is_told_in_one_line(command: Command) -> None:
    note = "Tiny card: its file states no source for capacity (64.00 MiB) and CUDA context (1.00 MiB)"
    assert command.json(*dry_run())["card_note"].startswith(note)
    assert command(*dry_run()) == 0
    assert command.out.count(note) == 1
    change("card.toml", "memory_mib = 64", 'memory_mib = 64\nmemory_source = "a log"\ncontext_source = "a log"')
    assert command(*dry_run()) == 0
    assert "no source for" not in command.out


def test_a_model_larger_than_the_card_says_what_is_missing_and_what_would_fit(command: Command) -> None:
    # 6.4M parameters: 16 bytes each are 98 MiB, 6 bytes 37 MiB, workspaces of 16 MiB beside them.
    change("model.toml", "\nwidth = 32", "\nwidth = 512")
    change("model.toml", "ffn_width = 64", "ffn_width = 2048")
    change("card.toml", "memory_mib = 64", "memory_mib = 96")
    assert command(*dry_run()) == 1
    text = command.out
    figures = command.json(*dry_run(), code=1)
    oom = figures["oom"]
    assert figures["fits"] is False
    needs = f"{figures['device_used_bytes'] / MIB:.2f} MiB of 96.00 MiB"
    assert text.startswith(f"DOES NOT FIT: model.toml with stack vanilla needs {needs} and runs out of memory on Tiny")
    assert f", {oom['stage']} {oom['unit']}".strip() in text.splitlines()[0]
    assert f"{oom['requested_bytes'] / MIB:.2f} MiB (a segment of " in text
    assert "of 95.00 MiB\n" in text
    assert f"weight {oom['by_class']['weight'] / MIB:.2f} MiB" in text
    assert re.search(r"^  largest .*/block\.", text, re.MULTILINE)
    assert text.splitlines()[-1] == "stacks that fit by arithmetic, none was run dry (--suggest does that): lean"
    assert figures["fitting_stacks"] == {"names": ["lean"], "evidence": "arithmetic"}
    assert command(*dry_run(), "--suggest") == 1
    assert command.out.splitlines()[-1] == "stacks that fit: lean"
    suggested = command.json(*dry_run(), "--suggest", code=1)["fitting_stacks"]
    assert suggested == {"names": ["lean"], "evidence": "planned"}
    assert sum(oom["by_class"].values()) == oom["allocated_bytes"] <= oom["reserved_bytes"]
    assert oom["reserved_bytes"] <= oom["capacity_bytes"] == 95 * MIB
    assert figures["peak_reserved_bytes"] > oom["capacity_bytes"]


def test_a_model_that_no_stack_fits_says_what_to_lower(command: Command) -> None:
    change("card.toml", "memory_mib = 64", "memory_mib = 12")
    assert command(*dry_run(), "--suggest") == 1
    assert "no stack at hand fits; lower --micro-batch or --seq" in command.out.splitlines()[-1]


def test_what_does_not_fit_is_run_dry_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    change("card.toml", "memory_mib = 64", "memory_mib = 12")
    calls = count(1)
    run = DryRunInputs.dry_run

    def counted(*arguments: Any, **settings: Any) -> DryRun:
        next(calls)
        return run(*arguments, **settings)

    monkeypatch.setattr(DryRunInputs, "dry_run", counted)
    assert command(*dry_run()) == 1
    assert next(calls) == 2


def test_the_host_is_the_one_that_recommend_assumes_and_the_answer_says_so(command: Command) -> None:
    Path("scenarios/stacks/lean.toml").write_text(OFFLOADS)
    arguments = dry_run(stack="lean", card="rtx-4090")
    assert command(*arguments) == 0
    assert "host memory 4.00 GiB of 64 GiB: " in command.out
    assert command(*arguments, "--host-memory", "4.0001GiB") == 1
    assert command.out.startswith("DOES NOT FIT: ")
    assert "the host is too small: memory " in command.out
    found = command.json(*arguments, "--host-memory", "4.0001GiB", code=1)
    assert (found["fits"], found["fits_card"], found["fits_host"], found["oom"]) == (False, True, False, None)
    assert found["fitting_stacks"] == {"names": ["vanilla"], "evidence": "arithmetic"}


def test_a_broken_stack_beside_the_chosen_one_does_not_hide_the_answer(command: Command) -> None:
    change("card.toml", "memory_mib = 64", "memory_mib = 12")
    Path("scenarios/stacks/lean.toml").write_text("name = 3")
    assert command(*dry_run()) == 1
    assert "DOES NOT FIT" in command.out


def test_a_preset_on_a_catalogue_card_needs_no_files(command: Command) -> None:
    shutil.rmtree("scenarios")
    arguments = dry_run("gpt2-small", "conservative", "rtx-4090", seq=16)
    assert command.json(*arguments)["params"] == PRESETS["gpt2-small"].num_params


def test_a_stack_may_be_a_file(command: Command) -> None:
    by_name, by_path = (command.json(*dry_run(stack=stack)) for stack in ("lean", "scenarios/stacks/lean.toml"))
    assert by_name == by_path


def test_expandable_segments_change_the_plan(command: Command) -> None:
    # Large tensors of odd sizes, which classic segments cannot share.
    for old, new in (
        ("vocab_size = 256", "vocab_size = 50257"),
        ("max_seq_len = 16", "max_seq_len = 777"),
        ("\nwidth = 32", "\nwidth = 768"),
    ):
        change("model.toml", old, new)
    arguments = dry_run(card="rtx-4090", seq=777)
    plain, expandable = (command.json(*arguments, *extra) for extra in ([], ["--expandable-segments"]))
    # Classic blocks keep remainders of up to 1 MiB that pages do not.
    assert expandable["peak_allocated_bytes"] <= plain["peak_allocated_bytes"]
    assert expandable["peak_reserved_bytes"] < plain["peak_reserved_bytes"]


def test_snapshot_and_trace_are_written_beside_the_figures(command: Command) -> None:
    arguments = [*dry_run(), "--snapshot", "new/run.pickle", "--trace", "new/run.json"]
    assert command.json(*arguments) == command.json(*dry_run())
    assert Path("new/run.pickle").stat().st_size > 10_000
    assert json.loads(Path("new/run.json").read_text())["traceEvents"]


# --- train ------------------------------------------------------------------------------------------------------


def test_training_logs_every_step_saves_and_samples(command: Command) -> None:
    assert command(*train()) == 0
    log = log_of("run")
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    assert set(log[0]) == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "peak_bytes", "effective_batch"}
    assert Path("run/checkpoints/step-00000004/tensors-00000.safetensors").stat().st_size > 26_000 * 4
    assert "4 steps, loss " in command.out
    assert "run" in command.out.splitlines()[-1]


def test_training_json_is_one_object(command: Command) -> None:
    found = command.json(*train())
    assert set(found) == {"last_step", "corpus", "said", "out", "performance", "optimizations"}
    assert found["last_step"] == log_of("run")[-1]
    assert (found["corpus"], found["out"]) == ("text.txt", "run")
    size, performance, announced, sample = found["said"]
    assert size.startswith("a checkpoint takes ")
    assert announced.startswith("sample of ")
    assert performance.startswith("4 steps: ")
    assert found["performance"]["steps"] == 4
    assert found["optimizations"] == []
    assert sample.startswith("\n")


def test_a_resumed_training_goes_on_to_the_bit(command: Command) -> None:
    assert command(*train("whole")) == 0
    change("train.toml", "num_steps = 4", "num_steps = 2")
    assert command(*train("parts")) == 0
    change("train.toml", "num_steps = 2", "num_steps = 4")
    assert command(*train("parts"), "--resume") == 0
    assert "resumed after step 2" in command.out
    assert losses("parts") == losses("whole")


def test_a_resumed_training_counts_the_memory_it_holds(command: Command) -> None:
    assert command(*train("whole")) == 0
    change("train.toml", "num_steps = 4", "num_steps = 2")
    command(*train("parts"))
    change("train.toml", "num_steps = 2", "num_steps = 4")
    command(*train("parts"), "--resume")
    assert [entry["peak_bytes"] for entry in log_of("parts")] == [entry["peak_bytes"] for entry in log_of("whole")]


def test_a_finished_training_is_not_run_again(command: Command) -> None:
    command(*train())
    content = Path("run/log.jsonl").read_bytes()
    assert command(*train(), "--resume") == 0  # what restarts a killed run must not try for ever
    assert "the run is complete: 4 of 4 steps; raise num_steps to continue" in command.out
    assert Path("run/log.jsonl").read_bytes() == content


def test_a_folder_that_holds_a_run_is_not_overwritten(command: Command) -> None:
    command(*train())
    files = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert command(*train()) == 2
    assert "run: 1 fault\n  contains a saved run; continue it with --resume, or choose another --out" in command.err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == files


def test_resuming_needs_a_saved_state(command: Command) -> None:
    assert command(*train(), "--resume") == 2
    assert "there is no checkpoint to resume from; start without --resume" in command.err


def test_damaged_states_are_named_and_kept(command: Command) -> None:
    command(*train())
    for number in (2, 4):
        state = Path(f"run/checkpoints/step-0000000{number}/tensors-00000.safetensors")
        state.write_bytes(state.read_bytes()[:5000])
    content, log = state.read_bytes(), Path("run/log.jsonl").read_bytes()
    change("train.toml", "num_steps = 4", "num_steps = 6")
    assert command(*train(), "--resume") == 2
    assert "run/checkpoints: 2 faults\n  step-00000004: the checkpoint is damaged (tensors-" in command.err
    assert (state.read_bytes(), Path("run/log.jsonl").read_bytes()) == (content, log)


def test_a_state_of_another_configuration_is_refused(command: Command) -> None:
    command(*train())
    change("train.toml", "lr = 1e-3", "lr = 2e-3")
    assert command(*train(), "--resume") == 2
    assert "optimizer.lr: 0.001 in the checkpoint, 0.002 in this run; resume with the saved value" in command.err


def break_loss(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loss of the given step NaN; a step has one micro-batch."""
    calls = count(1)
    forward: Callable[..., Tensor] = Head.forward

    def poisoned(*arguments: Any, **settings: Any) -> Tensor:
        loss = forward(*arguments, **settings)
        return loss * float("nan") if next(calls) == step else loss

    monkeypatch.setattr(Head, "forward", poisoned)


def test_a_loss_that_is_no_number_ends_the_training_with_what_it_had(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(*train("whole"))
    with monkeypatch.context() as patch:
        break_loss(patch, step=4)
        assert command(*train()) == 1
    assert "hybridtrain: step 4: loss is nan; it must be a finite number. The update was not applied." in command.err
    assert "Traceback" not in command.err
    assert losses("run") == losses("whole")[:3]
    assert command(*train(), "--resume") == 0
    assert "resumed after step 2" in command.out
    assert losses("run")[-2:] == losses("whole")[2:]


def test_a_step_that_is_repeated_after_resuming_is_logged_once(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_loss(patch, step=4)  # steps 1 to 3 are logged, 2 is saved
        command(*train())
    command(*train(), "--resume")
    assert [entry["step"] for entry in log_of("run")] == [1, 2, 3, 4]


def test_a_log_line_that_was_cut_short_does_not_damage_the_next(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_loss(patch, step=4)
        command(*train())
    with Path("run/log.jsonl").open("a") as log:
        log.write('{"grad_norm":1.0,"lo')  # as when the machine stopped while step 4 was logged
    assert command(*train(), "--resume") == 0
    assert [entry["step"] for entry in log_of("run")] == [1, 2, 3, 4]


def test_a_run_that_was_never_saved_does_not_mix_with_the_next(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_loss(patch, step=2)
        command(*train())
    assert not Path("run/checkpoints").exists()
    assert command(*train()) in {0, 2}  # begun anew, or refused
    steps = [entry["step"] for entry in log_of("run")]
    assert steps == sorted(set(steps))


def test_divergence_is_told_as_json(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    break_loss(monkeypatch, step=3)
    found = command.json(*train(), code=1)
    assert found["error"] == "DivergenceError"
    assert found["message"].startswith("step 3: loss is nan")


def test_a_learning_rate_that_is_far_too_high_says_what_to_lower(command: Command) -> None:
    change("train.toml", "lr = 1e-3", "lr = 1e6")
    change("train.toml", "num_steps = 4", "num_steps = 60")
    assert command(*train()) == 1
    assert "Lower optimizer.lr (1000000.0)" in command.err
    assert len(log_of("run")) < 60


def test_a_negative_seed_is_refused(command: Command) -> None:
    change("train.toml", "num_steps = 4", "seed = -1\nnum_steps = 4")
    assert command(*train()) == 2
    assert "seed" in command.err


def tokens(path: str, values: Sequence[int]) -> str:
    write_token_file(Path(path), np.array(values * 50), TokenFormat.RAW_UINT16)
    return path


def test_training_on_a_token_file(command: Command) -> None:
    assert command(*train(data=tokens("text.bin", [1, 2, 3]))) == 0


@pytest.mark.parametrize("vocab_size", [5, 65])
def test_a_vocabulary_without_all_bytes_is_trained_and_told(command: Command, vocab_size: int) -> None:
    # Character-level token files have such vocabularies; the default prompt, a newline, is byte token 198.
    change("train.toml", "vocab_size = 256", f"vocab_size = {vocab_size}")
    code = command(*train(data=tokens("text.bin", [1, 2, 3])))
    assert code == 0 or "sample" in command.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x01\x00\x02", "text.bin has 3 bytes, not a multiple of 2 bytes per uint16 token; it is truncated"),
        (b"", "text.bin"),
        (b"\x01\x00", "text.bin holds 1 tokens; at least 2 are needed"),
        (b"\x01\x00" * 7 + b"\x00\x01" + b"\x01\x00" * 50, "allows 0 to 255, but the token at position 7 is 256"),
        (np.array([20240520, 1, 9000] + [0] * 253, dtype="<i4").tobytes() + b"\x01\x00" * 50, "text.bin"),
    ],
    ids=["odd", "empty", "short", "out-of-range", "header"],
)
def test_a_broken_token_file_is_told(command: Command, content: bytes, words: str) -> None:
    Path("text.bin").write_bytes(content)
    assert command(*train(data="text.bin")) != 0
    assert words in command.err
    assert not Path("run").exists()


@pytest.mark.parametrize("data", ["gone.txt", "gone.bin", "gone/"])
def test_missing_data_is_told(command: Command, data: str) -> None:
    assert command(*train(data=data)) != 0
    assert "gone" in command.err
    assert "does not exist" in command.err


@pytest.mark.parametrize("data", ["gone.txt", "broken.bin"])
def test_unusable_data_is_a_wrong_file(command: Command, data: str) -> None:
    Path("broken.bin").write_bytes(b"\0")
    assert command(*train(data=data)) == 2


# --- records, gate, report --------------------------------------------------------------------------------------


def test_a_half_written_record_counts_as_none_and_is_left_alone(command: Command) -> None:
    path = Path("results/records/mine.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text('{"key": "ab')
    assert command("report") == 0  # its writer may be at work
    assert path.read_text() == '{"key": "ab'


@pytest.mark.parametrize("arguments", [["validate", "mine"], ["report", "mine"], ["report"]])
def test_a_line_that_is_no_record_is_named_and_left_alone(command: Command, arguments: list[str]) -> None:
    path = Path("results/records/mine.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text('{"key": "ab"}\n')
    assert command(*arguments) == 1
    assert "results/records/mine.jsonl:1: not a record of this version" in command.err
    assert path.read_text() == '{"key": "ab"}\n'


def test_a_damaged_record_in_the_middle_is_named(command: Command) -> None:
    path = Path("results/records/mine.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text('{"key": 1}\n\n')
    found = command.json("report", code=1)
    assert found["error"] == "RecordError"
    assert "results/records/mine.jsonl:1: not a record of this version" in found["message"]


def test_validate_prints_tables_and_writes_files(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_runs, "Child", InlineChild)  # the same jobs, without two seconds of torch's import each
    found = command.json("validate", "mine", "--out", "own")
    assert set(found) == {"scenario", "records", "verdicts", "joint", "num_cached", "files"}
    assert (found["scenario"], found["num_cached"], len(found["records"])) == ("mine", 0, 4)
    assert [verdict["status"] for verdict in found["verdicts"]] == ["holds"]
    assert all(Path(file).is_file() for file in found["files"])
    assert command.json("report", "mine", "--results", "own") == {"files": found["files"]}
    assert command("validate", "mine", "--out", "own") == 0
    assert "0 runs made, 4 read from records." in command.out
    assert command("validate", "mine", "--fresh") == 0
    for words in ("A tiny model: 25.9k parameters on Tiny card", "top-1 kept %", "small", "holds", "4 runs made"):
        assert words in command.out
    assert "Written: runs/validate-mine/tables/mine.md" in command.out


def test_a_failed_run_makes_validate_fail(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert command("validate", "mine") == 1
    assert "lean: accuracy ended as error: worker ended with code 1" in command.out
    found = command.json("validate", "mine", code=1)
    assert {(item["kind"], item["outcome"]) for item in found["records"]} == {("dry_run", "ok"), ("accuracy", "error")}


def test_gate_json_is_one_object(command: Command) -> None:
    found = command.json("gate", code=6)
    assert set(found) == {"exit", "compared", "findings", "notes", "written"}
    assert (found["exit"], found["written"]) == ("could_not_measure", [])
    assert command.json("gate", "--accept")["written"] == ["results/records/mine.jsonl"]
    equal = command.json("gate")
    assert (equal["exit"], equal["findings"], equal["written"]) == ("ok", [], [])


@pytest.mark.parametrize("verb", ["gate", "report", "list"])
def test_a_scenario_folder_that_is_not_there_is_a_wrong_argument(command: Command, verb: str) -> None:
    # A gate that compared nothing must not pass.
    assert command(verb, "--scenarios", "nowhere") == 2
    assert "nowhere" in command.err


def test_report_without_records_says_how_to_make_some(command: Command) -> None:
    assert command("report") == 2
    assert "results/records: no such folder; keep records there (hybridtrain validate SCENARIO --record)" in command.err
    assert not Path("results").exists()


# --- list, doctor, the command itself ---------------------------------------------------------------------------


def test_list_shows_every_name_that_may_be_used(command: Command) -> None:
    found = command.json("list")
    assert found["scenarios"] == ["mine"]
    assert found["stacks"] == ["lean", "vanilla"]
    assert found["targets"] == ["small"]
    assert found["models"] == list(PRESETS)
    assert found["cards"] == list(card_catalogue())
    assert "mixed_precision" in found["optimizations"]
    assert command("list") == 0
    lines = [line.strip() for line in command.out.splitlines()]
    assert all(name in lines for names in found.values() for name in names)


def test_the_shell_completes_names(command: Command) -> None:
    assert command("__complete", "dry-run", "--stack", "") == 0
    assert command.out.split()[-2:] == ["lean", "vanilla"]
    assert command("__complete", "dry-run", "--card", "rtx") == 0
    assert set(card_catalogue()) <= set(command.out.split())


def test_list_tells_one_kind_of_names(command: Command) -> None:
    assert command.json("list", "stacks") == {"stacks": ["lean", "vanilla"]}
    (target,) = command.json("list", "targets")["targets"]
    assert (target["target"], target["status"], target["reason"]) == ("small", "unproven", "lean: no dry run of lean.")
    assert command("list", "card") == 2
    assert "cards" in command.err


def test_cards_are_a_table_by_memory_with_each_note_once(command: Command) -> None:
    assert command.json("list", "cards") == {"cards": list(card_catalogue())}
    assert command("list", "cards") == 0
    table, _, notes = command.out.partition("\n\n")
    rows = {row.split()[0]: row.split()[1:] for row in table.splitlines()[2:]}
    assert set(rows) == set(card_catalogue())
    assert rows["rtx-4090"] == ["23.5", "1,008", "165", "2022"]
    assert rows["v100-16gb"] == ["15.8", "900", "no", "2017", "b", "c", "d"]
    sizes = [round(card_catalogue()[name].nvidia_smi_mib / 1024) for name in rows]
    assert sizes == sorted(sizes)
    assert [line[:3] for line in notes.splitlines()[1:]] == ["a: ", "b: ", "c: ", "d: "]
    assert all(notes.count(limit) == 1 for limit in CardLimit)


def test_scenarios_of_another_folder_are_used(command: Command) -> None:
    Path("scenarios").rename("elsewhere")
    assert command.json("list", "--scenarios", "elsewhere")["stacks"] == ["lean", "vanilla"]
    assert command.json(*dry_run(stack="lean"), "--scenarios", "elsewhere")["fits"]
    assert {"conservative", "mixed", "tight", "vanilla"} <= set(command.json("list")["stacks"])


def test_doctor_tells_what_the_machine_can_do(command: Command) -> None:
    found = command.json("doctor")
    assert set(found) == {"environment", "checks"}
    assert {"CUDA card", "bitsandbytes", "8-bit update on the CPU", "Memory", "Scenario files"} <= set(found["checks"])
    assert found["environment"]["torch"] == torch.__version__
    assert command("doctor") == 0
    for name in found["checks"]:
        assert f"{name}: " in command.out
    assert f"torch {torch.__version__}" in command.out


def test_doctor_tells_of_a_compiler_that_fails_and_of_a_cache_that_cannot_be_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: shutil.which("false"))
    for folder, words in (("cache", "cannot build"), ("file/cache", "XDG_CACHE_HOME")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        cpu_build.load_cpu_kernel.cache_clear()
        assert command("doctor") == 1
        told = command.out.partition("8-bit update on the CPU: ")[2]
        assert told.startswith("does not work")
        assert words in told
    cpu_build.load_cpu_kernel.cache_clear()


@pytest.mark.parametrize(
    "absurd",
    [("--micro-batch", "10000000000000"), ("--accum", "1000000000"), ("--seq", "1" + 30 * "0")],
)  # fmt: skip
def test_an_absurd_request_is_refused_with_one_clear_fault(command: Command, absurd: tuple[str, str]) -> None:
    assert command(*dry_run(), *absurd) == 2  # of an option that is given twice the last counts
    assert "at most" in command.err


def test_without_a_verb_it_says_that_one_is_needed(command: Command) -> None:
    assert command() == 2
    assert "VERB" in command.err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_an_interrupted_command_ends_quietly(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    def interrupt(_folder: object) -> ScenarioFiles:
        raise error

    monkeypatch.setattr(scenario_files, "scenario_folder", interrupt)
    assert command("list") == code
    assert "Traceback" not in command.err


@pytest.mark.parametrize("module", ["hybridtrain", "hybridvalidation"])
def test_the_module_is_the_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "dry-run", "--model", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "usage: hybridtrain dry-run" in done.stderr


# --- the last resort --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), "more was asked for"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145728 bytes."), "3.00 MiB"),
        (RuntimeError("can't start new thread"), "more was asked for"),
        (RuntimeError("could not create a primitive"), "more was asked for"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "more was asked for"),
    ],
)
def test_too_little_memory_of_the_host_is_a_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, asked: str
) -> None:
    def full(*_: object) -> list[str]:
        raise error

    limits = {resource.RLIMIT_AS: 5 * 2**30, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr(machine, "known_names", full)
    assert command("list", "models") == 1
    assert "the host's memory is too small for this: " in command.err
    assert asked in command.err
    assert "ulimit -v allows 5.00 GiB; " in command.err


def test_what_onednn_has_no_code_for_is_no_want_of_memory(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> list[str]:
        raise RuntimeError("could not create a primitive descriptor for a matmul primitive")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine, "known_names", broken)
    assert command("list", "models") == 70
    assert "memory is too small" not in command.err


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_stop_that_leaves_an_error_behind_is_a_stop(
    command: Command, monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int
) -> None:
    def broken(*_: object) -> list[str]:
        try:
            raise stop
        finally:
            raise RuntimeError("trying to pop from empty mode stack")  # as torch does where a signal met it

    monkeypatch.setattr(machine, "known_names", broken)
    assert command("list", "models") == code
    assert "at fault" not in command.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_of_ours_is_a_sentence_and_a_report(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, as_json: bool
) -> None:
    def broken(*_: object) -> list[str]:
        raise KeyError("a name that \ud800 is not there")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine, "known_names", broken)
    assert command("list", "models", *(["--json"] if as_json else [])) == 70
    (report,) = tmp_path.glob("hybridtrain-report-*.txt")
    told = json.loads(command.out)["message"] if as_json else command.err
    assert "the program is at fault, not what it was given (KeyError: " in told
    assert str(report) in told
    assert "Traceback" not in command.out + command.err
    assert "Traceback" in report.read_text()
    assert "in broken" in report.read_text()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert command("list", "models") == 70
    assert "no report could be written (No such file or directory)" in command.err


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_that_python_drops_is_asked_for_again(number: signal.Signals, code: int, *, is_slow: bool) -> None:
    program = """
import os, signal, sys, threading, time, weakref
from hybridtrain.cli import machine, main
class Tensor: pass
class SlowTimer(threading.Timer):  # asks before the one who set it goes on
    def start(self):
        threading.Timer = Timer  # once
        super().start()
        time.sleep(0.2)
Timer, threading.Timer = threading.Timer, SlowTimer if sys.argv[2] == "True" else threading.Timer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts with & ignore it
def work(*_):
    def let_go(_):
        os.kill(os.getpid(), int(sys.argv[1]))
    tensor = Tensor()
    watched = weakref.ref(tensor, let_go)
    del tensor
    time.sleep(10)
machine.known_names = work
sys.exit(main.main(["list", "models"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number)), str(is_slow)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert "ignored" not in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_folders_and_children_go(tmp_path: Path) -> None:
    program = """
import sys, tempfile, time
from hybridtrain.cli import machine, main
def work(*_):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("in", flush=True)
        time.sleep(600)
machine.known_names = work
sys.exit(main.main(["list", "models"]))
"""
    place = tmp_path / "place"
    place.mkdir()
    process = subprocess.Popen([sys.executable, "-c", program, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    assert len(list(place.iterdir())) == 1
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert not list(place.iterdir())

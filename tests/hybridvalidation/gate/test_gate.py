import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridkernels.flash_attention import KeptAttention
from hybridtrain.cli.main import main
from hybridtrain.models import build
from hybridtrain.models.block_model import Documents
from hybridtrain.models.decoder import Block
from hybridtrain.models.experts import BalanceLoss
from hybridtrain.planning.figures import MemoryFigures, Timeline
from hybridvalidation.gate import plans
from hybridvalidation.gate.compare import compare, is_equal
from hybridvalidation.gate.gate import GateExit
from tiny_files import scenario_file, shape_file
from tiny_runs import MEMORY, figures

MIB = 2**20
SCENARIO = scenario_file(["plain", "recompute"], shape_file(num_blocks=3), seq_len=16, num_steps=3)
STACKS = {
    "plain": 'name = "plain"\ndescription = "nothing on"\n',
    "recompute": """\
name = "recompute"
description = "every block recomputed"

[[optimizations]]
kind = "gradient_checkpointing"
recompute_every = 1
""",
}
SCENARIO_FILE = Path("scenarios/mine.toml")
RECORDS = Path("results/records/mine.jsonl")
EQUAL = "gate: ok, 2 dry runs of 1 scenarios compared\n"
ACTIVATION_BYTES = 2 * 16 * 32 * 4  # B x T x D of float32: a whole multiple of the allocator's 512 bytes


class ForgetfulBlock(Block):
    """The same block, holding one more activation for its backward pass, as an unfused op would."""

    def forward(
        self, hidden_BTD: Tensor, documents: Documents | None = None, balance: BalanceLoss | None = None, *,
        computes_output: bool = True, kept: KeptAttention | None = None,
    ) -> Tensor:  # fmt: skip
        out_BTD = super().forward(hidden_BTD, documents, balance, computes_output=computes_output, kept=kept)
        return out_BTD + 0 * torch.sigmoid(out_BTD)  # sigmoid saves its result


class FailingBlock(nn.Module):
    def __init__(self, *_arguments: Any) -> None:
        super().__init__()
        raise RuntimeError("no such kernel")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenarios/stacks").mkdir(parents=True)
    SCENARIO_FILE.write_text(SCENARIO)
    for name, text in STACKS.items():
        Path(f"scenarios/stacks/{name}.toml").write_text(text)


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[GateExit, str]]:
    def run(*arguments: str) -> tuple[GateExit, str]:
        code = main(["gate", *arguments])
        return GateExit(code), capsys.readouterr().out

    return run


Gate = Callable[..., tuple[GateExit, str]]
_ACCEPTED: list[bytes] = []


def accept(gate: Gate) -> None:
    """Accept what the files say that every test begins with; the dry runs are made once."""
    if not _ACCEPTED:
        gate("--accept")
        _ACCEPTED.append(RECORDS.read_bytes())
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    RECORDS.write_bytes(_ACCEPTED[0])


def lines_of(out: str, code: GateExit) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(f"{code.name.lower()}: ")]


def block_class(monkeypatch: pytest.MonkeyPatch, block: type[nn.Module]) -> None:
    monkeypatch.setattr(build, "Block", block)


def test_equal_runs_pass(gate: Gate) -> None:
    accept(gate)
    before = RECORDS.read_bytes()
    for names in ((), ("mine",)):
        code, out = gate(*names)
        assert (code, out.splitlines(keepends=True)[-1]) == (GateExit.OK, EQUAL)
    assert RECORDS.read_bytes() == before


def test_one_more_retained_activation_is_a_regression_that_names_class_and_blocks(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(gate)
    before = RECORDS.read_bytes()
    block_class(monkeypatch, ForgetfulBlock)
    code, out = gate("mine")
    assert code is GateExit.REGRESSED
    assert RECORDS.read_bytes() == before
    assert 'if the change is intended, run: hybridtrain gate mine --accept --reason "WHY"' in out
    plain = [line for line in lines_of(out, code) if "mine plain: allocated, step 2" in line]
    assert len(plain) == 1
    assert plain[0].endswith("moved: activation/block.{0..2}: +12,288 B, +4,096 B in each block")
    assert " B, +" in plain[0]
    assert "gate: regressed, 2 dry runs" in out


def test_a_pipeline_is_shown_a_regression(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    _, out = gate("--markdown", "equal.md")
    assert "::error" not in out
    assert Path("equal.md").read_text() == "### Memory gate: ok, 2 dry runs of 1 scenarios compared\n"
    block_class(monkeypatch, ForgetfulBlock)
    code, out = gate("--markdown", "report.md")
    assert code is GateExit.REGRESSED
    assert "::error title=regressed::mine plain: allocated, step 2" in out
    report = Path("report.md").read_text()
    assert re.search(
        r"^\| regressed +\| mine +\| plain +\| allocated, step 2: .*activation/block.\{0..2\}: \+", report, re.MULTILINE
    )
    assert Path("summary.md").read_text() == Path("equal.md").read_text() + report


def test_a_regression_is_measured_to_the_byte(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    block_class(monkeypatch, ForgetfulBlock)
    gate("--accept", "--reason", "a test")
    runs = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    old, new = (run["memory"]["by_unit"] for run in runs if run["stack"] == "plain")
    grown = {name: new[name] - old[name] for name in old}
    blocks = [f"activation/block.{block}" for block in range(3)]
    # Each block holds the sigmoid, and one whose backward pass has not begun its own output beside it.
    assert all(grown[name] >= ACTIVATION_BYTES for name in blocks)
    assert all(grown[name] % ACTIVATION_BYTES == 0 for name in blocks)


def test_an_accepted_change_is_kept_with_its_reason_and_clean_the_next_time(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(gate)
    before = RECORDS.read_bytes()
    block_class(monkeypatch, ForgetfulBlock)
    code, out = gate("--accept", "--reason", "the sigmoid is kept")
    assert code is GateExit.OK
    assert "accepted: regressed: mine plain" in out  # what was accepted is still told
    assert f"written: {RECORDS}\nthen: hybridtrain report" in out
    assert RECORDS.read_bytes().startswith(before), "records are appended, never changed"
    runs = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    assert [run.get("accepted", "") for run in runs] == ["", "", "the sigmoid is kept", "the sigmoid is kept"]
    assert gate()[1].endswith(EQUAL)


def test_kept_figures_are_not_replaced_without_a_reason(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accept(gate)
    before = RECORDS.read_bytes()
    block_class(monkeypatch, ForgetfulBlock)
    assert main(["gate", "--accept"]) == 2
    assert "--reason: missing; give" in capsys.readouterr().err
    assert RECORDS.read_bytes() == before


def test_an_unrecorded_improvement_fails_too(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        block_class(patch, ForgetfulBlock)
        gate("--accept")
    code, out = gate()
    assert code is GateExit.IMPROVED
    assert "improved: mine plain: allocated, step 2" in out
    assert "activation/block.{0..2}: -" in out


def test_a_stack_that_fits_no_longer_is_over_budget(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    text = SCENARIO_FILE.read_text()
    SCENARIO_FILE.write_text(text.replace("memory_mib = 64", "memory_mib = 20"))
    block_class(monkeypatch, ForgetfulBlock)  # over budget outweighs a regression
    code, out = gate()
    assert code is GateExit.OVER_BUDGET
    assert "over_budget: mine plain: no longer fits the card; moved: " in out
    assert "the job has changed: card.memory_mib: 64 -> 20" in out
    assert "regressed: mine plain" in out


def test_a_stack_that_never_fitted_is_compared_all_the_same(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    SCENARIO_FILE.write_text(SCENARIO.replace("memory_mib = 64", "memory_mib = 20"))
    gate("--accept")
    assert gate()[0] is GateExit.OK
    block_class(monkeypatch, ForgetfulBlock)
    assert gate()[0] is GateExit.REGRESSED


def test_without_a_record_nothing_was_compared(gate: Gate) -> None:
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert out.startswith("results/records keeps no plan to compare with.\n")
    assert "the fixture memory_plan (hybridtrain guide gate)" in out
    assert out.splitlines()[-1] == "gate: could_not_measure, nothing compared"
    assert not RECORDS.exists()


def test_a_new_stack_needs_a_record(gate: Gate) -> None:
    accept(gate)
    text = STACKS["recompute"].replace("recompute", "new", 1).replace("= 1", "= 2")
    Path("scenarios/stacks/new.toml").write_text(text)
    SCENARIO_FILE.write_text(SCENARIO.replace('"recompute"]', '"recompute", "new"]'))
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert "mine new: there is no record" in out
    assert "mine plain" not in out


def test_a_stack_that_has_another_name_is_held_to_its_record(gate: Gate) -> None:
    accept(gate)
    Path("scenarios/stacks/recompute.toml").rename("scenarios/stacks/slim.toml")
    text = STACKS["recompute"].replace('name = "recompute"', 'name = "slim"')
    Path("scenarios/stacks/slim.toml").write_text(text)
    SCENARIO_FILE.write_text(SCENARIO.replace('"recompute"]', '"slim"]'))
    assert gate()[1].endswith(EQUAL)


def test_a_stack_that_becomes_like_another_is_held_to_its_own_record(gate: Gate) -> None:
    accept(gate)
    Path("scenarios/stacks/recompute.toml").write_text('name = "recompute"\ndescription = "nothing on any more"\n')
    code, out = gate()
    assert code is GateExit.REGRESSED
    assert "regressed: mine recompute: allocated, step 2" in out
    assert "the job has changed: recompute_every: 1 -> 0" in out


def test_a_stack_that_is_no_longer_run_is_told(gate: Gate) -> None:
    # Its budget would be given up without a word.
    gate("--accept")
    SCENARIO_FILE.write_text(SCENARIO.replace('["plain", "recompute"]', '["plain"]'))
    code, out = gate()
    assert code is not GateExit.OK
    assert "mine recompute: has a record but is no longer part of the scenario" in out
    assert gate("--accept", "--reason", "nobody trains so")[0] is GateExit.OK
    assert [json.loads(line)["stack"] for line in RECORDS.read_text().splitlines()] == ["plain"]


@pytest.mark.parametrize("options", [[], ["--accept", "--reason", "a test"]], ids=["compare", "accept"])
def test_a_run_that_fails_is_not_measured_and_not_accepted(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]
) -> None:
    accept(gate)
    before = RECORDS.read_bytes()
    block_class(monkeypatch, FailingBlock)
    code, out = gate(*options)
    assert code is GateExit.COULD_NOT_MEASURE
    assert "could_not_measure: mine plain: RuntimeError: no such kernel" in out
    assert RECORDS.read_bytes() == before


def test_a_failing_run_outweighs_a_regression(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    lines = RECORDS.read_text().splitlines(keepends=True)
    RECORDS.write_text("".join(line for line in lines if json.loads(line)["stack"] != "recompute"))
    block_class(monkeypatch, ForgetfulBlock)
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert lines_of(out, GateExit.REGRESSED)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "[]\n",
        lambda text: text.replace('"fits"', '"fit"'),
        lambda text: text.replace('"asked"', '"told"'),
    ],
    ids=["list", "key", "field"],
)
def test_a_damaged_record_is_named_and_kept(
    gate: Gate, capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]
) -> None:
    accept(gate)
    RECORDS.write_text(damage(RECORDS.read_text()))
    before = RECORDS.read_bytes()
    assert main(["gate"]) not in {GateExit.OK, GateExit.REGRESSED, GateExit.IMPROVED, GateExit.OVER_BUDGET}
    error = capsys.readouterr().err
    assert f"{RECORDS}:1" in error
    assert "restore the line from version control," in error
    assert RECORDS.read_bytes() == before


def test_what_is_asked_otherwise_with_the_same_figures_is_told(gate: Gate) -> None:
    accept(gate)
    SCENARIO_FILE.write_text(SCENARIO.replace("memory_mib = 64", "memory_mib = 64\nsms = 7"))
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert "mine plain: figures equal the record; the job has changed: card.sms: 0 -> 7" in out


def test_this_very_program_plans_again_only_when_it_is_told(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    accept(gate)
    assert main(["records", "--record"]) == GateExit.OK
    capsys.readouterr()
    assert main(["records"]) == GateExit.OK
    out = capsys.readouterr().out
    assert "2 dry runs of 1 scenarios were verified with this program version" in out
    assert "gate: ok, 0 dry runs of 0 scenarios compared" in out
    assert main(["records", "--verify"]) == GateExit.OK
    assert capsys.readouterr().out.endswith(EQUAL)


@pytest.mark.parametrize("change", ["another program", "another figure", "another torch"])
def test_what_was_verified_holds_for_that_program_and_those_figures(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    accept(gate)
    assert main(["records", "--record"]) == GateExit.OK
    if change == "another program":
        monkeypatch.setattr(plans, "program_digest", lambda: "0123456789abcdef")
    elif change == "another torch":
        monkeypatch.setattr(plans, "torch_series", lambda version=None: "2.12" if version is None else "2.13")
    else:
        text = RECORDS.read_text()
        RECORDS.write_text(re.sub(r'"step_time_s":[0-9.e-]+', '"step_time_s":1.0', text))
    capsys.readouterr()
    code = main(["records"])
    assert "2 dry runs of 1 scenarios compared" in capsys.readouterr().out
    assert (code == GateExit.OK) == (change != "another figure")


def test_equal_questions_are_planned_once(gate: Gate) -> None:
    accept(gate)
    names = [f"more{number}" for number in range(4)]
    for name in names:
        Path(f"scenarios/stacks/{name}.toml").write_text(f'name = "{name}"\ndescription = "nothing on"\n')
    SCENARIO_FILE.write_text(SCENARIO.replace('"recompute"]', f'"recompute", {json.dumps(names)[1:-1]}]'))
    _, out = gate()
    assert "6 dry runs (2 different ones) of 1 scenarios" in out
    assert [line for line in out.splitlines() if ": mine plain" in line or ": mine recompute" in line] == []


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"allocated": (10_001, 20_000)}, [GateExit.REGRESSED] * 2),  # allocated, and active with it
        ({"allocated": (10_000, 19_999)}, [GateExit.IMPROVED] * 2),
        ({"reserved": (100_000, 200_001)}, [GateExit.REGRESSED]),  # a dry run is deterministic: nothing is tolerated
        ({"reserved": (99_999, 200_000)}, [GateExit.IMPROVED]),
        ({"step_time_s": 1.0 + 1e-12}, []),  # the last digits of a sum of times
        ({"step_time_s": 1.000001}, [GateExit.REGRESSED]),
        ({"step_time_s": 0.9}, [GateExit.IMPROVED]),
        ({"host_peak_bytes": 2}, [GateExit.REGRESSED]),
        ({"disk_peak_bytes": 1}, [GateExit.REGRESSED]),
        ({"fits": False}, [GateExit.OVER_BUDGET]),
        ({"flops": 9}, [GateExit.REGRESSED]),  # whatever else a record tells
    ],
)
def test_no_figure_may_change(changes: dict[str, Any], codes: list[GateExit]) -> None:
    found = compare(figures(), figures(**changes))
    assert [code for code, _ in found] == codes
    assert is_equal(figures(), figures(**changes)) == (not codes)


@pytest.mark.parametrize("name", [field.name for field in fields(MemoryFigures)])
def test_whatever_changes_is_a_finding(name: str) -> None:
    old = figures()
    value = getattr(old, name)
    changed: Any = {
        bool: lambda: not value, int: lambda: value + 1, float: lambda: 2 * value, str: lambda: value + "x",
        dict: lambda: {**value, "new": 1}, tuple: lambda: value[:-1], type(None): lambda: MEMORY.oom,
        Timeline: lambda: None,
    }[type(value)]()  # fmt: skip
    new = replace(old, **{name: changed})
    assert not is_equal(old, new)
    assert compare(old, new) != []


def test_a_stack_that_fits_again_is_a_win() -> None:
    assert compare(figures(fits=False), figures()) == [(GateExit.IMPROVED, "now fits the card")]


def test_a_finding_shows_before_after_and_the_difference() -> None:
    found = compare(figures(), figures((10_000, 20_512)))
    words = "allocated, step 2: 19.53 KiB -> 20.03 KiB (+512 B, +2.560 %); moved: weight/head: +512 B"
    assert found[0] == (GateExit.REGRESSED, words)


def test_bytes_that_moved_away_from_the_peak_are_told_by_class() -> None:
    old = figures()
    assert old.timeline is not None
    new = replace(old, timeline=replace(old.timeline, by_class={"weight": (5, 9), "activation": (0, 7)}))
    assert compare(old, new) == [(GateExit.REGRESSED, "changed: timeline; moved: weight: +4 B")]


def test_a_slower_step_is_told_in_seconds() -> None:
    assert compare(figures(), figures(step_time_s=1.25)) == [(GateExit.REGRESSED, "estimated step time: 1 s -> 1.25 s")]


def test_the_largest_changes_are_named_first_and_the_rest_counted() -> None:
    old = {"weight/head": 1_000} | {f"activation/block.{block}": 100 for block in range(20)}
    new = old | {f"activation/block.{block}": 100 + 100 * block for block in range(9)}
    new |= {f"activation/block.{block}": 1_100 for block in range(9, 20)}
    found = compare(figures(by_unit=old), figures((10_000, 23_600), by_unit=new))
    moved = found[0][1].partition("moved: ")[2]
    assert moved.startswith("activation/block.{9..19}: +11,000 B, +1,000 B in each block; activation/block.8: +800 B; ")
    assert moved.endswith("activation/block.4: +400 B; and 3 more: +600 B")


def test_holders_are_told_once_a_step() -> None:
    found = compare(figures(), figures((15_000, 30_000), (150_000, 300_000)))
    told = [(message.partition(":")[0], "moved: " in message) for _, message in found]
    assert told == [
        ("allocated, step 1", True), ("active, step 1", False), ("reserved, step 1", False),
        ("allocated, step 2", True), ("active, step 2", False), ("reserved, step 2", False),
    ]  # fmt: skip

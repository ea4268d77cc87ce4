import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.models import build
from hybridtrain.models.block_model import Documents
from hybridtrain.models.decoder import Block
from hybridvalidation.cli.main import main
from hybridvalidation.gate.gate import GateExit, StackBaseline, compare
from tiny_files import scenario_file, shape_file

MIB = 2**20
SCENARIO = scenario_file(["plain", "recompute"], shape_file(num_blocks=3), seq_len=16, num_steps=3)
STACKS = {
    "plain": 'name = "plain"\nsays = "nothing on"\n',
    "recompute": """\
name = "recompute"
says = "every block recomputed"

[[optimizations]]
kind = "gradient_checkpointing"
recompute_every = 1
""",
}
SCENARIO_FILE = Path("scenarios/mine.toml")
BASELINE = Path("results/baselines/mine.json")
REPLACEMENT = Path("results/baselines/mine.replacement.json")
ACTIVATION_BYTES = 2 * 16 * 32 * 4  # B x T x D of float32: a whole multiple of the allocator's 512 bytes


class ForgetfulBlock(Block):
    """The same block, holding one more activation for its backward pass, as an unfused op would."""

    def forward(
        self, hidden_BTD: Tensor, documents: Documents | None = None, *, computes_output: bool = True
    ) -> Tensor:
        out_BTD = super().forward(hidden_BTD, documents, computes_output=computes_output)
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
        _ACCEPTED.append(BASELINE.read_bytes())
    BASELINE.parent.mkdir(parents=True, exist_ok=True)
    BASELINE.write_bytes(_ACCEPTED[0])


def lines_of(out: str, code: GateExit) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(f"{code.name.lower()}: ")]


def block_class(monkeypatch: pytest.MonkeyPatch, block: type[nn.Module]) -> None:
    monkeypatch.setattr(build, "Block", block)


def test_equal_runs_pass(gate: Gate) -> None:
    accept(gate)
    assert gate() == (GateExit.OK, "gate: ok, 2 dry runs of 1 scenarios compared\n")
    assert not REPLACEMENT.exists()


def test_equal_runs_pass_by_name(gate: Gate) -> None:
    accept(gate)
    assert gate("mine")[0] is GateExit.OK


def test_one_more_retained_activation_is_a_regression_that_names_class_and_blocks(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(gate)
    block_class(monkeypatch, ForgetfulBlock)
    code, out = gate()
    assert code is GateExit.REGRESSED
    plain = [line for line in lines_of(out, code) if "mine plain: allocated, later step" in line]
    assert len(plain) == 1
    for block in range(3):
        assert f"activation/block.{block} +" in plain[0]
    assert " B)" in plain[0]
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
    assert "::error title=regressed::mine plain: allocated, later step" in out
    report = Path("report.md").read_text()
    assert re.search(
        r"^\| regressed +\| mine +\| plain +\| allocated, later step: .*activation/block.0 \+", report, re.MULTILINE
    )
    assert Path("summary.md").read_text() == Path("equal.md").read_text() + report


def test_a_regression_is_measured_to_the_byte(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    block_class(monkeypatch, ForgetfulBlock)
    gate()
    old, new = (json.loads(path.read_text())["stacks"]["plain"] for path in (BASELINE, REPLACEMENT))
    grown = {name: new["by_unit"][name] - old["by_unit"][name] for name in old["by_unit"]}
    blocks = [f"activation/block.{block}" for block in range(3)]
    # Each block holds the sigmoid, and one whose backward pass has not begun its own output beside it.
    assert all(grown[name] >= ACTIVATION_BYTES for name in blocks)
    assert all(grown[name] % ACTIVATION_BYTES == 0 for name in blocks)


def test_a_regression_writes_the_replacement_and_keeps_the_baseline(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(gate)
    before = BASELINE.read_bytes()
    block_class(monkeypatch, ForgetfulBlock)
    _, out = gate()
    assert BASELINE.read_bytes() == before
    assert f"written: {REPLACEMENT}; if the change is meant, run: hybridtrain gate --accept" in out
    REPLACEMENT.rename(BASELINE)
    assert gate()[0] is GateExit.OK


def test_an_accepted_change_is_clean_the_next_time(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    before = BASELINE.read_bytes()
    block_class(monkeypatch, ForgetfulBlock)
    gate()
    code, out = gate("--accept")
    assert code is GateExit.OK
    assert "accepted: regressed: mine plain" in out  # what was accepted is still told
    assert f"written: {BASELINE}" in out
    assert BASELINE.read_bytes() != before
    assert not REPLACEMENT.exists()
    assert gate() == (GateExit.OK, "gate: ok, 2 dry runs of 1 scenarios compared\n")


def test_a_replacement_of_an_undone_regression_does_not_stay(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    with monkeypatch.context() as patch:
        block_class(patch, ForgetfulBlock)
        gate()
    assert gate()[0] is GateExit.OK
    assert not REPLACEMENT.exists()


def test_an_unrecorded_improvement_fails_too(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        block_class(patch, ForgetfulBlock)
        gate("--accept")
    code, out = gate()
    assert code is GateExit.IMPROVED
    assert "improved: mine plain: allocated, later step" in out
    assert "activation/block.1 -" in out
    assert REPLACEMENT.exists()


def test_a_stack_that_fits_no_longer_is_over_budget(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    text = SCENARIO_FILE.read_text()
    SCENARIO_FILE.write_text(text.replace("memory_mib = 64", "memory_mib = 20"))
    block_class(monkeypatch, ForgetfulBlock)  # over budget outweighs a regression
    code, out = gate()
    assert code is GateExit.OVER_BUDGET
    assert "over_budget: mine plain: does not fit the card any more; moved: " in out
    assert "regressed: mine plain" in out


def test_a_stack_that_never_fitted_is_compared_all_the_same(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    SCENARIO_FILE.write_text(SCENARIO.replace("memory_mib = 64", "memory_mib = 20"))
    gate("--accept")
    assert gate()[0] is GateExit.OK
    block_class(monkeypatch, ForgetfulBlock)
    assert gate()[0] is GateExit.REGRESSED


def test_without_a_baseline_nothing_was_compared(gate: Gate) -> None:
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert "could_not_measure: mine plain: there is no baseline to compare with" in out
    assert REPLACEMENT.exists()
    assert not BASELINE.exists()


def test_a_new_stack_needs_a_baseline(gate: Gate) -> None:
    accept(gate)
    Path("scenarios/stacks/new.toml").write_text('name = "new"\nsays = "new"\n')
    SCENARIO_FILE.write_text(SCENARIO.replace('"recompute"]', '"recompute", "new"]'))
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert "mine new: there is no baseline" in out
    assert "mine plain" not in out


def test_a_stack_that_is_no_longer_run_is_told(gate: Gate) -> None:
    # Its budget would be given up without a word.
    gate("--accept")
    SCENARIO_FILE.write_text(SCENARIO.replace('["plain", "recompute"]', '["plain"]'))
    code, out = gate()
    assert code is not GateExit.OK
    assert "recompute" in out


@pytest.mark.parametrize("options", [[], ["--accept"]], ids=["compare", "accept"])
def test_a_run_that_fails_is_not_measured_and_not_accepted(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]
) -> None:
    accept(gate)
    before = BASELINE.read_bytes()
    block_class(monkeypatch, FailingBlock)
    code, out = gate(*options)
    assert code is GateExit.COULD_NOT_MEASURE
    assert "could_not_measure: mine plain: RuntimeError: no such kernel" in out
    assert BASELINE.read_bytes() == before


def test_a_failing_run_outweighs_a_regression(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(gate)
    text = BASELINE.read_text()
    content = json.loads(text)
    del content["stacks"]["recompute"]
    BASELINE.write_text(json.dumps(content))
    block_class(monkeypatch, ForgetfulBlock)
    code, out = gate()
    assert code is GateExit.COULD_NOT_MEASURE
    assert lines_of(out, GateExit.REGRESSED)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[]",
        lambda text: text.replace('"fits"', '"fit"'),
        lambda text: text.replace('"scenario"', '"name"'),
    ],
    ids=["cut", "empty", "list", "key", "field"],
)
def test_a_damaged_baseline_is_named_and_kept(
    gate: Gate, capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]
) -> None:
    accept(gate)
    BASELINE.write_text(damage(BASELINE.read_text()))
    before = BASELINE.read_bytes()
    assert main(["gate"]) not in {GateExit.OK, GateExit.REGRESSED, GateExit.IMPROVED, GateExit.OVER_BUDGET}
    error = capsys.readouterr().err
    assert str(BASELINE) in error
    assert "restore it from version control" in error
    assert BASELINE.read_bytes() == before


@pytest.mark.parametrize("figures", [[], [1], [0, 0]], ids=["none", "one", "zero"])
def test_a_baseline_with_impossible_figures_is_no_traceback(
    gate: Gate, capsys: pytest.CaptureFixture[str], figures: list[int]
) -> None:
    accept(gate)
    content = json.loads(BASELINE.read_text())
    content["stacks"]["plain"]["allocated_bytes"] = figures
    BASELINE.write_text(json.dumps(content))
    assert main(["gate"]) != GateExit.OK
    out, error = capsys.readouterr()
    assert "mine" in out + error


def baseline(**changes: Any) -> StackBaseline:
    plain = StackBaseline(
        fits=True, allocated_bytes=(10_000, 20_000), reserved_bytes=(100_000, 200_000), step_time_s=1.0,
        by_unit={"weight/head": 1_000},
    )  # fmt: skip
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"allocated_bytes": (10_001, 20_000)}, [GateExit.REGRESSED]),  # deterministic: no byte is tolerated
        ({"allocated_bytes": (10_000, 19_999)}, [GateExit.IMPROVED]),
        ({"allocated_bytes": (9_999, 20_001)}, [GateExit.IMPROVED, GateExit.REGRESSED]),
        ({"reserved_bytes": (101_999, 196_001)}, []),  # within 2 %: it depends on the order of allocations
        ({"reserved_bytes": (102_001, 200_000)}, [GateExit.REGRESSED]),
        ({"reserved_bytes": (100_000, 195_999)}, [GateExit.IMPROVED]),
        ({"step_time_s": 1.049}, []),  # within 5 %: it is an estimate
        ({"step_time_s": 0.951}, []),
        ({"step_time_s": 1.051}, [GateExit.REGRESSED]),
        ({"step_time_s": 0.949}, [GateExit.IMPROVED]),
        ({"fits": False}, [GateExit.OVER_BUDGET]),
        ({"by_unit": {"weight/head": 5}}, []),  # who holds the same number of bytes is no finding
    ],
)
def test_each_figure_has_its_tolerance(changes: dict[str, Any], codes: list[GateExit]) -> None:
    findings = compare("mine", "plain", baseline(), baseline(**changes))
    assert [finding.exit for finding in findings] == codes
    assert all((finding.scenario, finding.stack) == ("mine", "plain") for finding in findings)


def test_a_stack_that_fits_again_is_no_fault() -> None:
    assert compare("mine", "plain", baseline(fits=False), baseline()) == []


def test_a_finding_shows_before_after_and_the_difference() -> None:
    (finding,) = compare("mine", "plain", baseline(), baseline(allocated_bytes=(10_000, 20_512)))
    words = "allocated, later step: 19.53 KiB -> 20.03 KiB (+512 B), +2.560 %; nothing moved at the peak"
    assert finding.message == words


def test_a_slower_step_is_told_in_seconds() -> None:
    (finding,) = compare("mine", "plain", baseline(), baseline(step_time_s=1.25))
    assert finding.message == "estimated step time: 1.0000 s -> 1.2500 s, +25.000 %"


def test_the_largest_changes_are_named_first_and_the_rest_counted() -> None:
    grown = {"weight/head": 1_000} | {f"activation/block.{block}": 100 * block for block in range(9)}
    (finding,) = compare("mine", "plain", baseline(), baseline(allocated_bytes=(10_000, 23_600), by_unit=grown))
    moved = finding.message.partition("moved: ")[2]
    assert moved.startswith("activation/block.8 +800 B, activation/block.7 +700 B, ")
    assert moved.endswith("activation/block.3 +300 B and 2 more")


def test_holders_are_told_once_beside_the_step_of_the_peak() -> None:
    grown = baseline(
        allocated_bytes=(15_000, 30_000), reserved_bytes=(150_000, 300_000), by_unit={"weight/head": 11_000}
    )
    findings = compare("mine", "plain", baseline(), grown)
    told = {finding.message.partition(":")[0]: "moved: weight/head" in finding.message for finding in findings}
    assert told == {
        "allocated, first step": False, "allocated, later step": True,
        "reserved, first step": False, "reserved, later step": False,
    }  # fmt: skip


def test_a_baseline_is_readable_text_in_a_stable_order(gate: Gate) -> None:
    accept(gate)
    first = BASELINE.read_bytes()
    gate("--accept")
    assert BASELINE.read_bytes() == first
    assert first.count(b"\n") > 20
    assert list(json.loads(first)["stacks"]) == ["plain", "recompute"]

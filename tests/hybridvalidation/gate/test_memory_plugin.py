"""The pytest plugin in repositories of others: the guide's example, verdicts, files, processes, the action."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from hybridtrain import estimate_memory
from hybridtrain.virtual_gpu.cards.card import MARGIN_TOLD
from hybridvalidation.gate.gate import annotation, markdown_table
from hybridvalidation.gate.holders import fold, unfold
from hybridvalidation.gate.pytest_plugin import COMMENT

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "gate.md").read_text()
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "memory-gate" / "action.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
WIDTH = 512
TEST = """\
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear({width}, {width}), torch.nn.Tanh(), torch.nn.Linear({width}, {width}))

def test_{name}(memory_plan):
    memory_plan(build, torch.empty(8, {width}), {more})
"""
Run = pytest.RunResult


@pytest.fixture(autouse=True)
def _surroundings(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    del pytester  # it clears the variable first
    # Plugins of others take seconds to load, anew in every run here.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:benchmark -p no:cacheprovider")
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)  # this suite may itself run in one


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import here what tests inside import: pytester forgets their modules, and torch's register only once."""
    token_ids = torch.zeros(1, 8, dtype=torch.long)
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    estimate_memory(lambda: LlamaForCausalLM(config), {"input_ids": token_ids, "labels": token_ids}, card="rtx-4090")


def write(pytester: pytest.Pytester, name: str = "step", width: int = WIDTH, more: str = "") -> None:
    (pytester.path / f"test_{name}.py").write_text(TEST.format(name=name, width=width, more=more))


def run(pytester: pytest.Pytester, *arguments: str) -> Run:
    return pytester.runpytest_inprocess("-p", "no:xdist", *arguments)


def plans(pytester: pytest.Pytester) -> dict[str, dict[str, object]]:
    return json.loads((pytester.path / "memory-baseline.json").read_text())["plans"]


def test_the_guides_example_catches_three_percent_and_names_the_module(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, name in re.findall(r"```python\n(# (\S+)\n.*?)```", GUIDE, re.DOTALL):
        (pytester.path / name).write_text(text)
    monkeypatch.syspath_prepend(pytester.path)
    approved = run(pytester, "--memory-approve")
    approved.assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)

    model = pytester.path / "model.py"
    planted = re.search(r"^    up = .*clamp.*$", GUIDE, re.MULTILINE)[0].strip()
    model.write_text(model.read_text().replace("up = self.up_proj(hidden)\n", f"{planted}\n"))
    summary = pytester.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path.parent))
    caught = run(pytester, "--junitxml=junit.xml", "--memory-report=report.md")
    caught.assert_outcomes(failed=1)
    out = caught.stdout.str()
    found = re.search(r"grew, \S+ MiB -> \S+ MiB \(\+4,194,304 B, \+(\S+) %\)", out)  # 4 blocks x 2 x 256 x 1024 x 2 B
    assert float(found[1]) == pytest.approx(3, abs=0.1)  # what else a step holds is the libraries', and moves a little
    said = "activation/model.layers.{0..3}.mlp: +4,194,304 B, +1,048,576 B in each block"
    assert said in GUIDE
    assert said in out

    report = (pytester.path / "report.md").read_text()
    assert report == summary.read_text()
    assert said in report
    assert "| **grew**" in report
    place = f"file={pytester.path.name}/test_memory.py,line=6"
    annotated = rf"^::error title=planned memory%3A grew,{place}::planned memory of .*%0A  {said[:10]}"
    assert re.search(annotated, out, re.MULTILINE)
    entries = ET.parse("junit.xml").iter("property")  # noqa: S314  pytest wrote it just now
    properties = {entry.get("name"): int(entry.get("value", "")) for entry in entries}
    assert properties["memory_peak_bytes"] - properties["memory_baseline_bytes"] == 4 * 2 * 256 * 1024 * 2


def test_a_plan_as_approved_passes_whatever_else_is_asked(pytester: pytest.Pytester) -> None:
    write(pytester)
    assert "new: test_step.py::test_step" in run(pytester, "--memory-approve").stdout.str()
    before = (pytester.path / "memory-baseline.json").read_bytes()
    again = run(pytester, "-m", "memory_plan")
    again.assert_outcomes(passed=1)
    assert "equal: test_step.py::test_step" in again.stdout.str()
    run(pytester, "--memory-approve")
    assert (pytester.path / "memory-baseline.json").read_bytes() == before


def test_a_plan_within_the_margin_fits_barely_and_says_so(pytester: pytest.Pytester) -> None:
    figures = (
        'name = "small"\ncompute_capability = "8.9"\ntflops_bf16 = 10.0\ntflops_fp32 = 5.0\nmemory_gbps = 200.0\n'
        "pcie_gbps = 16.0\ncontext_mib = 400\n"
    )
    card = pytester.path / "card.toml"
    card.write_text(f"{figures}memory_mib = 4096\n")
    write(pytester, more=f"card={str(card)!r}")
    assert MARGIN_TOLD not in run(pytester, "--memory-approve").stdout.str()
    assert "fits_barely" not in plans(pytester)["test_step.py::test_step"]
    build = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    used = estimate_memory(build, torch.empty(8, WIDTH), card=str(card)).run.device_used_bytes
    card.write_text(f"{figures}memory_mib = {used // 2**20}\n")  # segments and context are whole MiB
    tight = run(pytester, "--memory-report=report.md")
    tight.assert_outcomes(passed=1)
    out = tight.stdout.str()
    assert "equal, fits barely: test_step.py::test_step" in out
    assert MARGIN_TOLD in out
    assert MARGIN_TOLD in (pytester.path / "report.md").read_text()
    run(pytester, "--memory-approve")
    assert plans(pytester)["test_step.py::test_step"]["fits_barely"] is True


def test_a_smaller_peak_fails_until_it_is_approved(pytester: pytest.Pytester) -> None:
    write(pytester)
    run(pytester, "--memory-approve")
    write(pytester, more='optimizer="SGD"')  # two moments of 2 (WIDTH^2 + WIDTH) float32 less
    shrunk = run(pytester)
    shrunk.assert_outcomes(failed=1)
    assert f"optim_state/0: -{2 * 4 * (WIDTH**2 + WIDTH):,} B" in shrunk.stdout.str()
    run(pytester, "--memory-approve").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)


def test_a_plan_that_the_card_holds_no_more_fails(pytester: pytest.Pytester) -> None:
    write(pytester, width=8192)  # 16 bytes per parameter: 2 GiB
    run(pytester, "--memory-approve")
    write(pytester, width=32768)
    gone = run(pytester)
    gone.assert_outcomes(failed=1)
    assert ": no longer fits, " in gone.stdout.str()


def test_without_a_baseline_limits_hold_and_nothing_is_said_to_be_equal(pytester: pytest.Pytester) -> None:
    write(pytester)
    alone = run(pytester)
    alone.assert_outcomes(passed=1)
    assert "not compared: test_step.py::test_step" in alone.stdout.str()
    named = run(pytester, "--memory-baseline=other.json")  # one that was asked for and is not there
    named.assert_outcomes(failed=1)
    assert "other.json has no such plan; add it: pytest --memory-approve" in named.stdout.str()
    assert not (pytester.path / "other.json").exists()


def test_a_part_of_the_tests_keeps_the_other_plans_and_a_whole_run_drops_what_is_gone(
    pytester: pytest.Pytester,
) -> None:
    write(pytester, "one")
    write(pytester, "two", more='name="second"')
    run(pytester, "--memory-approve")
    assert sorted(plans(pytester)) == ["second", "test_one.py::test_one"]
    run(pytester, "--memory-approve", "test_one.py")
    assert "second" in plans(pytester)
    (pytester.path / "test_two.py").write_text("import pytest\n@pytest.mark.skip\ndef test_two(memory_plan): pass\n")
    run(pytester, "--memory-approve")
    assert "second" in plans(pytester)  # a skipped test did not say that it plans no more
    (pytester.path / "test_two.py").unlink()
    told = run(pytester)
    told.assert_outcomes(passed=1)
    assert "gone: second: no test plans it any more; pytest --memory-approve removes it" in told.stdout.str()
    run(pytester, "--memory-approve")
    assert sorted(plans(pytester)) == ["test_one.py::test_one"]


def test_a_limit_fails_with_its_holders_and_the_comparison_beside_it(pytester: pytest.Pytester) -> None:
    write(pytester)
    run(pytester, "--memory-approve")
    write(pytester, width=2 * WIDTH, more="")
    file = pytester.path / "test_step.py"
    limited = file.read_text().rstrip().removesuffix(", )") + ').assert_peak_below("1 MiB")\n'
    file.write_text(limited)
    over = run(pytester, "--memory-report=report.md")
    over.assert_outcomes(failed=1)
    out = over.stdout.str()
    assert "the limit is 1.00 MiB. Largest holders: " in out
    assert "test_step.py::test_step': grew, " in out
    assert "| **grew, over its limit** |" in (pytester.path / "report.md").read_text()
    file.write_text(limited.replace("1 MiB", "1 GiB"))
    assert "over its limit" not in run(pytester).stdout.str()


def test_a_bad_card_is_one_sentence_below_the_tests_own_line(pytester: pytest.Pytester) -> None:
    (pytester.path / "bad.toml").write_text('name = "x"\n')
    write(pytester, more='card="bad.toml"')
    told = run(pytester).stdout.str()
    assert "ConfigError: bad.toml: 5 faults" in told
    assert "is missing; a finite number is required" in told
    assert "decode.py" not in told
    assert told.count("test_step.py:7: ") == 1


def test_names_are_unique(pytester: pytest.Pytester) -> None:
    write(pytester, "one", more='name="same"')
    write(pytester, "two", more='name="same"')
    clash = run(pytester, "--memory-approve")
    assert clash.ret == pytest.ExitCode.TESTS_FAILED
    assert "'same' is planned by test_one.py::test_one and by test_two.py::test_two" in clash.stdout.str()
    assert not (pytester.path / "memory-baseline.json").exists()
    (pytester.path / "test_two.py").unlink()
    one = pytester.path / "test_one.py"
    one.write_text(one.read_text() + one.read_text().splitlines()[-1] + "\n")
    assert "plans 'same' twice; give each plan its own name=." in run(pytester).stdout.str()


def test_a_loop_of_ones_own_has_the_same_peak(pytester: pytest.Pytester) -> None:
    write(pytester)
    file = pytester.path / "test_step.py"
    file.write_text(
        file.read_text().replace("    memory_plan(", "    plan = memory_plan(")
        + """\
    from hybridtrain import VirtualGpu
    with VirtualGpu("rtx-4090") as gpu:
        model = build().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            inputs = torch.empty(8, 512).to("cuda")
            loss = model(inputs).float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    mine = memory_plan.of_run(gpu.report(), name="mine")
    assert mine.by_class() == plan.by_class()
    assert sum(mine.by_module().values()) == mine.peak_bytes == plan.peak_bytes
"""
    )
    run(pytester).assert_outcomes(passed=1)


def test_a_damaged_baseline_is_named(pytester: pytest.Pytester) -> None:
    (pytester.path / "memory-baseline.json").write_text('{"plans": ')
    write(pytester)
    refused = run(pytester)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "memory-baseline.json: damaged baseline" in refused.stderr.str()


def test_a_process_of_xdist_compares_and_another_writes(pytester: pytest.Pytester) -> None:
    write(pytester, "one")
    write(pytester, "two")
    run(pytester, "--memory-approve", "test_one.py")
    both = pytester.runpytest_inprocess("-n1", "--memory-report=report.md")
    both.assert_outcomes(passed=1, failed=1)  # the one without a baseline
    report = (pytester.path / "report.md").read_text()
    assert "1 equal, 1 new" in report
    assert sorted(plans(pytester)) == ["test_one.py::test_one"]


def test_the_actions_and_the_hooks_steps_fail_on_a_regression_and_comment_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pytester)
    run(pytester, "--memory-approve")
    write(pytester, width=2 * WIDTH)
    (pytester.path / "test_other.py").write_text("def test_that_is_left_out():\n    raise AssertionError\n")
    defaults = {name: str(entry["default"]) for name, entry in ACTION["inputs"].items()}
    compare, comment = ACTION["runs"]["steps"][1:]
    tools = pytester.path / "tools"
    tools.mkdir()
    gh = tools / "gh"
    gh.write_text('#!/bin/sh\necho "$@" >> calls\n[ "$2" = "--method" ] || cat comments\n')
    gh.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)

    def step(entry: dict[str, dict[str, str]], **known: str) -> subprocess.CompletedProcess[str]:
        given = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: defaults[found[1]], value)
            for name, value in entry["env"].items()
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", str(entry["run"])]
        environment = {**os.environ, **given, **known}
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    compared = step(compare)
    assert compared.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 deselected" in compared.stdout
    assert "grew" in (pytester.path / defaults["report"]).read_text()
    known = {"NUMBER": "7", "REPOSITORY": "me/mine"}
    for comments, asked in (("", "--method POST repos/me/mine/issues/7/comments"),
                            ("41\n42\n", "--method PATCH repos/me/mine/issues/comments/42")):  # fmt: skip
        Path("comments").write_text(comments)
        assert step(comment, **known).returncode == 0
        assert Path("calls").read_text().splitlines()[-1] == f"api {asked} --field body=@memory-report.md"
    (pytester.path / defaults["report"]).write_text('x") or true) | error("run")  # \\"\n')
    assert step(comment, **known).returncode == 0
    (asked,) = {call for call in Path("calls").read_text().splitlines() if "--jq" in call}  # whatever the report says
    assert asked.endswith(f'--jq .[] | select(.body | startswith("{COMMENT}")) | .id')

    entry = next(hook["entry"] for hook in HOOKS if hook["id"] == "memory-gate")
    program = "python -m pytest "
    assert entry.startswith(program)
    run(pytester, *shlex.split(entry.removeprefix(program))).assert_outcomes(failed=1, deselected=1)


def test_the_plugin_leaves_torch_alone_and_hybridtrain_needs_no_pytest() -> None:
    code = (
        "import sys, hybridtrain, hybridtrain.cli.main\n"
        "assert 'pytest' not in sys.modules\n"
        "import hybridvalidation.gate.pytest_plugin\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "held",
    [
        {"grad/layers.0.mlp": 8, "grad/layers.1.mlp": 8, "grad/layers.3.mlp": 8, "grad/layers.4.mlp": 4},
        {"weight/0": 8, "weight/1": 8, "weight/head": 1, "activation/": 3},
        {"weight/layers.9.experts.0.up": 8, "weight/layers.10.experts.0.up": 8, "weight/conv2d": 1},
    ],
)
def test_folded_blocks_unfold(held: dict[str, int]) -> None:
    folded = fold(held)
    assert len(folded) < len(held)
    assert unfold(folded) == held


def test_what_github_reads_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not annotation("grew", title="memory")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert annotation("+3 %\nmore", title="a:b,c") == "::error title=a%3Ab%2Cc::+3 %25%0Amore"
    assert "a\\|b<br>c" in markdown_table(["x"], [["a|b\nc"]])

from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError, PlanConflictError
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import Schedule
from hybridtrain.plan.placement import Placement
from hybridtrain.stacks import RESULTS, default_folder, evidence_folder
from hybridvalidation.judge import metrics
from hybridvalidation.judge.case import RATE_METRICS
from hybridvalidation.scenario import ScenarioTarget
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.protocol import StudyFile, ladders

SHIPPED = ScenarioFiles(Path(__file__).parents[2] / "scenarios")
SCENARIO = """\
name = "mine"
description = "a tiny model"
stacks = ["plain", "lean"]
model = { preset = "gpt2-small" }
card = { name = "rtx-3090" }
workload = { batch_size = 4, seq_len = 16 }

[accuracy]
seeds = [0, 1, 2]
num_steps = 3
batch_size = 4
seq_len = 8
lr = 1e-3
validation_batches = 1

[accuracy.proxy]
family = "gpt2"
vocab_size = 256
max_seq_len = 8
num_blocks = 1
width = 8
num_heads = 1
num_kv_heads = 1
ffn_width = 8

[[targets]]
id = "small"
stacks = ["lean"]
"""
OF_LADDERS = {stated.id for ladder in ladders(SHIPPED.folder) for stated in ladder.targets}
NOT_OF_SCENARIOS = {
    "profiler-overhead", "flash-attention-saving", "flash-attention-cost", "rssm-kernel-speedup",
    "state-encoding-kernel-speedup", "hybrid-speedup", "hybrid-quality",
}  # fmt: skip
"""Of the profiler; of kernels, judged by `bench`; of predictive training, judged by studies."""
PLAIN = 'name = "plain"\ndescription = "nothing on"\n'
LEAN = """\
name = "lean"
description = "in four pieces"

[[optimizations]]
kind = "grad_accumulation"
grad_accum_steps = 4
"""
TARGETS = """\
[[target]]
id = "small"
source = ["000"]
description = "small"
metric = "peak_vram_gib"
direction = "max"
value = 4.0
"""


@pytest.fixture
def files(tmp_path: Path) -> ScenarioFiles:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "mine.toml").write_text(SCENARIO)
    (tmp_path / "stacks" / "plain.toml").write_text(PLAIN)
    (tmp_path / "stacks" / "lean.toml").write_text(LEAN)
    (tmp_path / "targets.toml").write_text(TARGETS)
    return ScenarioFiles(tmp_path)


def change(files: ScenarioFiles, old: str, new: str, name: str = "mine.toml") -> None:
    path = files.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def faults_of(files: ScenarioFiles, name: str = "mine") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        files.scenario(name)
    return caught.value.faults


@pytest.mark.parametrize("name", SHIPPED.scenario_names())
def test_a_shipped_scenario_is_sound(name: str) -> None:
    scenario = SHIPPED.scenario(name)
    assert scenario.name == name
    assert "vanilla" in scenario.stacks or scenario.world > 1, "accuracy and savings are told against it"
    if scenario.accuracy is not None:
        assert scenario.trains("vanilla")
        assert len(scenario.accuracy.seeds) >= 5


@pytest.mark.parametrize("name", SHIPPED.scenario_names())
def test_every_target_of_a_shipped_scenario_can_be_judged(name: str) -> None:
    scenario, targets = SHIPPED.scenario(name), SHIPPED.targets()
    assert scenario.targets or scenario.world > 1, "nobody stated a figure of most of these"
    for item in scenario.targets:
        assert targets[item.id].metric in metrics.METRICS, item.id
        assert set(item.stacks) <= {*scenario.stacks}
        baselines = [item.baseline or "vanilla"]
        if targets[item.id].metric in RATE_METRICS and item.baseline is None:
            baselines = list(scenario.rate_baselines)
        if not targets[item.id].metric.startswith("peak_vram_g"):  # which compares with nothing
            assert set(baselines) <= {*scenario.stacks}
        if targets[item.id].metric.startswith("accuracy_"):
            assert item.id in OF_LADDERS, "nobody would ever know"


@pytest.mark.parametrize("name", SHIPPED.scenario_names())
def test_speeds_are_told_against_bf16_with_as_many_tokens_a_step(name: str) -> None:
    scenario, targets = SHIPPED.scenario(name), SHIPPED.targets()
    for item in scenario.targets:
        if targets[item.id].metric in RATE_METRICS:
            for stack in item.stacks or scenario.stacks:
                baseline = scenario.baseline_of(stack, scenario.rate_baselines)
                assert baseline.startswith("mixed"), "fp32 without tensor cores would make anything look fast"
                assert scenario.workload_of(baseline) == scenario.workload_of(stack)


def test_every_figure_on_memory_is_judged_somewhere() -> None:
    judged = {item.id for name in SHIPPED.scenario_names() for item in SHIPPED.scenario(name).targets}
    assert set(SHIPPED.targets()) - judged - OF_LADDERS == NOT_OF_SCENARIOS
    studied = {
        name for path in (SHIPPED.folder / "studies").glob("*.toml") for name in load_toml(StudyFile, path).targets
    }
    assert studied == {"hybrid-speedup", "hybrid-quality"}


@pytest.mark.parametrize("name", SHIPPED.stack_names())
def test_every_shipped_stack_composes(name: str) -> None:
    stack = SHIPPED.stack(name)
    assert stack.name == name
    assert stack.description
    assert set(stack.plan().phases) == set(Phase)


def test_every_stated_figure_is_there_once() -> None:
    text = (SHIPPED.folder / "targets.toml").read_text()
    assert len(SHIPPED.targets()) == text.count("[[target]]") >= 50


def test_every_named_stack_and_scenario_is_there() -> None:
    named = {"vanilla", "conservative", "balanced", "aggressive", "maximum", "phase2", "report13b"}
    assert named <= set(SHIPPED.stack_names())
    sizes = {
        "gpt2-small",
        "gpt2-medium",
        "gpt2-large-16gb",
        "gpt2-xl-16gb",
        "1b-16gb",
        "7b-24gb",
        "7b-16gb",
        "13b-16gb",
    }
    assert sizes | {"13b-48gb", "50b-24gb", "techniques"} <= set(SHIPPED.scenario_names())


def test_the_working_folders_scenarios_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ScenarioFiles(default_folder()).scenario_names() == SHIPPED.scenario_names()
    (tmp_path / "scenarios" / "stacks").mkdir(parents=True)
    assert default_folder().resolve() == tmp_path / "scenarios"


def test_records_are_read_where_the_project_keeps_them_unless_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "stacks"]) == 0
    of_the_project = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["list", "stacks"]) == 0
    assert capsys.readouterr().out == of_the_project
    assert list((evidence_folder(RESULTS) / "records").glob("*.jsonl"))
    (tmp_path / "results" / "records").mkdir(parents=True)
    assert evidence_folder(RESULTS) == RESULTS
    assert evidence_folder(tmp_path / "none") == tmp_path / "none"


def test_a_folder_of_ones_own_is_read(files: ScenarioFiles) -> None:
    assert files.scenario_names() == ["mine"]
    assert files.stack_names() == ["lean", "plain"]
    scenario = files.scenario("mine")
    assert scenario.targets == (ScenarioTarget(id="small", stacks=("lean",)),)
    assert files.stack("lean").plan().for_phase(Phase.FULL).grad_accum_steps == 4


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", SHIPPED.stack_names())
def test_a_stack_takes_another_number_of_micro_batches_or_says_why_not(name: str, steps: int) -> None:
    stack = SHIPPED.stack(name)
    own = stack.plan().for_phase(Phase.FULL)
    is_fused = own.grad.placement is Placement.DROPPED and own.schedule is Schedule.HORIZONTAL
    if is_fused and steps > 1:
        with pytest.raises(PlanConflictError, match=r"^grad\.placement: fused_update with 4 micro-batches"):
            stack.plan(steps)
        return
    plan = stack.plan(steps)
    assert {plan.for_phase(phase) for phase in Phase} == {
        replace(stack.plan().for_phase(phase), grad_accum_steps=steps) for phase in Phase
    }


def test_a_stack_keeps_its_micro_batches_unless_told() -> None:
    assert SHIPPED.stack("phase2").plan().for_phase(Phase.FULL).grad_accum_steps == 4
    with pytest.raises(PlanConflictError, match="fused_update"):
        SHIPPED.stack("stream-int8-disk").plan(4)


def test_a_scenario_may_be_a_path(files: ScenarioFiles) -> None:
    assert files.scenario(str(files.folder / "mine.toml")) == files.scenario("mine")
    assert files.stack(str(files.folder / "stacks" / "lean.toml")) == files.stack("lean")


def test_unknown_names_suggest_the_nearest(files: ScenarioFiles) -> None:
    assert faults_of(files, "mime") == ("scenario 'mime' is unknown; did you mean 'mine'? Known: mine.",)
    with pytest.raises(ConfigError, match="stack 'leen' is unknown; did you mean 'lean'"):
        files.stack("leen")


def test_unknown_stacks_and_targets_are_told_together(files: ScenarioFiles) -> None:
    change(files, '"lean"]\nmodel', '"leen", "lean", "plane"]\nmodel')
    change(files, 'id = "small"', 'id = "smal"')
    faults = faults_of(files)
    assert [fault.split(":")[0] for fault in faults] == ["$.stacks", "$.stacks", "$.targets[0].id"]
    assert all("did you mean" in fault for fault in faults)


def test_a_batch_must_split_into_micro_batches(files: ScenarioFiles) -> None:
    change(files, "workload = { batch_size = 4", "workload = { batch_size = 6")
    change(files, "num_steps = 3\nbatch_size = 4", "num_steps = 3\nbatch_size = 2")
    assert faults_of(files) == (
        "$.workload.batch_size: 6 must be a multiple of the accumulation steps of stack 'lean' (4)",
        "$.accuracy.batch_size: 2 must be a multiple of the accumulation steps of stack 'lean' (4)",
    )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('["plain", "lean"]', "[]", "$: stacks: empty; name at least one stack"),
        ('["plain", "lean"]', '["lean", "lean"]', "$: stacks: ['lean', 'lean'] names a stack twice"),
        ("seq_len = 16", "seq_len = 1025", "$: workload.seq_len: 1025 is above the model's max_seq_len (1024)"),
        ("batch_size = 4, seq", "batch_size = 0, seq", "$.workload: batch_size: 0 must be at least 1"),
        ("seeds = [0, 1, 2]", "seeds = [0, 1]", "$.accuracy: seeds: [0, 1] must name at least 3 different seeds"),
        ("lr = 1e-3", "lr = 0", "$.accuracy: lr: 0.0 must be above 0"),
        ("seq_len = 8\nlr", "seq_len = 9\nlr", "$.accuracy: seq_len: 9 is above proxy.max_seq_len (8)"),
        ("vocab_size = 256", "vocab_size = 255", "$.accuracy: proxy.vocab_size: 255 must be at least 256"),
        ('family = "gpt2"', 'family = "llama"', "$: accuracy.proxy.family: 'llama' must be the model's family"),
        ('stacks = ["lean"]', 'stacks = ["leen"]', "$: targets[0].stacks: stack 'leen' is unknown"),
        ('["lean"]', '["lean"]\nbaseline = "plein"', "$: targets[0].baseline: stack 'plein' is unknown"),
        ("\nmodel", '\naccuracy_stacks = ["leen"]\nmodel', "$: accuracy_stacks: stack 'leen' is unknown"),
        ('{ preset = "gpt2-small" }', "{}", "$.model: give one of preset"),
        ("rtx-3090", "rtx-3091", "$.card: name: card 'rtx-3091' is unknown; did you mean 'rtx-3090'?"),
    ],
)
def test_a_fault_names_its_path_and_value(files: ScenarioFiles, old: str, new: str, fault: str) -> None:
    change(files, old, new)
    assert any(found.startswith(fault) for found in faults_of(files))


def test_seeds_that_repeat_are_refused(files: ScenarioFiles) -> None:
    # Equal seeds give equal runs, and the interval over them would be too narrow.
    change(files, "seeds = [0, 1, 2]", "seeds = [0, 1, 2, 2, 2, 2]")
    assert "seeds" in faults_of(files)[0]


def test_negative_seeds_are_refused(files: ScenarioFiles) -> None:
    # The sampler takes none; the run would end in a worker's traceback.
    change(files, "seeds = [0, 1, 2]", "seeds = [-1, 0, 1]")
    assert "seeds" in faults_of(files)[0]


@pytest.mark.parametrize("name", ["", "a/b", "../mine"])
def test_a_name_that_is_no_file_name_is_refused(files: ScenarioFiles, name: str) -> None:
    # Records, baselines, tables and plots are files of this name.
    change(files, 'name = "mine"', f'name = "{name}"')
    assert "name" in faults_of(files)[0]


def test_a_target_that_is_stated_twice_is_refused(files: ScenarioFiles) -> None:
    with (files.folder / "targets.toml").open("a") as file:
        file.write(TARGETS.replace("4.0", "5.0"))
    with pytest.raises(ConfigError, match="small"):
        files.targets()


@pytest.mark.parametrize(
    ("direction", "bounds"), [("range", "value = 4.0"), ("range", "low = 1.0"), ("max", "low = 1.0\nhigh = 2.0")]
)
def test_a_target_needs_the_bounds_of_its_direction(files: ScenarioFiles, direction: str, bounds: str) -> None:
    path = files.folder / "targets.toml"
    path.write_text(TARGETS.replace('"max"', f'"{direction}"').replace("value = 4.0", bounds))
    with pytest.raises(ConfigError, match=r"\$\.target\[0\]: range needs low and high"):
        files.targets()


@pytest.mark.parametrize(
    ("direction", "bounds", "told"),
    [
        ("max", "value = 4.0\nlow = 3.0", "give both"),
        ("max", "value = 4.0\nlow = 5.0\nhigh = 4.0", "low below high"),
        ("min", "value = 4.0\nlow = 5.0\nhigh = 6.0", "value 4 must be within its stated range"),
        ("equal", "value = 4.0\nlow = 3.0\nhigh = 6.0", "an equality has no range"),
    ],
)
def test_a_range_that_is_stated_beside_a_bound_must_hold_it(
    files: ScenarioFiles, direction: str, bounds: str, told: str
) -> None:
    path = files.folder / "targets.toml"
    path.write_text(TARGETS.replace('"max"', f'"{direction}"').replace("value = 4.0", bounds))
    with pytest.raises(ConfigError, match=told):
        files.targets()
    path.write_text(TARGETS.replace("value = 4.0", "value = 4.0\nlow = 3.0\nhigh = 4.0"))
    assert files.targets()["small"].low == 3.0


def test_a_stack_whose_parts_disagree_names_its_file(files: ScenarioFiles) -> None:
    path = files.folder / "stacks" / "lean.toml"
    path.write_text(LEAN + '[[optimizations]]\nkind = "grad_accumulation"\nsteps = 2\n')
    with pytest.raises(ConfigError, match="grad_accumulation") as caught:
        files.scenario("mine")
    assert "lean.toml" in str(caught.value)


def without_accuracy(files: ScenarioFiles) -> None:
    text = (files.folder / "mine.toml").read_text()
    begin, end = text.index("[accuracy]"), text.index("[[targets]]")
    (files.folder / "mine.toml").write_text(text[:begin] + text[end:])


def test_a_scenario_may_train_nothing(files: ScenarioFiles) -> None:
    without_accuracy(files)
    scenario = files.scenario("mine")
    assert scenario.accuracy is None
    assert not scenario.trains("plain")


def test_a_list_of_stacks_to_train_needs_an_experiment(files: ScenarioFiles) -> None:
    without_accuracy(files)
    change(files, "\nmodel", '\naccuracy_stacks = ["lean"]\nmodel')
    assert faults_of(files) == ("$: accuracy_stacks: there is no table [accuracy]; add one, or remove the list",)


def test_only_the_stacks_of_the_list_are_trained(files: ScenarioFiles) -> None:
    change(files, "num_steps = 3\nbatch_size = 4", "num_steps = 3\nbatch_size = 2")  # lean needs four
    change(files, "\nmodel", '\naccuracy_stacks = ["plain"]\nmodel')
    scenario = files.scenario("mine")
    assert (scenario.trains("plain"), scenario.trains("lean")) == (True, False)

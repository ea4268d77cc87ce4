import json
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.models.model_config import BatchWorkload
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.optimizations import GradientCheckpointing, PredictMemory, PredictorState
from hybridtrain.plan.compose import Optimization
from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.stacks import Stack
from hybridvalidation.experiments.stack_runs import Job, ScenarioRun, run_job
from hybridvalidation.gate.compare import compare
from hybridvalidation.gate.gate import GateExit
from hybridvalidation.judge.case import Case, Metric
from hybridvalidation.judge.metrics import compute_metric
from hybridvalidation.judge.planned import delta_reduction, predict_gib, predict_reduction
from hybridvalidation.judge.verdict import Status, judge
from hybridvalidation.scenario import CardSpec, Scenario, ScenarioTarget, Target
from tiny_models import GPT2_UNTIED
from tiny_runs import figures

GIB = 2**30
PARAMS = GPT2_UNTIED.num_params
STACKS: dict[str, tuple[Optimization, ...]] = {
    "vanilla": (),
    "stays": (PredictorState(),),
    "leaves": (PredictorState(), PredictMemory(optimizer_state="cpu")),
    "codes": (PredictorState(codec="int8"), PredictMemory(optimizer_state="compress")),
    "recompute": (GradientCheckpointing(recompute_every=1),),
}
CYCLE = ["warmup", "full", "predict", "correct"]
PHASES = """\
name = "phases"
description = "a tiny model"
stacks = ["plain", "cycle"]

[model.shape]
family = "gpt2"
vocab_size = 256
max_seq_len = 16
num_blocks = 2
width = 32
num_heads = 2
num_kv_heads = 2
ffn_width = 64

[card]
name = "rtx-3090"

[workload]
batch_size = 2
seq_len = 16
"""
PLAIN = 'name = "plain"\ndescription = "nothing on"\n'
KEEPS = 'name = "cycle"\ndescription = "keeps an average"\n\n[[optimizations]]\nkind = "predictor_state"\n'
LEAVES = f'{KEEPS}\n[[optimizations]]\nkind = "predict_memory"\noptimizer_state = "cpu"\n'


def target(metric: str, direction: str, value: float) -> Target:
    return Target(id="t", source=("000",), description="-", metric=metric, direction=direction, value=value)  # type: ignore[arg-type]


REDUCTION = target("predict_phase_vram_reduction_pct", "min", 10.0)


@pytest.fixture(scope="module")
def run() -> ScenarioRun:
    """Return dry runs of a tiny model under every stack."""
    card = CardSpec(name="rtx-3090")
    workload = BatchWorkload(batch_size=1, seq_len=8)
    scenario = Scenario(
        name="tiny",
        description="-",
        model=ModelSpec(shape=GPT2_UNTIED),
        card=card,
        workload=workload,
        stacks=tuple(STACKS),
    )
    stacks = {name: Stack(name=name, description="-", optimizations=parts) for name, parts in STACKS.items()}
    records = {
        ("dry_run", name): run_job(
            Job(
                key="k", kind="dry_run", scenario="tiny", stack=stack, model=GPT2_UNTIED, card=card.resolve(),
                workload=workload, host=scenario.host, world=scenario.ranks(), accuracy=None, asked={},
            )
        )
        for name, stack in stacks.items()
    }  # fmt: skip
    return ScenarioRun(scenario=scenario, stacks=stacks, records=records, num_cached=0)


def memory(run: ScenarioRun, stack: str) -> MemoryFigures:
    record = run.get("dry_run", stack)
    assert record is not None
    assert record.memory is not None
    return record.memory


def metric(run: ScenarioRun, stack: str, wanted: Target = REDUCTION) -> Metric | None:
    return compute_metric(Case(run=run, target=wanted, stack=stack))


def judged(run: ScenarioRun, wanted: Target, stack: str) -> Status:
    return judge(run, wanted, stack, ScenarioTarget(id=wanted.id)).status


def peak(run: ScenarioRun, stack: str, phase: str) -> int:
    return next(step.allocated_bytes for step in memory(run, stack).steps if step.phase == phase)


@pytest.mark.parametrize("stack", ["stays", "leaves", "codes"])
def test_a_plan_with_one_history_tensor_runs_a_cycle(run: ScenarioRun, stack: str) -> None:
    assert [step.phase for step in memory(run, stack).steps] == CYCLE


@pytest.mark.parametrize("stack", ["vanilla", "recompute"])
def test_other_plans_run_ordinary_steps_and_have_no_figure_of_a_phase(run: ScenarioRun, stack: str) -> None:
    assert [step.phase for step in memory(run, stack).steps] == ["full", "full"]
    assert predict_reduction(Case(run=run, target=REDUCTION, stack=stack)) is None
    assert predict_gib(Case(run=run, target=REDUCTION, stack=stack)) is None
    assert judged(run, REDUCTION, stack) is Status.UNPROVEN


@pytest.mark.parametrize("stack", ["stays", "leaves", "codes"])
def test_the_reduction_is_of_predict_against_the_baselines_peak(run: ScenarioRun, stack: str) -> None:
    found = metric(run, stack)
    baseline = max(step.allocated_bytes for step in memory(run, "vanilla").steps)
    assert found is not None
    assert found.value == pytest.approx(100 * (1 - peak(run, stack, "predict") / baseline))
    cycle = max(step.allocated_bytes for step in memory(run, stack).steps)
    assert f"{cycle / GIB:.2f} GiB in the whole cycle" in found.remark
    assert found.decider is not None
    assert found.decider.value == pytest.approx(100 * (1 - cycle / baseline))
    assert cycle > peak(run, stack, "predict"), "the figure of the phase says nothing on the cycle"


def test_state_that_waits_elsewhere_makes_room_in_predict(run: ScenarioRun) -> None:
    stays, leaves = metric(run, "stays"), metric(run, "leaves")
    assert stays is not None
    assert leaves is not None
    assert stays.value < leaves.value
    value = (stays.value + leaves.value) / 2
    wanted = target("predict_phase_vram_reduction_pct", "min", value)
    assert judged(run, wanted, "stays") is Status.REFUTED
    assert judged(run, wanted, "leaves") is Status.MISLEADING  # of one phase: the whole cycle peaks as before
    assert peak(run, "leaves", "full") > peak(run, "leaves", "predict")


def test_the_model_memory_of_predict_is_its_whole_peak(run: ScenarioRun) -> None:
    found = metric(run, "stays", target("predict_phase_model_vram_gib", "max", 1.0))
    assert found is not None
    assert found.value * GIB == peak(run, "stays", "predict")
    assert judged(run, target("predict_phase_model_vram_gib", "max", 1.0), "stays") is Status.HOLDS
    assert judged(run, target("predict_phase_model_vram_gib", "max", 1e-6), "stays") is Status.REFUTED


@pytest.mark.parametrize(("stack", "bytes_per_param"), [("stays", 4.0), ("leaves", 4.0), ("codes", 1 + 4 / 256)])
def test_an_accumulator_is_compared_with_fifty_deltas(run: ScenarioRun, stack: str, bytes_per_param: float) -> None:
    wanted = target("delta_bytes_reduction_pct", "min", 90.0)
    found = metric(run, stack, wanted)
    assert found is not None
    assert found.value == pytest.approx(100 * (1 - int(PARAMS * bytes_per_param) / (50 * 4 * PARAMS)))
    assert (judged(run, wanted, stack) is Status.HOLDS) == (found.value >= 90)


def test_a_stack_without_an_accumulator_saves_nothing(run: ScenarioRun) -> None:
    assert delta_reduction(Case(run=run, target=REDUCTION, stack="vanilla")) is None


FOUR = figures((100, 200, 300, 400), (1000, 2000, 3000, 4000), CYCLE)
TWO = figures((100, 400), (1000, 4000))


@pytest.mark.parametrize(("place", "phase"), list(enumerate(CYCLE)))
def test_the_phase_that_regressed_is_named(place: int, phase: str) -> None:
    sizes = [100, 200, 300, 400]
    sizes[place] += 1
    grown = figures(sizes, (1000, 2000, 3000, 4000), CYCLE)
    found = compare(FOUR, grown)
    assert {code for code, _ in found} == {GateExit.REGRESSED}
    assert found[0][1].startswith(f"allocated, {phase}: ")
    assert "weight" in found[0][1]
    assert {code for code, _ in compare(grown, FOUR)} == {GateExit.IMPROVED}


def test_a_phase_may_regress_while_another_improves() -> None:
    found = compare(FOUR, figures((100, 200, 300, 400), (1000, 1500, 3500, 4000), CYCLE))
    assert [(code, message.split(":")[0]) for code, message in found] == [
        (GateExit.IMPROVED, "reserved, full"), (GateExit.REGRESSED, "reserved, predict"),
    ]  # fmt: skip


def test_a_cycle_that_comes_or_goes_is_told_with_the_largest_step() -> None:
    larger = figures((100, 200, 300, 401), (1000, 2000, 3000, 4000), CYCLE)
    ((code, message),) = compare(TWO, larger)
    assert code is GateExit.REGRESSED
    assert message == (
        "number of steps: 2 -> 4, peak allocated 400 B -> 401 B (+1 B, +0.250 %); moved: weight/head: +1 B"
    )


def test_the_gate_keeps_and_compares_the_phases_of_a_real_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stacks = Path("scenarios/stacks")
    stacks.mkdir(parents=True)
    Path("scenarios/phases.toml").write_text(PHASES)
    Path("scenarios/targets.toml").write_text("target = []\n")
    (stacks / "plain.toml").write_text(PLAIN)
    (stacks / "cycle.toml").write_text(LEAVES)
    assert main(["gate", "--accept"]) == GateExit.OK
    records = [json.loads(line) for line in Path("results/records/phases.jsonl").read_text().splitlines()]
    assert {run["stack"]: len(run["memory"]["steps"]) for run in records} == {"plain": 2, "cycle": 4}
    assert main(["gate"]) == GateExit.OK
    capsys.readouterr()
    (stacks / "cycle.toml").write_text(KEEPS)  # moments stay on the card in PREDICT
    assert main(["gate"]) == GateExit.REGRESSED
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("regressed: phases cycle: alloc")]
    assert len(lines) == 1
    assert lines[0].startswith("regressed: phases cycle: allocated, predict: ")
    (stacks / "cycle.toml").write_text(PLAIN.replace("plain", "cycle"))  # the cycle is gone
    assert main(["gate"]) == GateExit.IMPROVED
    assert "phases cycle: number of steps: 4 -> 2, peak allocated " in capsys.readouterr().out

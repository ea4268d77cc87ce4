from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.optimizations.grad_accumulation import with_accumulation
from hybridtrain.plan.compose import Optimization
from hybridvalidation.records.store import read_lines
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study import trials
from hybridvalidation.study.protocol import LadderFile, LadderRecord, check_targets, ladders, run_key
from hybridvalidation.study.runner import configurations_of_stacks
from tiny_ladders import ARMS, RUNG, ladder_of

FILES = ScenarioFiles(Path(__file__).parents[3] / "scenarios")
LADDERS = ladders(FILES.folder)


@pytest.fixture(scope="module", params=LADDERS, ids=lambda ladder: ladder.name)
def shipped(request: pytest.FixtureRequest) -> LadderFile:
    found: LadderFile = request.param
    return found


def test_a_shipped_ladder_is_sound(shipped: LadderFile) -> None:
    check_targets(shipped, FILES.targets())
    assert all(rung.tokens_per_param > 19.5 for rung in shipped.rungs)
    assert any(arm.family == "control" for arm in shipped.arms)


def test_every_stack_is_on_a_ladder() -> None:
    assert {stack for one in LADDERS for arm in one.arms for stack in arm.stacks} == set(FILES.stack_names())


def test_records_of_a_shipped_ladder_keep_their_keys(shipped: LadderFile) -> None:
    path = FILES.folder.parent / f"results/records/studies/{shipped.name}.jsonl"
    records = read_lines(path, LadderRecord)
    assert records or not shipped.closed, path
    assert all(record.key == run_key(shipped, record.run) for record in records)


def fewer(optimizations: Sequence[Optimization]) -> tuple[Optimization, ...]:
    """Return a stack with an eighth of 16 or 32 micro-batches: what each of them computes is the same."""
    steps = next(
        (int(getattr(item, "grad_accum_steps", 1)) for item in optimizations if item.kind == "grad_accumulation"), 1
    )
    return with_accumulation(optimizations, steps // 8) if steps >= 16 else tuple(optimizations)


@pytest.mark.parametrize(
    "shipped", [one for one in LADDERS if any(arm.stacks for arm in one.arms)], ids=lambda one: one.name
)
def test_every_stack_computes_what_its_arm_does(shipped: LadderFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_PROBE_STEPS", 4), ("_PROBE_WARMUP", 1)):  # one cycle of phases
        monkeypatch.setattr(trials, name, value)
    # Four tokens a row: a matrix of the model must have 4096 elements, or its state would not be 8-bit codes.
    arms = tuple(replace(arm, optimizations=fewer(arm.optimizations)) for arm in shipped.arms)
    tiny = replace(shipped, rungs=(replace(shipped.rungs[0], seq_len=4),), arms=arms)
    stacks = [FILES.stack(name) for name in FILES.stack_names()]
    stacks = [replace(stack, optimizations=fewer(stack.optimizations)) for stack in stacks]
    found = configurations_of_stacks(tiny, stacks)
    # A loss in slices of 1024 tokens is one in slices of 2048 at so few tokens: arms then share their bits too.
    for stack, arm in found.items():
        own = shipped.configuration_of(stack)
        assert own is not None
        assert arm == own.name or configurations_of_stacks(
            replace(tiny, arms=(tiny.configuration(own.name),)), [one for one in stacks if one.name == stack]
        ) == {stack: own.name}, f"{stack} is said to compute what {own.name} does; it computes what {arm} does"


def faults_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        ladder_of(**changes)
    return [fault.removeprefix("$: ") for fault in error.value.faults]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"rungs": [RUNG | {"seeds": [0, 1]}]}, "seeds, more_seeds: [0, 1] must be at least 3 seeds"),
        ({"rungs": [RUNG | {"more_seeds": [2]}]}, "seeds, more_seeds: [0, 1, 2, 2] must be at least 3 seeds"),
        ({"tuning_seed": 1}, "rungs: 'small' must not include the tuning seed (1)"),
        ({"rungs": [RUNG | {"warmup_steps": 12}]}, "warmup_steps: 12 must be below num_steps (12)"),
        ({"rungs": [RUNG | {"arms": ["nobody"]}]}, "rungs: 'small': "),
        ({"arms": [*ARMS, ARMS[1]]}, "arms: 'mixed' appears twice"),
        ({"arms": [*ARMS, ARMS[1] | {"name": "more"}]}, "arms: stack 'mixed' is in two"),
        ({"arms": [ARMS[0], ARMS[1] | {"against": "nobody"}]}, "arms: 'mixed' is compared with 'nobody'"),
        ({"arms": [ARMS[0], ARMS[1] | {"rounds_to_nearest": True}]}, "rounds_to_nearest: needs bfloat16"),
        ({"arms": [ARMS[4], ARMS[0]]}, "arms: the first, 'tuned', is the baseline"),
        ({"fine_tune_steps": 0}, "fine_tune_steps: 0 must be at least 1"),
        ({"arms": [ARMS[0], ARMS[4] | {"lrs": []}]}, "arms: 'tuned' has no reference and no learning rates;"),
        ({"rungs": [RUNG | {"batch_size": 3}], "arms": [ARMS[0], {
            "name": "four", "description": "-", "optimizations": [{"kind": "grad_accumulation"}],
        }]}, "rungs: 'small': batch_size 3 must be a multiple of 4 micro-batches ('four')"),
        ({"targets": [{"id": "speed", "stacks": ["tight"]}]}, "targets: "),
    ],
)  # fmt: skip
def test_a_ladder_that_could_judge_nothing_is_refused(changes: dict[str, Any], start: str) -> None:
    assert any(start in fault for fault in faults_of(**changes)), faults_of(**changes)


def test_a_target_about_something_else_is_refused() -> None:
    ladder = ladder_of(targets=[{"id": "nothing", "stacks": ["mixed"]}, {"id": "7b-24gb-vram", "stacks": ["mixed"]}])
    with pytest.raises(ConfigError) as error:
        check_targets(ladder, FILES.targets())
    assert [fault.split(";")[0] for fault in error.value.faults][
        1
    ] == "$.targets: '7b-24gb-vram' is about peak_vram_gib"

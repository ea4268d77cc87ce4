"""CORRECT after so many predicted steps: a longer jump goes on after it."""

import math
from typing import Any

import pytest

from hybrid_runs import (
    HybridHistory,
    assert_same_cycles,
    everything,
    fresh_hybrid,
    hybrid_config,
    hybrid_history,
    remembers,
    run_steps,
)
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.controller import PhaseController
from hybridtrain.hybrid.divergence import DivergenceLevel
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.optimizations import OptimizerOffload, PredictMemory
from hybridtrain.phase import Phase
from tiny_models import GPT2_TIED_DROPOUT
from training_history import assert_all_bitwise

WARMUP, FULL, PREDICT, CORRECT = Phase
LONG: dict[str, Any] = {
    "full_steps": 3, "slow": SlowMomentum(beta=0.9, alpha=10.0), "max_move": math.inf, "max_relative_move": math.inf,
}  # fmt: skip
"""Jumps of 3 * 10 * step / 20 predicted steps: 6 after step 4."""


def history(interval: float | None, **changes: Any) -> HybridHistory:
    config = hybrid_config(**LONG | changes, correction_interval=interval)
    return hybrid_history(GPT2_TIED_DROPOUT, [remembers()], config, num_steps=8)


@pytest.mark.parametrize("correct_steps", [1, 2])
def test_a_long_jump_is_made_in_parts_with_true_steps_between(correct_steps: int) -> None:
    parts = history(2.5, correct_steps=correct_steps, fuse=False)
    assert parts.phases[:5] == [WARMUP, FULL, FULL, FULL, PREDICT]
    again = [*[CORRECT] * correct_steps, PREDICT]
    assert parts.phases[5 : 5 + 2 * len(again)] == again * 2
    assert [steps for _, steps in parts.jumps[:3]] == pytest.approx([2.5, 2.5, 1.0])
    whole = history(None, correct_steps=correct_steps, fuse=False)
    assert whole.jumps[0] == (4, pytest.approx(6.0))


def test_full_steps_are_counted_from_the_end_of_the_jump() -> None:
    config = hybrid_config(**LONG, correction_interval=4.0, fuse=False)
    results = run_steps(fresh_hybrid(GPT2_TIED_DROPOUT, [remembers()], config), 8)
    phases = [result.phase for result in results][4:]
    assert phases[:6] == [PREDICT, CORRECT, PREDICT, CORRECT, FULL, FULL]
    assert phases[6] is PREDICT


def test_an_interval_that_no_jump_reaches_changes_nothing() -> None:
    assert_same_cycles(history(1000.0), history(None))
    assert len(history(None).jumps) == 2


def test_parts_are_the_same_within_an_update_and_on_their_own() -> None:
    found = []
    for fuse in (False, True):
        hybrid = fresh_hybrid(
            GPT2_TIED_DROPOUT, [remembers()], hybrid_config(**LONG, correction_interval=2.0, fuse=fuse)
        )
        results = run_steps(hybrid, 9)
        assert sum(result.is_predicted for result in results) > 3
        assert any(result.phase is PREDICT for result in results) is not fuse
        found.append((*everything(hybrid.trainer), [result.move_rms for result in results if result.is_predicted]))
    assert_all_bitwise(found[0][0], found[1][0], "weight ")
    assert_all_bitwise(found[0][1], found[1][1], "state ")
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("memory", [PredictMemory(), PredictMemory(optimizer_state="drop")], ids=["cpu", "drop"])
def test_parts_are_the_same_wherever_state_is(memory: PredictMemory) -> None:
    config = hybrid_config(**LONG, correction_interval=2.0)
    runs = [
        hybrid_history(GPT2_TIED_DROPOUT, [*place, memory, remembers()], config, num_steps=8)
        for place in ([], [OptimizerOffload()])
    ]
    assert len(runs[0].jumps) > 2
    assert_same_cycles(*runs)


def in_the_middle_of_a_jump() -> PhaseController:
    controller = PhaseController(HybridConfig(full_steps=2, correction_interval=1.0), 0)
    for step in (1, 2):
        controller.count_step(step)
    controller.update(2, DivergenceLevel.NORMAL)
    assert controller.phase is PREDICT
    controller.count_jump(predict_left=3.0)
    controller.update(2, DivergenceLevel.NORMAL)
    controller.count_step(3)
    return controller


def test_an_alarm_ends_a_jump_for_good() -> None:
    controller = in_the_middle_of_a_jump()
    controller.update(3, DivergenceLevel.NORMAL)
    assert controller.phase is PREDICT
    for level in (DivergenceLevel.WARNING, DivergenceLevel.NORMAL):
        controller.update(3, level)
        assert controller.phase is FULL


def test_a_part_that_is_taken_back_is_the_last_one() -> None:
    controller = in_the_middle_of_a_jump()
    controller.note_rollback(3)
    controller.update(3, DivergenceLevel.NORMAL)
    assert controller.phase is FULL


def test_a_state_of_before_there_was_an_interval_is_resumed() -> None:
    state = in_the_middle_of_a_jump().state_dict()
    assert state["state"]["predict_left"] == 3.0  # type: ignore[index]
    plain = PhaseController(HybridConfig(), 0).state_dict()
    assert "predict_left" not in plain["state"]  # type: ignore[operator]
    other = in_the_middle_of_a_jump()
    other.load_state_dict(plain)
    assert other.state.predict_left == 0.0

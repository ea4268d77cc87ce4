"""The controller alone: which phase comes next, and how bold jumps are, after good and bad blocks and probes."""

import math

import pytest

from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.controller import PhaseController
from hybridtrain.hybrid.divergence import DivergenceLevel
from hybridtrain.phase import Phase

NORMAL, WARNING = DivergenceLevel.NORMAL, DivergenceLevel.WARNING


def run(controller: PhaseController, num_calls: int, *, start: int = 0, level: DivergenceLevel = NORMAL) -> list[str]:
    """Return the phases of so many calls."""
    phases, step = [], start
    for _ in range(num_calls):
        phases.append(controller.phase.value)
        if controller.phase is Phase.PREDICT:
            controller.count_jump()
        else:
            step += 1
            controller.count_step(step)
        controller.update(step, level)
    return phases


@pytest.mark.parametrize("correct_steps", [1, 2, 3])
def test_a_cycle_has_its_phases_in_order(correct_steps: int) -> None:
    phases = run(PhaseController(HybridConfig(full_steps=3, correct_steps=correct_steps), 2), 13)
    block = ["correct"] * correct_steps + ["full"] * (3 - correct_steps)
    assert phases == ["warmup"] * 2 + ["full"] * 3 + (["predict", *block] * 2)


def test_a_cycle_of_single_steps_without_warmup() -> None:
    controller = PhaseController(HybridConfig(full_steps=1), 0)
    assert controller.jumps_after(1, NORMAL)
    assert run(controller, 5) == ["full", "predict", "correct", "predict", "correct"]


def test_no_jump_while_the_level_warns_and_one_as_soon_as_it_does_not() -> None:
    controller = PhaseController(HybridConfig(full_steps=2), 0)
    assert "predict" not in run(controller, 8, level=WARNING)
    controller.update(8, NORMAL)
    assert controller.phase is Phase.PREDICT


@pytest.mark.parametrize("full_steps", [1, 2, 3, 10])
def test_bad_blocks_halve_and_stretch_and_good_ones_bring_both_back(full_steps: int) -> None:
    controller = PhaseController(HybridConfig(full_steps=full_steps), 0)
    controller.judge_round(2.0, 1.0)
    assert (controller.state.scale, controller.state.full_steps) == (1.0, full_steps)  # it may be chance
    controller.judge_round(2.0, 1.0)
    assert (controller.state.scale, controller.state.full_steps) == (0.5, 2 * full_steps)
    for _ in range(9):
        controller.judge_round(2.0, 1.0)
    assert (controller.state.scale, controller.state.full_steps) == (1 / 16, 4 * full_steps)
    for _ in range(20):
        controller.judge_round(1.0, 1.0)
    assert (controller.state.scale, controller.state.full_steps) == (1.0, full_steps)


def test_bad_blocks_that_are_not_in_a_row_change_nothing() -> None:
    controller = PhaseController(HybridConfig(adapt_lr=True), 0)
    for _ in range(6):
        controller.judge_round(2.0, 1.0)
        controller.judge_round(1.0, 1.0)
    assert (controller.state.scale, controller.state.full_steps, controller.state.lr_factor) == (1.0, 10, 1.0)


def test_surprises_lower_the_learning_rate_where_that_is_wanted() -> None:
    controller = PhaseController(HybridConfig(adapt_lr=True), 0)
    for _ in range(2):
        controller.judge_round(2.0, 1.0)
    assert controller.state.lr_factor == 0.8
    for _ in range(10):
        controller.judge_round(2.0, 1.0)
    assert controller.state.lr_factor == 0.5
    for _ in range(30):
        controller.judge_round(1.0, 1.0)
    assert controller.state.lr_factor == 1.0


def test_too_many_bad_blocks_stop_jumps_until_enough_are_good() -> None:
    controller = PhaseController(HybridConfig(full_steps=2, adapt=False), 0)
    for _ in range(4):
        controller.judge_round(2.0, 1.0)
    assert controller.state.confidence < 0.5
    assert "predict" not in run(controller, 6)
    assert not controller.jumps_after(7, NORMAL)
    controller.judge_round(1.0, 1.0)
    assert controller.state.confidence > 0.5
    assert controller.jumps_after(7, NORMAL)
    controller.update(6, NORMAL)
    assert controller.phase is Phase.PREDICT


@pytest.mark.parametrize("adapt", [False, True])
def test_a_rollback_halves_the_strength_for_a_while(*, adapt: bool) -> None:
    controller = PhaseController(HybridConfig(full_steps=5, adapt=adapt), 0)
    controller.count_jump()
    controller.note_rollback(100)
    assert controller.state.correct_left == 0
    assert controller.scale_at(101) == controller.scale_at(299) == 0.5
    for _ in range(9):
        controller.judge_round(1.0, 1.0)
    assert controller.scale_at(299) == 0.5
    for step in range(101, 300):
        controller.count_step(step)
        assert controller.scale_at(step) == 0.5
    controller.count_step(300)
    assert controller.scale_at(300) == 1.0


def test_rollbacks_one_after_the_other_go_down_to_a_sixteenth() -> None:
    controller = PhaseController(HybridConfig(), 0)
    for step in range(10):
        controller.note_rollback(step)
    assert controller.scale_at(11) == 1 / 16


def test_a_probe_is_judged_by_a_share_of_the_loss_until_there_is_a_past() -> None:
    controller = PhaseController(HybridConfig(), 0)
    assert not controller.judge_probe(4.0, 4.19)
    assert controller.judge_probe(4.0, 4.21)
    assert controller.judge_probe(4.0, math.nan)
    assert controller.judge_probe(4.0, math.inf)
    assert not controller.judge_probe(math.nan, math.nan)  # a dry run knows no losses


def test_a_probe_far_beyond_the_past_is_harm_and_a_fall_never_is() -> None:
    controller = PhaseController(HybridConfig(), 0)
    for rise in (0.01, 0.012, 0.008, 0.011, 0.009, 0.01, 0.012, 0.008):
        assert not controller.judge_probe(4.0, 4.0 + rise)
    assert controller.judge_probe(4.0, 4.03)
    falling = PhaseController(HybridConfig(), 0)
    for fall in (0.05, 0.051, 0.049, 0.05, 0.051, 0.049, 0.05, 0.05):
        assert not falling.judge_probe(4.0, 4.0 - fall)
    assert not falling.judge_probe(4.0, 3.99)
    assert falling.judge_probe(4.0, 4.05)


def test_a_saved_controller_decides_alike() -> None:
    config = HybridConfig(full_steps=3)
    one, other = PhaseController(config, 1), PhaseController(config, 1)
    run(one, 7)
    one.judge_round(2.0, 1.0)
    one.judge_probe(4.0, 4.01)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert run(one, 20, start=6) == run(other, 20, start=6)

"""What jumps, AdEMAMix and undoing do to every weight, against plain torch."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hybrid_runs import SETTINGS, everything, exact_values, fresh_hybrid, hybrid_config, remembers, run_steps
from hybridtrain.hybrid.rollback_copy import RollbackCopy
from hybridtrain.memory.formats import Int8Weight
from hybridtrain.optim import AdamWConfig, AdEMAMix
from hybridtrain.optim.slow_average import SlowMomentum, move
from hybridtrain.optimizations import FusedUpdate, Int8Weights, MixedPrecision, OptimizerOffload, WeightStreaming
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from stacks import GPT2, STORAGE
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED, random_steps
from training_history import CONFIG, SEQ_LEN, assert_all_bitwise, fresh_trainer, plain_loss, stored_weights

SLOW = SlowMomentum(beta=0.99, alpha=4.0)


class PlainSlow:
    """AdamW with a slow average of the gradients, as anyone would write it, in the precision of its parameters."""

    def __init__(self, named: dict[str, Tensor], settings: TrainerConfig) -> None:
        self.named, self.settings = named, settings
        self.m, self.v, self.s = ({name: torch.zeros_like(p) for name, p in named.items()} for _ in range(3))

    def step(self, number: int, predicted_steps: float) -> None:
        """Update with the gradients, then move ``predicted_steps`` along the slow average."""
        adam, lr = self.settings.optimizer, self.settings.optimizer.lr * self.settings.schedule.factor(number)
        ramp = number / self.settings.schedule.total_steps
        b3 = math.exp(
            math.log(adam.beta1) * math.log(SLOW.beta)
            / ((1 - ramp) * math.log(SLOW.beta) + ramp * math.log(adam.beta1))
        )  # fmt: skip  # the paper's schedule
        norm = torch.sqrt(sum((p.grad.float() ** 2).sum() for p in self.named.values()))
        for name, p in self.named.items():
            m, v, s = self.m[name], self.v[name], self.s[name]
            g = p.grad * min(1.0, adam.max_grad_norm / (norm.item() + 1e-6))
            m.mul_(adam.beta1).add_(g, alpha=1 - adam.beta1)
            v.mul_(adam.beta2).add_(g * g, alpha=1 - adam.beta2)
            s.mul_(b3).add_(g, alpha=1 - b3)
            root = (v / (1 - adam.beta2**number)).sqrt() + adam.eps
            decay = adam.weight_decay if p.dim() >= 2 else 0.0
            p.data -= lr * ((m / (1 - adam.beta1**number) + predicted_steps * s) / root + decay * p.data)
            p.grad = None


def plain_weights(num_steps: int, settings: TrainerConfig, steps_of: dict[int, float]) -> dict[str, Tensor]:
    """Train with plain autograd; ``steps_of`` has the predicted steps of each true one."""
    model = fresh_trainer(GPT2_UNTIED, [remembers()], settings=settings).model
    named = dict(model.named_unit_parameters())
    plain = PlainSlow(named, settings)
    for number, (batch,) in enumerate(random_steps(GPT2_UNTIED, num_steps, seq_len=SEQ_LEN), 1):
        plain_loss(model, batch, number, 0).backward()
        plain.step(number, steps_of.get(number, 0.0))
    return {name: p.detach() for name, p in named.items()}


def assert_close_to(weights: dict[str, Tensor], plain: dict[str, Tensor], lr: float) -> None:
    assert weights.keys() == plain.keys()
    for name, weight in weights.items():
        # fp32 rounding of weights of at most 1.5 over a few steps; elements with v near zero amplify that of gradients.
        gap = (weight - plain[name]).abs()
        assert gap.max() <= 0.02 * lr, f"{name}: {gap.max():.3g}"
        assert gap.mean() <= 1e-4 * lr, f"{name}: {gap.mean():.3g}"


def settings_of(slow: SlowMomentum | None = None) -> TrainerConfig:
    optimizer = AdamWConfig(lr=3e-3, max_grad_norm=0.25, eps=1e-6)
    if slow is not None:
        optimizer = AdEMAMix(lr=3e-3, max_grad_norm=0.25, eps=1e-6, slow=slow)
    return TrainerConfig(optimizer=optimizer, schedule=LrSchedule(warmup_steps=1, total_steps=20))


@pytest.mark.parametrize("stack", [[], [FusedUpdate(), WeightStreaming()], [OptimizerOffload(update_on="host")]])
def test_ademamix_is_the_papers_formula(stack: Sequence[Optimization]) -> None:
    settings = settings_of(SLOW)
    trainer = fresh_trainer(GPT2_UNTIED, [*stack, remembers()], settings=settings)
    for batches in random_steps(GPT2_UNTIED, 8, seq_len=SEQ_LEN):
        trainer.step(batches)
    plain = plain_weights(8, settings, {step: SLOW.alpha * step / 20 for step in range(1, 9)})
    assert_close_to(stored_weights(trainer), plain, lr=3e-3)
    without = plain_weights(8, settings, {})
    gaps = [(without[name] - plain[name]).abs().mean() for name in plain]
    assert min(gaps) > 0.02 * 3e-3  # otherwise the slow average did nothing to compare


@pytest.mark.parametrize("fuse", [False, True])
def test_a_jump_moves_every_weight_as_plain_torch_does(*, fuse: bool) -> None:
    config = hybrid_config(full_steps=3, slow=SLOW, max_move=math.inf, max_relative_move=math.inf, fuse=fuse)
    hybrid = fresh_hybrid(GPT2_UNTIED, [remembers()], config, settings=settings_of())
    results = run_steps(hybrid, 8)
    jumps = {step: 3 * SLOW.alpha * step / 20 for step in (4, 7)}
    assert {r.step: r.predicted_steps for r in results if r.is_predicted} == pytest.approx(jumps)
    assert_close_to(stored_weights(hybrid.trainer), plain_weights(8, settings_of(), jumps), lr=3e-3)
    # The size that it reports is that of the reference's move.
    before, after = (plain_weights(4, settings_of(), moves) for moves in ({}, jumps))
    square = sum(((after[name] - before[name]) ** 2).sum().item() for name in before)
    rms = math.sqrt(square / sum(p.numel() for p in before.values())) / hybrid.trainer.lr_at(4)
    assert next(r.move_rms for r in results if r.step == 4 and r.is_predicted) == pytest.approx(rms, rel=1e-4)


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize(
    ("model", "codec"), [(GPT2_TIED_DROPOUT, "float32"), (LLAMA_GROUPED, "float32"), (GPT2, "int8")]
)
@pytest.mark.parametrize("storage", ["fp32", "bf16-master", "int8-optimizer", "factored", "bf16-split16"])
def test_fused_and_separate_jumps_are_equal_to_the_bit(storage: str, model: object, codec: str) -> None:
    found = []
    for fuse in (False, True):
        stack = [*STORAGE.get(storage, []), remembers(codec=codec)]
        hybrid = fresh_hybrid(model, stack, hybrid_config(fuse=fuse))
        results = run_steps(hybrid)
        assert any(r.phase is Phase.PREDICT for r in results) is not fuse
        found.append((*everything(hybrid.trainer), [r.move_rms for r in results if r.is_predicted]))
    assert_all_bitwise(found[0][0], found[1][0], "weight ")
    assert_all_bitwise(found[0][1], found[1][1], "state ")
    assert found[0][2] == found[1][2]


UNDO_STACKS: dict[str, list[Optimization]] = STORAGE | {
    "fp32": [],
    "fp32-away": [OptimizerOffload(), WeightStreaming()],
    "split16-host": [OptimizerOffload(update_on="host"), MixedPrecision(master="split16")],
    "int8-away": [Int8Weights(master="absent"), WeightStreaming(max_active_layers=1)],
}


def jumped(storage: str, predictor: str, **changes: object) -> tuple[object, tuple[object, ...], tuple[object, ...]]:
    """Return a hybrid trainer right after a jump, and all values and state before and after it."""
    config = hybrid_config(predictor=predictor, fuse=False, **changes)
    hybrid = fresh_hybrid(GPT2, [*UNDO_STACKS[storage], remembers(predictor)], config)
    trainer = hybrid.trainer
    steps = random_steps(GPT2, 20)
    while hybrid.phase is not Phase.PREDICT:
        hybrid.advance(lambda number: steps[number])
    trainer.enter_phase(Phase.PREDICT)
    before = (exact_values(trainer), *everything(trainer))
    hybrid._rollback = RollbackCopy(trainer) if changes.get("rollback") == "copy" else None
    jump = hybrid.predictor.jump(1.5, trainer.lr_at(trainer.steps_done), hybrid._rollback)
    hybrid._jumped(hybrid.controller, jump)
    return hybrid, before, (exact_values(trainer), *everything(trainer))


def moments(state: dict[str, Tensor], *, history: bool) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if "moment" in name or (history and "history" in name)}


def grid(storage: str, hybrid: object, name: str, values: Tensor) -> Tensor:
    """Return the distance of neighbouring stored values at ``values``."""
    units = hybrid.trainer.model.units()
    unit, index = next((u, i) for u in units for i, (n, _) in enumerate(u.parameters) if n == name)
    stored = hybrid.trainer.weights.stored_tensors(unit.name, unit.tensors)[index]
    exponent = torch.floor(torch.log2(values.abs().clamp_min(1e-38)))
    rounds = "absent" in storage or storage in {"int8-weights-static", "int8-all", "int8-factored"}
    return torch.exp2(exponent - (7 if rounds and stored[0].dtype == torch.bfloat16 else 23))


def scales_of(weights: dict[str, Tensor], name: str, count: int) -> Tensor:
    return weights[f"{name}.scales"].repeat_interleave(256)[:count]


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("predictor", ["slow_gradient", "linear"])
@pytest.mark.parametrize("storage", UNDO_STACKS)
def test_an_undone_jump_leaves_a_last_place_at_most(storage: str, predictor: str) -> None:
    hybrid, before, after = jumped(storage, predictor)
    assert sum((after[0][name] != before[0][name]).sum() for name in before[0]) > 1000
    hybrid.undo()
    values, weights, state = exact_values(hybrid.trainer), *everything(hybrid.trainer)
    keeps_history = predictor == "slow_gradient"
    for other in (after[2], state):
        assert_all_bitwise(moments(other, history=keeps_history), moments(before[2], history=keeps_history), "state ")
    holds_codes = isinstance(hybrid.trainer.states.formats.codes, Int8Weight)
    for name, value in values.items():
        old, moved = before[0][name], after[0][name]
        if holds_codes and f"{name}.scales" in weights:
            # Less than a step by chance, then half a one to nearest: both scales may be new.
            sets = (before[1], after[1], weights)
            step = 1.5 * torch.stack([scales_of(found, name, value.numel()) for found in sets]).amax(0)
        else:
            step = grid(storage, hybrid, name, torch.maximum(old.abs(), moved.abs()))
        worst = ((value - old).abs() / step).max()
        assert worst <= 1.0 + 1e-5, f"{name}: {worst} steps of the grid"


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("predictor", ["slow_gradient", "linear"])
@pytest.mark.parametrize("storage", UNDO_STACKS)
def test_a_copy_brings_back_every_bit(storage: str, predictor: str) -> None:
    hybrid, before, after = jumped(storage, predictor, rollback="copy")
    hybrid.undo()
    weights, state = everything(hybrid.trainer)
    assert_all_bitwise(weights, before[1], "weight ")
    others = [{n: t for n, t in found.items() if "history" not in n} for found in (state, before[2])]
    assert_all_bitwise(*others, "state ")
    if predictor == "slow_gradient":
        assert_all_bitwise(state, before[2], "state ")
    assert any((after[1][n] != before[1][n]).any() for n in weights)


def test_a_linear_jump_in_pieces_goes_as_far_as_one_in_one_piece_and_comes_back() -> None:
    ends = []
    for pieces in (1, 3):
        config = hybrid_config(predictor="linear", fuse=False)
        hybrid = fresh_hybrid(GPT2, [remembers("linear")], config)
        steps = random_steps(GPT2, 20)
        while hybrid.phase is not Phase.PREDICT:
            hybrid.advance(lambda number, steps=steps: steps[number])
        before = exact_values(hybrid.trainer)
        hybrid.predictor.steps_of_jump(hybrid.trainer.steps_done, 2, 1.0)
        jumps = [hybrid.predictor.jump(1.5 / pieces, 1e-3, None) for _ in range(pieces)]
        ends.append(exact_values(hybrid.trainer))
        hybrid.predictor.undo(jumps[-1])
        for name, value in exact_values(hybrid.trainer).items():
            assert torch.allclose(value, before[name], rtol=1e-6, atol=1e-7), name
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], rtol=1e-6, atol=1e-7), name
    assert any((ends[0][name] - before[name]).abs().max() > 1e-4 for name in before)


def test_what_8_bits_rounded_to_nothing_is_not_divided_by_eps() -> None:
    # A second moment of 1e-8 of its group's largest is stored as zero; the average of its gradients is not.
    slow_P, second_P = torch.tensor([1e-6, 1e-3, 0.0]), torch.tensor([0.0, 1e-6, 0.0])
    moved_P = move(slow_P, second_P, correction=0.5, eps=1e-8, lr_steps=1.0, largest_ratio=1.0)
    assert moved_P[0] == moved_P[2] == 0
    assert moved_P[1] == pytest.approx(-1e-3 / math.sqrt(2e-6), rel=1e-4)


def test_a_predicted_step_moves_no_weight_further_than_the_learning_rate() -> None:
    # A token that was not seen for long: its second moment faded, its slow average did not yet.
    slow_P, second_P = torch.tensor([1e-3, -1e-3, 1e-4]), torch.tensor([1e-20, 1e-20, 1e-6])
    moved_P = move(slow_P, second_P, correction=1.0, eps=1e-8, lr_steps=0.5, largest_ratio=1.0)
    assert moved_P.tolist()[:2] == [-0.5, 0.5]
    assert moved_P[2] == pytest.approx(-0.05, rel=1e-4)
    free_P = move(slow_P, second_P, correction=1.0, eps=1e-8, lr_steps=0.5, largest_ratio=math.inf)
    assert abs(free_P[0]) > 1000


def test_settings_of_these_tests_clip() -> None:
    assert SETTINGS.optimizer.max_grad_norm == CONFIG.optimizer.max_grad_norm == 0.25


def test_the_span_of_the_average_suits_the_run() -> None:
    assert SlowMomentum().beta_at(1000, 1000, 0.9) == pytest.approx(0.99)
    assert SlowMomentum(beta=0.9).within_bounds(1000).beta == pytest.approx(0.98)  # 5 % of the run
    assert SlowMomentum(beta=0.9999).within_bounds(1000).beta == pytest.approx(0.995)  # 20 % of it
    assert SlowMomentum(beta=0.99).within_bounds(1000).beta == 0.99
    assert SlowMomentum(beta=0.9).within_bounds(100).beta == 0.9  # too short a run to tell


def test_a_jump_moves_no_more_than_a_share_of_the_weights() -> None:
    config = hybrid_config(full_steps=3, slow=SLOW, max_move=math.inf, max_relative_move=1e-4)
    hybrid = fresh_hybrid(GPT2_UNTIED, [remembers()], config, settings=settings_of())
    results = run_steps(hybrid, 14)
    weights = torch.cat([value.flatten() for value in stored_weights(hybrid.trainer).values()])
    moves = [result.move_rms * result.lr for result in results if result.is_predicted]
    limit = 1e-4 * float(weights.square().mean().sqrt())
    assert len(moves) >= 3
    assert moves[0] > 2 * limit  # the first jump has nothing to go by
    assert all(0 < move < 1.5 * limit for move in moves[2:])

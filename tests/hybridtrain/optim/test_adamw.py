"""The update against torch's fused AdamW, and every storage format against fp32. P elements."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE
from hybridtrain.engine import update
from hybridtrain.memory import formats
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import Int8Optimizer, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.placement import Codec
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from numerics import assert_bitwise, assert_follows
from tiny_models import GPT2_UNTIED, random_steps
from unit_updates import CONFIG, UnitUpdates

SHAPES = ((65, 67), (67,), (3, 5), (1,))
"""Matrices and vectors, with odd tails; the first one is large enough for 8-bit moments."""


def initial_values() -> list[Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


def random_steps_of_grads(num_steps: int = 20, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    return [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(num_steps)]


def assert_same_tensors(actual: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> None:
    for index, (tensor, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(tensor, wanted, f"{name} {index}")


def test_fp32_updates_are_those_of_torchs_fused_adamw() -> None:
    initial, steps = initial_values(), random_steps_of_grads()
    ours = UnitUpdates(initial, Codec.FLOAT32, Codec.ABSENT, Codec.FLOAT32)
    ours.run(steps)

    theirs = [nn.Parameter(value.clone()) for value in initial]
    groups = [
        {"params": [parameter for parameter in theirs if parameter.dim() >= 2], "weight_decay": CONFIG.weight_decay},
        {"params": [parameter for parameter in theirs if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.eps, fused=True)
    for grads in steps:
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    assert_same_tensors(ours.values(), [parameter.detach() for parameter in theirs], "weight")
    state = [optimizer.state[parameter][key] for parameter in theirs for key in ("exp_avg", "exp_avg_sq")]
    assert_same_tensors(ours.moments(), state, "moment")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_split_master_trains_bit_for_bit_like_a_float32_master(dtype: torch.dtype) -> None:
    initial, steps = initial_values(), random_steps_of_grads(dtype=dtype)
    split = UnitUpdates(initial, Codec.BFLOAT16, Codec.SPLIT16, Codec.FLOAT32)
    whole = UnitUpdates(initial, Codec.BFLOAT16, Codec.FLOAT32, Codec.FLOAT32)
    split.run(steps)
    whole.run(steps)
    assert_same_tensors(split.values(), whole.values(), "master")
    assert_same_tensors(split.moments(), whole.moments(), "moment")
    for ours, theirs, value in zip(split.unit.tensors, whole.unit.tensors, whole.values(), strict=True):
        # The weights that the forward pass reads differ only where nearest is a tie, which the two break otherwise.
        tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
        assert_bitwise(ours.detach()[~tie], theirs.detach()[~tie], "weight")


@pytest.mark.parametrize("master", [Codec.FLOAT32, Codec.SPLIT16])
def test_a_master_trains_bit_for_bit_like_fp32_weights(master: Codec) -> None:
    initial, steps = initial_values(), random_steps_of_grads(dtype=torch.bfloat16)
    mixed = UnitUpdates(initial, Codec.BFLOAT16, master, Codec.FLOAT32)
    exact = UnitUpdates(initial, Codec.FLOAT32, Codec.ABSENT, Codec.FLOAT32)
    mixed.run(steps)
    exact.run([[grad.float() for grad in grads] for grads in steps])
    assert_same_tensors(mixed.values(), exact.values(), "master")


@pytest.mark.parametrize("moments", [Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS])
@pytest.mark.parametrize(
    ("weight", "master"),
    [
        (Codec.FLOAT32, Codec.ABSENT),
        (Codec.BFLOAT16, Codec.FLOAT32),
        (Codec.BFLOAT16, Codec.SPLIT16),
        (Codec.INT8_BLOCKS, Codec.FLOAT32),
    ],
    ids=["exact", "float32", "split16", "int8"],
)
def test_slices_change_no_bit(weight: Codec, master: Codec, moments: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    if moments is Codec.BFLOAT16:
        # Its moments are rounded stochastically, m and v of a slice in turn: other slices draw other numbers.
        monkeypatch.setattr(formats, "round_stochastically", lambda wide, target: target.copy_(wide))
    initial, steps = initial_values(), random_steps_of_grads(5, torch.bfloat16)
    in_one, in_slices = (UnitUpdates(initial, weight, master, moments) for _ in range(2))
    in_one.run(steps)
    monkeypatch.setattr(update, "RESIDENT_SLICE_ELEMENTS", 512)
    in_slices.run(steps)
    assert_same_tensors(in_slices.values(), in_one.values(), "weight")
    assert_same_tensors(in_slices.rounded(), in_one.rounded(), "rounded weight")
    assert_same_tensors(in_slices.moments(), in_one.moments(), "moment")


def test_slices_hold_whole_groups_of_8_bit_codes() -> None:
    assert update.RESIDENT_SLICE_ELEMENTS % QUANT_GROUP_SIZE == 0
    assert formats.SLICE_ELEMENTS % QUANT_GROUP_SIZE == 0


def test_stochastic_weights_move_like_exact_ones_on_average() -> None:
    # 20 steps of 1e-4 move 4096 weights by 2e-3 all in all, a quarter of the distance of bfloat16 neighbours at 1.
    initial, steps = [torch.ones(64, 64)], [[torch.full((64, 64), 0.5)] for _ in range(20)]
    rounded = UnitUpdates(initial, Codec.BFLOAT16, Codec.ABSENT, Codec.FLOAT32)
    exact = UnitUpdates(initial, Codec.FLOAT32, Codec.ABSENT, Codec.FLOAT32)
    rounded.run(steps, lr=1e-4)
    exact.run(steps, lr=1e-4)
    moved, expected = (1 - updates.values()[0].double().mean().item() for updates in (rounded, exact))
    # Below 1 neighbours are 2**-8 apart: half the draws of one rounding per step, added over 20 steps.
    standard_error = 2**-8 * (20 * 0.03 / 4096) ** 0.5
    assert expected > 2e-3
    assert abs(moved - expected) < 5 * standard_error


LEARNABLE = replace(GPT2_UNTIED, width=64, ffn_width=128, num_blocks=2)
"""Its matrices have 4096 elements and more, so their moments are 8-bit codes."""


def memorise(stack: Sequence[Optimization], seed: int) -> list[float]:
    """Return the losses of 40 steps on one batch."""
    schedule = LrSchedule(kind="constant", warmup_steps=5)
    config = TrainerConfig(optimizer=AdamWConfig(lr=3e-3), schedule=schedule, seed=seed)
    trainer = Trainer(LEARNABLE, compose(stack), config, DirectTransfer(torch.device("cpu")))
    batches = random_steps(LEARNABLE, 1)[0]
    return [trainer.step(batches).loss for _ in range(40)]


@cache
def plain_losses(seed: int) -> list[float]:
    return memorise([], seed)


FOLLOWERS: dict[str, list[Optimization]] = {
    "int8": [Int8Optimizer()],
    "mixed": [MixedPrecision()],
    "stochastic": [MixedPrecision(master="absent")],
    "int8-stochastic": [Int8Optimizer(), MixedPrecision(master="absent")],
}
# Nats of a loss that falls from 4.6 to 0.05. Twice what was seen over five seeds: 8-bit moments turn the update a
# little (0.0012), bfloat16 arithmetic moves every loss by a relative 1e-3 (0.005), rounded weights add noise (0.012).
BANDS = {"int8": 0.0025, "mixed": 0.01, "stochastic": 0.025, "int8-stochastic": 0.025}


@pytest.mark.parametrize(("follower", "seed"), list(zip(FOLLOWERS, (0, 1, 2, 0), strict=True)))
def test_training_with_rounded_storage_follows_fp32(follower: str, seed: int) -> None:
    assert_follows(memorise(FOLLOWERS[follower], seed), plain_losses(seed), band=BANDS[follower])


def test_every_fault_of_the_configuration_is_listed() -> None:
    with pytest.raises(ValueError, match="lr") as raised:
        AdamWConfig(lr=0, beta1=1.0, beta2=-0.1, eps=0, weight_decay=-1, max_grad_norm=-1)
    assert str(raised.value).splitlines() == [
        "lr: 0 must be above 0",
        "weight_decay: -1 must be at least 0",
        "max_grad_norm: -1 must be at least 0",
        "beta1: 1.0 must be in [0, 1)",
        "beta2: -0.1 must be in [0, 1)",
        "eps: 0 must be above 0",
    ]

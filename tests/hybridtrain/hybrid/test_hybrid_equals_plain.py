"""Without jumps the hybrid trainer is the plain one, to the bit; watching touches no random stream."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_runs import SETTINGS, everything, fresh_hybrid, hybrid_config, remembers
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optimizations import FusedUpdate, Int8Weights, MixedPrecision, OptimizerOffload
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from stacks import STREAMING_STACKS, build
from tiny_models import GPT2_TIED_DROPOUT, random_steps
from training_history import assert_all_bitwise, fresh_trainer

NUM_STEPS = 22
"""Forecasts and monitors begin after 20 steps."""
STACKS: dict[str, list[Optimization]] = {
    "fp32": [],
    "bf16-absent": [MixedPrecision(master="absent")],
    "int8-absent": [Int8Weights(master="absent"), MixedPrecision(master="absent")],
    "fused": [FusedUpdate(), OptimizerOffload(offload_grads=False)],
    "everything": build("everything-horizontal", 1),
}
OFF: dict[str, HybridConfig | None] = {
    "none": None,
    "no-steps": hybrid_config(max_predict_steps=0.0, full_steps=4, rollback="copy"),
    "no-steps-linear": hybrid_config(predictor="linear", max_predict_steps=0.0, monitor="probe", probe_every=1),
    "no-strength-linear": hybrid_config(predictor="linear", strength=0.0, monitor="every_step"),
    "no-move": hybrid_config(max_move=0.0, monitor="every_step"),
}


@cache
def plain(stack: str) -> tuple[list[object], dict[str, Tensor], dict[str, Tensor], Tensor]:
    trainer = fresh_trainer(GPT2_TIED_DROPOUT, STACKS[stack], settings=SETTINGS)
    torch.manual_seed(7)
    results = [trainer.step(step) for step in random_steps(GPT2_TIED_DROPOUT, NUM_STEPS)]
    return [(r.step, r.loss, r.lr, r.grad_norm) for r in results], *everything(trainer), torch.random.get_rng_state()


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize(
    ("stack", "config"), [(s, c) for i, s in enumerate(STACKS) for j, c in enumerate(OFF) if (i + j) % 2 == 0]
)
def test_without_jumps_it_is_the_plain_trainer(stack: str, config: str) -> None:
    chosen = OFF[config]
    memory = [] if chosen is None else [remembers(chosen.predictor)]
    hybrid = fresh_hybrid(GPT2_TIED_DROPOUT, [*STACKS[stack], *memory], chosen)
    steps = random_steps(GPT2_TIED_DROPOUT, NUM_STEPS)
    torch.manual_seed(7)
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002  the global stream itself
    results = []
    while hybrid.trainer.steps_done < NUM_STEPS:
        results.append(hybrid.advance(lambda number: steps[number]))
    stream = torch.random.get_rng_state()
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    expected = plain(stack)
    assert [(r.step, r.loss, r.lr, r.grad_norm) for r in results if r.phase is not Phase.PREDICT] == expected[0]
    assert not any(r.is_predicted for r in results)
    weights, state = everything(hybrid.trainer)
    assert_all_bitwise(weights, expected[1], "weight ")
    assert_all_bitwise({n: t for n, t in state.items() if "history" not in n}, expected[2], "state ")
    assert torch.equal(stream, expected[3])


@pytest.mark.parametrize("stack", ["weights-2-ahead-1-resident-0-host", "fused-streamed-disk", "everything-disk"])
def test_no_configuration_is_the_plain_trainer_on_every_tier(stack: str, tmp_path: Path) -> None:
    assert stack in STREAMING_STACKS
    found = []
    for name in ("plain", "hybrid"):
        transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path / name)
        steps = random_steps(GPT2_TIED_DROPOUT, 3, 2)
        if name == "plain":
            trainer = fresh_trainer(GPT2_TIED_DROPOUT, build(stack, 2), transfer, settings=SETTINGS)
            losses = [trainer.step(step).loss for step in steps]
        else:
            hybrid = fresh_hybrid(GPT2_TIED_DROPOUT, build(stack, 2), None, transfer)
            losses = [hybrid.advance(lambda number: steps[number]).loss for _ in steps]  # noqa: B023
            trainer = hybrid.trainer
        found.append((losses, everything(trainer)))
        transfer.close()
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert_all_bitwise(one, other, "tensor ")

"""Initial values: the rule for each parameter, and the same model whatever the stack."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.layers import fill_initial
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing, Int8Optimizer, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from numerics import assert_bitwise
from tiny_models import FAMILIES, GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED

MODELS = {"gpt2": GPT2_TIED_DROPOUT, "llama": LLAMA_GROUPED}


def trainer(config: ModelConfig, stack: Sequence[Optimization], seed: int = 0) -> Trainer:
    return Trainer(config, compose(stack), TrainerConfig(seed=seed), DirectTransfer(torch.device("cpu")))


def on_device(master_weight: Stored | None) -> Tensor | None:
    assert not isinstance(master_weight, TierTensor)
    return master_weight


def exact_values(built: Trainer) -> dict[str, Tensor]:
    """Return the fp32 value behind every parameter."""
    states = [state for _, unit_states in built.states.items() for state in unit_states]
    names = [name for name, _ in built.model.named_unit_parameters()]
    return {
        name: built.states.formats.values.load((state.parameter.data,), on_device(state.master_weight))
        for name, state in zip(names, states, strict=True)
    }


STACKS: dict[str, list[Optimization]] = {
    "float32 master": [MixedPrecision()],
    "split16 master": [MixedPrecision(master="split16")],
    "int8": [Int8Optimizer()],
    "recompute": [GradientCheckpointing(recompute_every=2), GradAccumulation(grad_accum_steps=3, schedule="vertical")],
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", MODELS)
def test_every_stack_with_an_exact_master_starts_from_the_same_values(model: str, stack: str) -> None:
    expected = exact_values(trainer(MODELS[model], []))
    for name, value in exact_values(trainer(MODELS[model], STACKS[stack])).items():
        assert_bitwise(value, expected[name], name)


@pytest.mark.parametrize("model", MODELS)
def test_without_a_master_the_weights_are_the_same_values_rounded_to_nearest(model: str) -> None:
    exact = exact_values(trainer(MODELS[model], []))
    built = trainer(MODELS[model], [MixedPrecision(master="absent")])
    for name, parameter in built.model.named_unit_parameters():
        assert_bitwise(parameter.detach(), exact[name].bfloat16(), name)


@pytest.mark.parametrize("model", MODELS)
def test_norms_start_at_one_and_biases_at_zero(model: str) -> None:
    values = exact_values(trainer(MODELS[model], []))
    norms = {name: value for name, value in values.items() if "norm" in name and name.endswith("weight")}
    biases = {name: value for name, value in values.items() if name.endswith("bias")}
    assert len(norms) == 2 * 4 + 1
    assert all((value == 1).all() for value in norms.values())
    assert all((value == 0).all() for value in biases.values())
    assert bool(biases) == (model == "gpt2")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.token", 0.02),
        ("embedding.position", 0.02),
        ("head.weight", 0.02),
        ("block.3.qkv.weight", 0.02),
        ("block.3.ffn_gate.weight", 0.02),
        ("block.3.ffn_up.weight", 0.02),
        ("block.3.attention_out.weight", 0.02 / math.sqrt(2 * 8)),
        ("block.3.ffn_out.weight", 0.02 / math.sqrt(2 * 8)),
    ],
)
def test_weights_are_normal_and_narrower_onto_the_residual_stream(name: str, expected: float) -> None:
    values = torch.empty(400, 250)
    fill_initial(name, values, replace(GPT2_UNTIED, num_blocks=8), torch.Generator().manual_seed(0))
    # The standard error of a deviation over n = 100,000 draws is sigma / sqrt(2 n) = 0.22 %; five of them.
    assert values.std().item() == pytest.approx(expected, rel=0.011)
    assert abs(values.mean().item()) < 5 * expected / math.sqrt(values.numel())


def test_gemmas_norms_start_at_one_which_is_stored_as_zero() -> None:
    values = torch.ones(8)
    fill_initial("block.0.attention_out_norm.weight", values, FAMILIES["gemma2"], None)
    assert (values == 0).all()


@pytest.mark.parametrize("name", ["router", "experts_gate", "experts_up", "experts_out"])
def test_experts_start_like_matrices(name: str) -> None:
    values, config = torch.empty(5, 200, 250), FAMILIES["mixtral"]
    fill_initial(f"block.0.{name}", values, config, torch.Generator().manual_seed(0))
    expected = 0.02 / math.sqrt(2 * config.num_blocks) if name == "experts_out" else 0.02
    assert values.std().item() == pytest.approx(expected, rel=0.011)


def test_every_parameter_has_numbers_of_its_own() -> None:
    drawn = [value.flatten()[:16] for value in exact_values(trainer(GPT2_UNTIED, [])).values() if value.std() > 0]
    assert len(drawn) > 10
    directions = torch.stack([value / value.norm() for value in drawn])
    cosines = directions @ directions.t() - torch.eye(len(drawn))
    # Streams that coincide, scaled or not, have a cosine of 1; 16 independent draws stay far below.
    assert cosines.abs().max() < 0.95


def test_another_seed_gives_other_values_to_every_parameter() -> None:
    first, second = (exact_values(trainer(GPT2_UNTIED, [], seed)) for seed in (0, 1))
    for name, value in first.items():
        assert value.std() == 0 or not torch.equal(value, second[name])


def test_another_seed_reuses_no_stream_of_the_first() -> None:
    # All 16 leading draws, up to the width of the distribution, of any parameter under seed 1 against seed 0.
    streams = [
        [value.flatten()[:16] for value in exact_values(trainer(GPT2_UNTIED, [], seed)).values() if value.std() > 0]
        for seed in (0, 1)
    ]
    first, second = (torch.stack([value / value.norm() for value in values]) for values in streams)
    assert (first @ second.t()).abs().max() < 0.95

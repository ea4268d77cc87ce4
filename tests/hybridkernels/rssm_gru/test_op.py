"""The roll-out against dense products and torch's own GRU cell, its draws, its fake, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels.rssm_gru import draw_classes, rssm_rollout, unimix
from hybridkernels.rssm_gru.op import WEIGHTS, _takes_triton
from numerics import assert_bitwise
from rssm_models import Inputs, follow_definition, random_inputs

OP = torch.ops.hybridkernels.rssm_rollout.default
SHAPES = [{}, {"rows": 1, "members": 1, "ticks": 1}, {"is_seen": True, "ticks": 3}, {"rows": 0}]
ODD = {"hidden": 5, "categoricals": 3, "classes": 4, "width": 6, "actions": 1, "rows": 2}


def ordered(inputs: Inputs) -> tuple[Any, ...]:
    weights, *rest = inputs.arguments
    return [weights[name] for name in WEIGHTS], *rest


@pytest.mark.parametrize("shape", [*SHAPES[:3], ODD], ids=str)
def test_the_roll_out_is_its_definition(shape: dict[str, Any]) -> None:
    inputs = random_inputs(**shape).to(torch.float64)
    found, expected = rssm_rollout(*inputs.arguments), follow_definition(inputs)
    assert torch.equal(found.classes_EBK, expected.classes_EBK)
    # Two orders of the same double arithmetic.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_float32_follows_float64() -> None:
    inputs = random_inputs(hidden=64, categoricals=32, classes=32, width=64, ticks=4)
    found, exact = rssm_rollout(*inputs.arguments), rssm_rollout(*inputs.to(torch.float64).arguments)
    assert torch.equal(found.classes_EBK, exact.classes_EBK)
    for name, actual, target in zip(found._fields, found, exact, strict=True):
        # A few hundred float32 terms of unit size, through four ticks.
        torch.testing.assert_close(actual.double(), target.double(), rtol=0, atol=1e-5, msg=name)


def test_ticks_in_one_call_are_calls_of_one_tick() -> None:
    inputs = random_inputs(ticks=3, is_seen=True).to(torch.float64)
    whole = rssm_rollout(*inputs.arguments)
    step = replace(inputs, features_EBF=inputs.features_EBF)
    for tick in range(3):
        one = slice(tick, tick + 1)
        step = replace(step, actions_SEBA=inputs.actions_SEBA[one], uniforms_SEBK=inputs.uniforms_SEBK[one])
        found = rssm_rollout(*step.arguments)
        torch.testing.assert_close(found.means_SEB[0], whole.means_SEB[tick], rtol=1e-12, atol=1e-12)
        step = replace(step, hidden_EBH=found.hidden_EBH, classes_EBK=found.classes_EBK, features_EBF=None)
    assert torch.equal(found.classes_EBK, whole.classes_EBK)


def test_features_are_seen_in_the_first_tick() -> None:
    inputs = random_inputs(is_seen=True)
    unseen = rssm_rollout(*replace(inputs, features_EBF=None).arguments)
    assert not torch.allclose(rssm_rollout(*inputs.arguments).means_SEB[0], unseen.means_SEB[0])


def test_an_expanded_action_is_the_same_for_every_row() -> None:
    inputs = random_inputs(ticks=3)
    planned_SA = torch.randn(3, 3)
    expanded = planned_SA[:, None, None].expand(3, 2, 3, 3)
    found = rssm_rollout(*replace(inputs, actions_SEBA=expanded).arguments)
    copied = rssm_rollout(*replace(inputs, actions_SEBA=expanded.contiguous()).arguments)
    for one, other in zip(found, copied, strict=True):
        assert_bitwise(one, other)


def test_a_class_is_as_frequent_as_it_is_probable() -> None:
    probabilities = unimix(torch.randn(1, 1, 1, 8)).expand(1, 20_000, 1, 8)
    drawn = draw_classes(probabilities, torch.rand(1, 20_000, 1))
    shares = torch.bincount(drawn.flatten(), minlength=8) / 20_000
    # Four binomial deviations of at most sqrt(0.25 / 20000).
    assert (shares - probabilities[0, 0, 0]).abs().max() < 4 * 0.0036


def test_the_ends_of_the_unit_interval_are_the_first_and_last_class() -> None:
    probabilities = unimix(torch.zeros(1, 2, 1, 32) + torch.linspace(-3, 3, 32))
    ends = torch.tensor([0.0, 1 - 2**-24])[None, :, None]
    assert draw_classes(probabilities, ends).flatten().tolist() == [0, 31]
    # Were rounding to leave the sum at 0.999, a larger number would still be a class.
    assert draw_classes(probabilities * 0.999, ends).flatten().tolist() == [0, 31]


def test_no_gradient_is_asked_for() -> None:
    inputs = random_inputs()
    weights = {name: weight.requires_grad_() for name, weight in inputs.weights.items()}
    found = rssm_rollout(*replace(inputs, weights=weights).arguments)
    assert not any(tensor.requires_grad for tensor in found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_passes_torchs_own_checks(shape: dict[str, Any]) -> None:
    torch.library.opcheck(OP, ordered(random_inputs(**shape)), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_meta_tensors_give_the_shapes_of_real_ones(shape: dict[str, Any]) -> None:
    inputs = random_inputs(**shape)
    metas = rssm_rollout(*inputs.to("meta").arguments)
    for name, actual, meta in zip(metas._fields, rssm_rollout(*inputs.arguments), metas, strict=True):
        assert meta.is_meta
        facts = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in (meta, actual)]
        assert facts[0] == facts[1], name


def test_the_kernel_takes_blocks_of_powers_of_two_in_float32() -> None:
    def takes(inputs: Inputs) -> bool:
        weights, hidden, classes, *_ = ordered(inputs)
        return _takes_triton(weights, hidden, classes)

    assert takes(random_inputs())
    assert not takes(random_inputs().to(torch.float64))
    for size in ({"hidden": 24}, {"width": 8}, {"classes": 20}, {"categoricals": 3}):
        assert not takes(random_inputs(**size)), size


def without(inputs: Inputs, name: str) -> Inputs:
    return replace(inputs, weights={key: weight for key, weight in inputs.weights.items() if key != name})


def other_weight(inputs: Inputs, name: str, weight: Tensor) -> Inputs:
    return replace(inputs, weights=inputs.weights | {name: weight})


REFUSALS = {
    r"weights lack \['mix.bias'\]": lambda given: without(given, "mix.bias"),
    r"prior.weight is torch.float32 \(2, 16, 8\).* must be .*\(2, 16, 256\)": lambda given: other_weight(
        given, "prior.weight", torch.ones(2, 16, 8)
    ),
    r"head.bias is torch.float64": lambda given: other_weight(given, "head.bias", torch.ones(2, 1, 2).double()),
    r"mix.bias is torch.float32 \(2, 1, 16\) on meta": lambda given: other_weight(
        given, "mix.bias", torch.ones(2, 1, 16, device="meta")
    ),
    r"hidden \(2, 16\).* add dimensions": lambda given: replace(given, hidden_EBH=given.hidden_EBH[:, 0]),
    r"uniforms is .*\(1, 2, 3, 16\).* must be .*\(2, 2, 3, 16\)": lambda given: replace(
        given, uniforms_SEBK=given.uniforms_SEBK[:1]
    ),
    r"features is .*\(2, 3, 6\)": lambda given: replace(given, features_EBF=torch.ones(2, 3, 6)),
    r"classes are torch.int32": lambda given: replace(given, classes_EBK=given.classes_EBK.int()),
    r"classes go from 0 to 16; allowed is 0 to 15": lambda given: replace(
        given, classes_EBK=torch.arange(96).view(2, 3, 16) % 17
    ),
    r"0 ticks": lambda given: replace(
        given, actions_SEBA=given.actions_SEBA[:0], uniforms_SEBK=given.uniforms_SEBK[:0]
    ),
    r".*torch.bfloat16; there must be": lambda given: given.to(torch.bfloat16),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_does_not_fit_is_refused(message: str) -> None:
    inputs = REFUSALS[message](random_inputs(is_seen=message.startswith("features")))
    with pytest.raises(ValueError, match="rssm_rollout: " + message):
        rssm_rollout(*inputs.arguments)

"""Model shapes: the presets' sizes, and every fault of a custom shape at once."""

from dataclasses import replace

import pytest
import torch

from hybridtrain.errors import ConfigError
from hybridtrain.models.build import MODEL_FAMILIES, build_model
from hybridtrain.models.model_config import PRESETS, ModelConfig, block_params, model_preset
from tiny_models import GPT2_ODD, GPT2_UNTIED, LLAMA_GROUPED, LLAMA_ODD

TINY = {"gpt2-odd": GPT2_ODD, "gpt2-untied": GPT2_UNTIED, "llama-grouped": LLAMA_GROUPED, "llama-odd": LLAMA_ODD}
EVERY = PRESETS | TINY


def faults(config: ModelConfig, **changes: float | bool) -> list[str]:
    with pytest.raises(ValueError, match=":") as raised:
        replace(config, **changes)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("name", EVERY)
def test_a_built_model_has_exactly_the_parameters_of_the_formula(name: str) -> None:
    config = EVERY[name]
    model = build_model(config, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for _, parameter in model.named_unit_parameters()) == config.num_params
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_params
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_gpt2_small_has_the_published_number_of_parameters() -> None:
    assert PRESETS["gpt2-small"].num_params == 124_439_808


def test_a_blocks_parameters_are_counted_by_hand() -> None:
    # LLaMA 7B: four projections of 4096 x 4096, three of 4096 x 11008, two norms.
    assert block_params(PRESETS["llama-7b"]) == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        ("gpt2-medium", 355e6, 0.005),  # rounded in the paper's repository
        ("gpt2-large", 774e6, 0.005),
        ("gpt2-xl", 1.558e9, 0.005),
        ("gpt2-1b", 1.1e9, 0.03),  # "about": 1.1 has two digits
        ("llama-1b", 1.1e9, 0.005),  # TinyLlama-1.1B
        ("llama-7b", 6.74e9, 0.005),
        ("llama-13b-57l", 13.14e9, 0.005),
        ("llama-50b", 50e9, 0.01),
    ],
)
def test_presets_have_the_size_their_name_says(name: str, expected: float, tolerance: float) -> None:
    assert PRESETS[name].num_params == pytest.approx(expected, rel=tolerance)


def test_llama_50b_is_cut_into_blocks_that_fit_a_card_one_by_one() -> None:
    config = PRESETS["llama-50b"]
    assert 62 <= config.num_blocks <= 64
    assert config.width == 8192


def test_every_family_is_reached_by_a_preset() -> None:
    assert {config.family for config in PRESETS.values()} == set(MODEL_FAMILIES)


def test_an_unknown_preset_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"model 'llama-7' is unknown; did you mean 'llama-7b'\? Known: gpt2-1b, "):
        model_preset("llama-7")


def test_a_known_preset_is_found() -> None:
    assert model_preset("gpt2-xl") is PRESETS["gpt2-xl"]


def test_numbers_below_one_are_all_listed() -> None:
    assert faults(GPT2_UNTIED, vocab_size=0, num_blocks=-1, ffn_width=0) == [
        "vocab_size: 0 must be at least 1",
        "num_blocks: -1 must be at least 1",
        "ffn_width: 0 must be at least 1",
    ]


def test_shape_faults_are_all_listed() -> None:
    assert faults(GPT2_UNTIED, width=33, num_kv_heads=3, dropout=1.0) == [
        "width: 33 must be a multiple of num_heads (4)",
        "num_kv_heads: 3 must divide num_heads (4)",
        "num_kv_heads: 3 must equal num_heads (4) in GPT-2",
        "dropout: 1.0 must be in [0, 1)",
    ]


def test_llama_refuses_what_it_does_not_have() -> None:
    assert faults(LLAMA_GROUPED, num_heads=32, num_kv_heads=32, dropout=0.1) == [
        "width: head dim 1 must be even for rotary positions",
        "dropout: 0.1 must be 0 in LLaMA, which has none",
    ]


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_is_a_probability_below_one(dropout: float) -> None:
    assert faults(GPT2_UNTIED, dropout=dropout) == [f"dropout: {dropout} must be in [0, 1)"]

"""Model shapes: the presets' sizes, and every fault of a custom shape at once."""

from dataclasses import replace

import pytest
import torch

from hybridtrain.errors import ConfigError
from hybridtrain.models.build import build_model
from hybridtrain.models.families import FAMILIES
from hybridtrain.models.model_config import PRESETS, Experts, ModelConfig, block_params, block_shapes, model_preset
from tiny_models import FAMILIES as FAMILY_MODELS
from tiny_models import GPT2_ODD, GPT2_UNTIED, LLAMA_GROUPED, LLAMA_ODD

TINY = {"gpt2-odd": GPT2_ODD, "gpt2-untied": GPT2_UNTIED, "llama-grouped": LLAMA_GROUPED, "llama-odd": LLAMA_ODD}
TINY |= FAMILY_MODELS
EVERY = PRESETS | TINY


def faults(config: ModelConfig, **changes: object) -> list[str]:
    with pytest.raises(ValueError, match=":") as raised:
        replace(config, **changes)  # type: ignore[arg-type]
    return str(raised.value).splitlines()


@pytest.mark.parametrize("name", EVERY)
def test_a_built_model_has_exactly_the_parameters_of_the_formula(name: str) -> None:
    config = replace(EVERY[name], num_blocks=2)  # blocks are alike
    model = build_model(config, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for _, parameter in model.named_unit_parameters()) == config.num_params
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_params
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    last = model.blocks[config.num_blocks - 1]
    assert {name: tuple(parameter.shape) for name, parameter in last.named_parameters()} == block_shapes(config)


PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552, "phi-3-medium-4k": 13_960_238_080, "phi-4": 14_659_507_200,
    "olmo-2-1b": 1_484_916_736, "olmo-2-7b": 7_298_617_344, "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384, "mistral-nemo-12b": 12_247_782_400, "mistral-small-24b": 23_572_403_200,
    "falcon3-7b": 7_455_550_464, "falcon3-10b": 10_305_653_760, "gemma-3-270m": 268_098_176,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
}  # fmt: skip
"""Totals that the hub reads out of the safetensors files of these models. Those of qwen3-0.6b and 1.7b hold the tied
weight twice, those of gemma-3 above 1b a vision tower: test_hf_config counts these with transformers' own classes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    assert PRESETS[name].num_params == PUBLISHED[name]


def test_a_blocks_parameters_are_counted_by_hand() -> None:
    # LLaMA 7B: four projections of 4096 x 4096, three of 4096 x 11008, two norms.
    assert block_params(PRESETS["llama-7b"]) == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
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
    assert {config.family for config in PRESETS.values()} == set(FAMILIES)


def test_an_unknown_preset_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"model 'llama-7' is unknown; did you mean 'llama-7b'\? `hybridtrain list models`"
    ):
        model_preset("llama-7")
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


def test_what_a_family_cannot_have_is_all_listed() -> None:
    assert faults(GPT2_UNTIED, rotary_fraction=0.5, window_pattern=(True, False), query_scale=-1.0) == [
        "rotary_fraction: 0.5 is not used by GPT-2; remove it",
        "sliding_window: 0 disables window_pattern and rope_local_theta; set it, or remove them",
        "query_scale: -1.0 must be at least 0",
    ]
    gemma = FAMILY_MODELS["gemma3"]
    assert faults(gemma, head_size=9, experts=Experts(count=4, per_token=2, ffn_width=8)) == [
        "head_size: 9 must be even for rotary positions",
        "experts: 4 experts are given, but Gemma 3 is dense; remove the table",
    ]
    assert faults(FAMILY_MODELS["mixtral"], experts=None) == [
        "experts: missing; Mixtral needs a table with count, per_token and ffn_width"
    ]


def test_an_unknown_family_is_answered_with_the_nearest_name() -> None:
    assert faults(GPT2_UNTIED, family="gema2")[0].startswith(
        "family: family 'gema2' is unknown; did you mean 'gemma2'?"
    )


def test_windows_repeat_over_the_blocks() -> None:
    config = replace(FAMILY_MODELS["gemma3"], num_blocks=5)
    assert [config.window_of(block) for block in range(5)] == [4, 4, 0, 4, 4]


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_is_a_probability_below_one(dropout: float) -> None:
    assert faults(GPT2_UNTIED, dropout=dropout) == [f"dropout: {dropout} must be in [0, 1)"]

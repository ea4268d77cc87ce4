"""GPT-2 and LLaMA against transformers with the same weights: logits, loss and every gradient."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hybridtrain.errors import ConfigError
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.build import build_model
from hybridtrain.models.hf_import import hf_name, is_transposed, load_hf_weights
from hybridtrain.models.model_config import ModelConfig
from numerics import assert_error_bound
from tiny_models import GPT2_ODD, GPT2_UNTIED, LLAMA_GROUPED, LLAMA_ODD, random_batch

MODELS = {
    "gpt2-untied": GPT2_UNTIED,
    "gpt2-odd-tied": GPT2_ODD,
    "llama-grouped": LLAMA_GROUPED,
    "llama-odd": LLAMA_ODD,
    "llama-tied": replace(LLAMA_GROUPED, tied=True),
    "llama-other-theta": replace(LLAMA_GROUPED, rope_theta=500.0),
}
CPU = torch.device("cpu")


@dataclass
class Result:
    """Logits, loss and gradients by our parameter names, gradients in our layout."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence transformers' log: it minds that no end-of-text token fits a vocabulary of 101."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def transformers_model(config: ModelConfig) -> nn.Module:
    if config.family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size, n_positions=config.max_seq_len, n_embd=config.width,
                n_layer=config.num_blocks, n_head=config.num_heads, n_inner=config.ffn_width,
                layer_norm_epsilon=config.norm_eps, tie_word_embeddings=config.tied,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
            )
        )  # fmt: skip
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.ffn_width,
                num_hidden_layers=config.num_blocks, num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads, max_position_embeddings=config.max_seq_len,
                rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                attn_implementation="eager",
            )
        )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than 0.02, and no ones and zeros: otherwise attention is uniform and half the layers idle.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def our_model(config: ModelConfig, source: nn.Module) -> BlockModel:
    model = build_model(config, torch.float32, CPU)
    load_hf_weights(model, source.state_dict())
    return model


def run_transformers(model: nn.Module, ours: BlockModel, token_ids_BT: Tensor, target_ids_BT: Tensor) -> Result:
    logits = model(token_ids_BT).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), target_ids_BT.flatten())
    loss.backward()
    grads = {}
    for name, _ in ours.named_unit_parameters():
        grad = model.get_parameter(hf_name(ours.config.family, name)).grad
        grads[name] = grad.t() if is_transposed(ours.config.family, name) else grad
    return Result(logits.detach(), loss.detach(), grads)


def run_ours(model: BlockModel, token_ids_BT: Tensor, target_ids_BT: Tensor) -> Result:
    hidden_BTD = model(token_ids_BT)
    loss = model.head(hidden_BTD, target_ids_BT)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_unit_parameters()}
    return Result(model.head.logits(hidden_BTD).detach(), loss.detach(), grads)


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    config = MODELS[name]
    source = transformers_model(config)
    ours = our_model(config, source)
    batch = random_batch(config, np.random.default_rng(0))
    token_ids_BT, target_ids_BT = torch.from_numpy(batch.token_ids_BT), torch.from_numpy(batch.target_ids_BT)
    actual = run_ours(ours, token_ids_BT, target_ids_BT)
    same_dtype = run_transformers(source, ours, token_ids_BT, target_ids_BT)
    source.zero_grad()
    exact = run_transformers(source.double(), ours, token_ids_BT, target_ids_BT)

    assert_close_to_exact("loss", actual.loss, same_dtype.loss, exact.loss)
    assert_close_to_exact("logits", actual.logits, same_dtype.logits, exact.logits)
    assert exact.grads.keys() == dict(source_names(ours)).keys()
    for name_, grad in actual.grads.items():
        assert_close_to_exact(name_, grad, same_dtype.grads[name_], exact.grads[name_])


def source_names(model: BlockModel) -> Iterator[tuple[str, str]]:
    for name, _ in model.named_unit_parameters():
        yield name, hf_name(model.config.family, name)


def assert_close_to_exact(name: str, actual: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
    # Twice transformers' own float32 error, and ten roundings of the largest element: a gradient went through about
    # fifty sums, whose errors walk at random (up to six roundings were seen over twelve seeds), and the float64 LLaMA
    # still normalises and turns in float32.
    floor = 1.2e-6 * exact.abs().max().item()
    assert_error_bound(actual, same_dtype, exact, floor=floor, name=name)
    assert exact.abs().max() > 1e-4, f"{name}: too small to compare"


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_transformers_has_one_of_ours(name: str) -> None:
    config = MODELS[name]
    source = transformers_model(config)
    ours = build_model(config, torch.float32, torch.device("meta"))
    assert sorted(theirs for _, theirs in source_names(ours)) == sorted(key for key, _ in source.named_parameters())


def test_missing_and_misshapen_weights_are_all_listed() -> None:
    state = dict(transformers_model(GPT2_ODD).state_dict())
    del state["transformer.h.1.ln_2.bias"]
    state["transformer.wpe.weight"] = torch.zeros(16, 36)
    state["transformer.h.0.attn.c_attn.weight"] = torch.zeros(108, 36)
    with pytest.raises(ConfigError) as raised:
        load_hf_weights(build_model(GPT2_ODD, torch.float32, CPU), state)
    assert raised.value.faults == (
        "transformer.wpe.weight: (16, 36) must be (17, 36)",
        "transformer.h.0.attn.c_attn.weight: (36, 108) must be (108, 36)",
        "transformer.h.1.ln_2.bias: missing",
    )
    assert str(raised.value).startswith("transformers weights: 3 faults")

"""Tiny models of transformers with random weights, of every family, and folders of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridtrain.models.hf_config import hf_config_of
from hybridtrain.models.model_config import ModelConfig
from tiny_models import FAMILIES, GPT2_ODD, GPT2_UNTIED, LLAMA_GROUPED, LLAMA_ODD

FAMILY_MODELS: dict[str, ModelConfig] = {
    "gpt2-untied": GPT2_UNTIED,
    "gpt2-odd-tied": GPT2_ODD,
    "llama": LLAMA_ODD,
    "llama-tied": replace(LLAMA_GROUPED, tied=True),
    **FAMILIES,
}


def _options(config: ModelConfig) -> dict[str, Any]:
    # The grouped kernel of transformers' experts wants rows of 16 bytes, which odd sizes have not.
    return {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if config.experts else {})


def transformers_model(config: ModelConfig) -> PreTrainedModel:
    """Return transformers' model of a shape, every value drawn."""
    values: dict[str, Any] = hf_config_of(replace(config, dropout=0.0))
    theirs = AutoConfig.for_model(values.pop("model_type"), **values)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(theirs, **_options(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            # Larger than 0.02, and no ones and zeros: otherwise attention is uniform and half the layers idle.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    return made.eval()


def save_model(model: PreTrainedModel, folder: Path, *, max_shard_size: str = "5GB") -> Path:
    """Save as transformers does, and return the folder."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_model(folder: Path, config: ModelConfig) -> PreTrainedModel:
    """Load as transformers does."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **_options(config))
    return loaded

"""Model families: one line each."""

from collections.abc import Callable

import torch

from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.gpt2 import build_gpt2
from hybridtrain.models.llama import build_llama
from hybridtrain.models.model_config import ModelConfig

MODEL_FAMILIES: dict[str, Callable[[ModelConfig, torch.dtype], BlockModel]] = {
    "gpt2": build_gpt2,
    "llama": build_llama,
}


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> BlockModel:
    """Return a model with uninitialised parameters of ``dtype`` on ``device`` (``meta`` allocates nothing)."""
    with torch.device(device):
        return MODEL_FAMILIES[config.family](config, dtype)

"""Model families: one line each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hybridtrain.models.block_model import BlockModel, BlockScope
from hybridtrain.models.gpt2 import build_gpt2
from hybridtrain.models.llama import build_llama
from hybridtrain.models.model_config import ModelConfig

MODEL_FAMILIES: dict[str, Callable[[ModelConfig, torch.dtype, BlockScope], BlockModel]] = {
    "gpt2": build_gpt2,
    "llama": build_llama,
}


def _plain_scope(_block: int) -> AbstractContextManager[None]:
    return nullcontext()


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, block_scope: BlockScope = _plain_scope
) -> BlockModel:
    """Return a model with uninitialised parameters of ``dtype`` on ``device`` (``meta`` allocates nothing).

    Each block is made within ``block_scope``, which may give its parameters no memory at all.
    """
    with torch.device(device):
        return MODEL_FAMILIES[config.family](config, dtype, block_scope)

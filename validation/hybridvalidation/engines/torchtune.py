"""torchtune's own recipes (recipes/full_finetune_single_device.py, lora_finetune_single_device.py), run as they are.

Only file access is replaced: weights are random, batches full, nothing is saved. The peak is the recipe's own log.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.compiled_graph import boundary
from hybridtrain.virtual_gpu.facade.traced_attention import flex_op
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.torchvision_ops import declare_torchvision_ops

_NUM_STEPS = 2
_HERE = "hybridvalidation.engines.torchtune"
_CLASSES = {
    "full_finetune_single_device": "FullFinetuneRecipeSingleDevice",
    "lora_finetune_single_device": "LoRAFinetuneRecipeSingleDevice",
}


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the largest of the peaks that the recipe logs per step."""
    gpu = VirtualGpu(find_card(config.get("card", card)))
    Log.peaks.clear()
    with suppress(torch.OutOfMemoryError), gpu:
        declare_torchvision_ops()
        _run({**common["overrides"], **config["overrides"]}, config["recipe"], config["config"])
    peak = max(Log.peaks, default=gpu.ledger.allocator.peak_active_bytes)
    return {"active_max": peak, "oom": float(gpu.oom is not None)}


class Log:
    """Keeps a recipe's logs."""

    peaks: list[float] = []  # noqa: RUF012  a recipe makes its logger by name: there is no other way out of it

    def log_config(self, config: Any) -> None:
        """Take the configuration."""

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:  # noqa: ARG002  torchtune's signature
        """Take the figures of a step."""
        self.peaks.append(payload["peak_memory_active"] * 2**30)

    def close(self) -> None:
        """Close the log."""


class Tokenizer:
    """Placeholder for a recipe's tokenizer: batches are made without one."""

    def __init__(self, **_options: Any) -> None:
        pass


class _Batches(list[dict[str, Tensor]]):
    """Batches and their sampler in one."""

    def set_epoch(self, epoch: int) -> None:
        """Ignore the epoch: every batch is the same."""


def _run(overrides: Mapping[str, Any], recipe: str, name: str) -> None:
    cfg = OmegaConf.load(_file(f"recipes/configs/{name}.yaml"))
    replaced = {"metric_logger": {"_component_": f"{_HERE}.Log"}, "tokenizer": {"_component_": f"{_HERE}.Tokenizer"}}
    for key, value in {**replaced, **overrides}.items():
        OmegaConf.update(cfg, key, value, merge=False)
    cfg.epochs = cfg.gradient_accumulation_steps = 1
    module = _recipe_module(recipe)
    with _without_files(module, cfg):
        job = getattr(module, _CLASSES[recipe])(cfg=cfg)
        job.setup(cfg=cfg)
        job.train()


@contextmanager
def _without_files(module: ModuleType, cfg: Any) -> Iterator[None]:
    recipe = next(getattr(module, name) for name in _CLASSES.values() if hasattr(module, name))
    training = import_module("torchtune.training")
    attention, precision = (import_module(f"torchtune.{name}") for name in ("modules.attention", "training.precision"))
    batches = _Batches(_batch(cfg) for _ in range(_NUM_STEPS))
    loaded = nn.modules.module._IncompatibleKeys([], [])
    with (
        mock.patch.object(recipe, "load_checkpoint", return_value={training.MODEL_KEY: {}}),
        mock.patch.object(nn.Module, "load_state_dict", return_value=loaded),
        mock.patch.object(module, "validate_missing_and_unexpected_for_lora", create=True),
        mock.patch.object(recipe, "_setup_data", return_value=(batches, batches)),
        mock.patch.object(recipe, "save_checkpoint"),
        mock.patch.object(precision, "verify_bf16_support", return_value=True),  # it asks for NCCL
        mock.patch.object(attention, "_sdpa_or_flex_attention", return_value=_flex),
    ):
        yield


def _batch(cfg: Any) -> dict[str, Tensor]:
    """Return a batch of packed sequences; its mask is a few kilobytes of blocks, and left out."""
    tokens = torch.zeros(cfg.batch_size, cfg.tokenizer.max_seq_len, dtype=torch.int64)
    return {"tokens": tokens, "labels": tokens.clone(), "input_pos": tokens.clone()}


def _file(path: str) -> str:
    return str(metadata.distribution("torchtune").locate_file(path))


def _recipe_module(name: str) -> ModuleType:
    spec = spec_from_file_location(f"torchtune_recipe_{name}", _file(f"recipes/{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flex(q: Tensor, k: Tensor, v: Tensor, **_options: Any) -> Tensor:
    """Attend as compiled flex attention does, between two graphs of the layer that calls it."""
    is_traced = torch.compiler.is_compiling()
    out: Tensor = flex_op(*(boundary(part) if is_traced else part for part in (q, k, v)))[0]
    return out

"""torchtune's own recipes (recipes/full_finetune_single_device.py, lora_finetune_single_device.py), run as they are.

Only file access is replaced: weights are random, batches full, nothing is saved. The peak is the recipe's own log.

Settings of a peer's row: ``recipe``, ``config`` (a file of torchtune's ``recipes/configs``), ``overrides`` of it, and
``lora``, arguments of torchtune's model with adapters. Model, batch, length and device are the row's; sequences are not
packed, as they are all of one length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module, metadata
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, get_origin, get_type_hints
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.compiled_graph import boundary
from hybridtrain.virtual_gpu.facade.traced_attention import flex_op
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.task import Task
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
    Log.steps.clear()
    overrides = {"gradient_accumulation_steps": 1, **common["overrides"], **config["overrides"]}
    with suppress(torch.OutOfMemoryError), gpu:
        _run(overrides, config["recipe"], config["config"], _packed, attend=_flex)
    peaks = (step["peak_memory_active"] * 2**30 for step in Log.steps)
    peak = max(peaks, default=gpu.ledger.allocator.peak_active_bytes)
    return {"active_max": peak, "oom": float(gpu.oom is not None)}


def train(task: Task) -> list[float]:
    """Run the steps; return the loss of each."""
    settings, shape = task.settings, task.model
    lora = settings.get("lora", {})
    model = {
        "_component_": f"torchtune.models.llama3.{'lora_llama3' if lora else 'llama3'}",
        "vocab_size": shape.vocab_size, "num_layers": shape.num_blocks, "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads, "embed_dim": shape.width, "max_seq_len": shape.max_seq_len,
        "intermediate_dim": shape.ffn_width, "rope_base": int(shape.rope_theta), **lora,
    }  # fmt: skip
    overrides = {
        "model": model, "batch_size": task.micro_batch_size, "gradient_accumulation_steps": task.micro_batches,
        "tokenizer.max_seq_len": task.workload.seq_len, "device": task.device,
        "log_peak_memory_stats": task.device == "cuda", "optimizer.lr": 1e-3, **settings.get("overrides", {}),
    }  # fmt: skip
    Log.steps.clear()
    batches = [{"tokens": torch.tensor(batch)} for batch in task.batches] * task.num_steps
    _run(
        overrides, settings["recipe"], settings["config"],
        lambda _cfg: [batch | {"labels": batch["tokens"].clone()} for batch in batches],
    )  # fmt: skip
    return [float(step["loss"]) for step in Log.steps]


class Log:
    """Keeps a recipe's logs."""

    steps: list[Mapping[str, float]] = []  # noqa: RUF012  a recipe makes its logger by name: no other way out of it

    def log_config(self, config: Any) -> None:
        """Take the configuration."""

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:  # noqa: ARG002  torchtune's signature
        """Take the figures of a step."""
        self.steps.append(payload)

    def close(self) -> None:
        """Close the log."""


class Tokenizer:
    """Placeholder for a recipe's tokenizer: batches are made without one."""

    def __init__(self, **_options: Any) -> None:
        pass


class _Batches(list[dict[str, Tensor]]):
    """Batches and their sampler in one."""

    @property
    def sampler(self) -> "_Batches":
        """The sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Ignore the epoch: every batch is the same."""


def _run(
    overrides: Mapping[str, Any],
    recipe: str,
    name: str,
    batches: Callable[[Any], Iterable[dict[str, Tensor]]],
    attend: Callable[..., Tensor] | None = None,
) -> None:
    declare_torchvision_ops()
    cfg = OmegaConf.load(_file(f"recipes/configs/{name}.yaml"))
    replaced = {"metric_logger": {"_component_": f"{_HERE}.Log"}, "tokenizer": {"_component_": f"{_HERE}.Tokenizer"}}
    for key, value in {**replaced, "epochs": 1, **overrides}.items():
        OmegaConf.update(cfg, key, value, merge=False)
    module = _recipe_module(recipe)
    with _without_files(module, _Batches(batches(cfg))), _attending(attend):
        job = getattr(module, _CLASSES[recipe])(cfg=cfg)
        job.setup(cfg=cfg)
        job.train()


@contextmanager
def _without_files(module: ModuleType, batches: _Batches) -> Iterator[None]:
    recipe = next(getattr(module, name) for name in _CLASSES.values() if hasattr(module, name))
    training, precision = import_module("torchtune.training"), import_module("torchtune.training.precision")
    loaded = nn.modules.module._IncompatibleKeys([], [])
    is_pair = get_origin(get_type_hints(recipe._setup_data)["return"]) is tuple  # until 0.4
    with (
        mock.patch.object(recipe, "load_checkpoint", return_value={training.MODEL_KEY: {}}),
        mock.patch.object(nn.Module, "load_state_dict", return_value=loaded),
        mock.patch.object(module, "validate_missing_and_unexpected_for_lora", create=True),
        mock.patch.object(recipe, "_setup_data", return_value=(batches, batches) if is_pair else batches),
        mock.patch.object(recipe, "save_checkpoint"),
        mock.patch.object(precision, "verify_bf16_support", return_value=True),  # it asks for NCCL
    ):
        yield


def _attending(attend: Callable[..., Tensor] | None) -> AbstractContextManager[Any]:
    if attend is None:
        return nullcontext()
    attention = import_module("torchtune.modules.attention")
    return mock.patch.object(attention, "_sdpa_or_flex_attention", return_value=attend)


def _packed(cfg: Any) -> list[dict[str, Tensor]]:
    """Return batches of packed sequences; their mask is a few kilobytes of blocks, and left out."""
    tokens = torch.zeros(cfg.batch_size, cfg.tokenizer.max_seq_len, dtype=torch.int64)
    return [
        {"tokens": tokens.clone(), "labels": tokens.clone(), "input_pos": tokens.clone()} for _ in range(_NUM_STEPS)
    ]


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

"""PEFT: adapters on a frozen model, trained by transformers' Trainer, or by the loop of its method comparison.

``train``: settings are ``adapter`` (``peft_type`` and the arguments of its configuration) and ``trainer``
(``TrainingArguments``). ``quantize`` has arguments of ``BitsAndBytesConfig``; none: the task's precision. ``prepare``
(``prepare_model_for_kbit_training``, by default true) widens embedding, head and norms to fp32.

``plan`` is that comparison (method_comparison/MetaMathQA/run.py): one model, every method, lengths as in the corpus.
The loop is that script's: batches of a bucket from long to short, gradients dropped before the forward pass. Outputs
(logits and key-value cache) live until the next step; the allocator's cache is emptied after every tenth one. Six steps
represent the twenty of a bucket.
"""

import dataclasses
from collections.abc import Callable, Mapping
from statistics import NormalDist, mean
from typing import Any

import peft
import torch
from peft.optimizers import create_lorafa_optimizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.hf_model import build_model
from hybridvalidation.engines.task import Task
from hybridvalidation.engines.transformers import run_trainer

_EMPTY_EVERY = 10
_BUCKET = 20
"""Batches."""
_SPANS = (range(1), range(1, 5), range(5, 10), range(10, 11), range(11, 15), range(15, 20))
"""Batches of a bucket per simulated step, of their mean length; the longest ones after an emptied cache are simulated
singly."""


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return mean allocated and reserved bytes at the end of steps, peak reserved bytes, and seconds per step.

    The seconds are for a step of mean length.
    """
    settings = {**common["train"], **config.get("train", {})}
    lengths = bucket_lengths(common["tokens_per_sample"], common["spread"], settings["batch_size"])
    allocated, reserved = 0.0, 0.0
    with VirtualGpu(find_card(card)) as gpu:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**common["model"]), dtype=torch.bfloat16)
        model = model.to("cuda")
        if config.get("adapter"):
            model = _with_adapter(model, config["adapter"], is_wide=settings["autocast_adapter_dtype"])
        optimizer = _make_optimizer(model, settings)
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if config.get("adapter"):
            # The script first takes the base model's loss. Leaving the block makes all of the adapter trainable again,
            # also what an optimizer froze (LoRA-FA's A), after the script has counted parameters.
            with model.disable_adapter():
                pass
        model.train()
        # One step first: it makes the optimizer's state, as thousands before the average step did.
        outputs = _step(model, optimizer, settings, lengths[_BUCKET // 2])
        for span in _SPANS:
            if span.start % _EMPTY_EVERY == 0:
                torch.cuda.empty_cache()
            outputs = _step(model, optimizer, settings, round(mean(lengths[span.start : span.stop])))
            allocated += torch.cuda.memory_allocated() * len(span) / _BUCKET
            reserved += torch.cuda.memory_reserved() * len(span) / _BUCKET
        torch.cuda.empty_cache()
        outputs = _step(model, optimizer, settings, common["longest"])
        largest = torch.cuda.max_memory_reserved()
        gpu.begin_step()
        outputs = _step(model, optimizer, settings, round(mean(lengths)))
        del outputs
    return {
        "allocated_mean": allocated, "reserved_mean": reserved, "reserved_max": largest, "trainable_params": trainable,
        "step_seconds": gpu.report().time.seconds,
    }  # fmt: skip


def train(task: Task) -> list[float]:
    """Run the steps; return the loss of each."""
    settings = task.settings
    model = _quantized(task, settings["quantize"]) if settings.get("quantize") else build_model(task)
    if settings.get("quantize") and settings.get("prepare", True):
        is_checkpointed = bool(settings["trainer"].get("gradient_checkpointing"))
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=is_checkpointed)
    return run_trainer(task, _with_adapter(model, settings["adapter"]), settings["trainer"])


def _quantized(task: Task, settings: Mapping[str, Any]) -> Any:
    """Build the model of ``from_pretrained`` with a ``BitsAndBytesConfig``, from random weights instead of a file's."""
    whole = build_model(task)
    kind, config, weights = type(whole), whole.config, whole.state_dict()
    return kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=whole.dtype, device_map={"": task.device},
        quantization_config=BitsAndBytesConfig(**settings),
    )  # fmt: skip


def bucket_lengths(tokens_per_sample: float, spread: float, batch_size: int) -> list[int]:
    """Return the padded lengths of a bucket's batches, long to short.

    Sample lengths are assumed log-normal; a bucket has their quantiles, a batch the length of its longest.

    >>> bucket_lengths(210, 0.3, 4)[::5]
    [425, 247, 198, 158]
    """
    count = _BUCKET * batch_size
    normal = NormalDist()
    quantiles = [normal.inv_cdf((position + 0.5) / count) for position in range(count)]
    scale = tokens_per_sample / mean(pow(2.718281828459045, spread * value) for value in quantiles)
    samples = sorted((round(scale * pow(2.718281828459045, spread * value)) for value in quantiles), reverse=True)
    return samples[::batch_size]


def _step(model: Any, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], length: int) -> Any:
    ids = torch.zeros(settings["batch_size"], length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[-1, length - 1 :] = 0  # a batch of samples that are not all of one length
    batch = {"input_ids": ids.to("cuda"), "attention_mask": mask.to("cuda")}
    batch["labels"] = batch["input_ids"].clone()
    num_items = batch["attention_mask"].sum().item()
    optimizer.zero_grad()
    outputs = model(**batch, num_items_in_batch=num_items)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_norm_clip"])
    optimizer.step()
    if type(getattr(model, "base_model", None)).__name__ in {"AdaLoraModel", "AdamssModel"}:
        model.base_model.update_and_allocate(1)
    outputs.loss.item()
    return outputs


def _with_adapter(model: Any, adapter: Mapping[str, Any], *, is_wide: bool = True) -> Any:
    """Return the model with an adapter, in fp32 (PEFT's default) or in the element type of its weights."""
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[adapter["peft_type"]]
    known = {field.name for field in dataclasses.fields(kind)}
    wanted = {name: value for name, value in adapter.items() if name != "peft_type"}
    unknown = sorted(wanted.keys() - known)
    if unknown:
        raise ValueError(f"peft {peft.__version__} has no {', '.join(unknown)} in {kind.__name__}")
    found = kind(**wanted, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, found, autocast_adapter_dtype=is_wide)


def _make_optimizer(model: Any, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    name, arguments = settings["optimizer_type"], settings["optimizer_kwargs"]
    make = create_lorafa_optimizer if name == "lora-fa" else _of_torch(name)
    made: torch.optim.Optimizer = make(model, **arguments)
    return made


def _of_torch(name: str) -> Callable[..., torch.optim.Optimizer]:
    return lambda model, **arguments: getattr(torch.optim, name)(model.parameters(), **arguments)

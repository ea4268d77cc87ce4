"""A plain PyTorch loop around transformers' model: no trainer, the optimizer by its name.

Settings: ``optimizer`` (a dotted path in torch.optim, torchao.optim or bitsandbytes.optim), its ``arguments``
(``optimizer_class`` is a path too), ``gradient_checkpointing``, and ``update_in_backward``: one optimizer per
parameter, stepped as soon as its gradient exists, with one micro-batch
(pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html).
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from hybridvalidation.engines.hf_model import build_model
from hybridvalidation.engines.task import Task


def train(task: Task) -> list[float]:
    """Run the steps; return the loss of each."""
    settings = task.settings
    model = build_model(task).to(task.device).train()
    if settings.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable()
    update = _updater(model, settings)
    return [_step(model, task, update) for _ in range(task.num_steps)]


def _step(model: Any, task: Task, update: Callable[[], None]) -> float:
    total = 0.0
    for batch in task.batches:
        ids = torch.tensor(batch).to(task.device)
        with torch.autocast(task.device, dtype=torch.bfloat16, enabled=task.precision == "mixed"):
            loss = model(input_ids=ids, labels=ids).loss / task.micro_batches
        loss.backward()
        total += loss.item()
        del loss
    update()
    return total


def _updater(model: nn.Module, settings: dict[str, Any]) -> Callable[[], None]:
    make, arguments = resolve_name(settings["optimizer"]), dict(settings.get("arguments", {}))
    if "optimizer_class" in arguments:
        arguments["optimizer_class"] = resolve_name(arguments["optimizer_class"])
    if not settings.get("update_in_backward"):
        optimizer = make(model.parameters(), **arguments)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update
    for parameter in model.parameters():
        _update_in_backward(parameter, make([parameter], **arguments))
    return lambda: None


def _update_in_backward(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    def update(_parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

"""Training task of an engine: one model, the tokens of a step, and a recipe in the engine's own settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.stacks import Stack

Precision = Literal["bf16", "mixed"]
"""``bf16``: weights, gradients and optimizer state are bf16. ``mixed``: they are fp32, and autocast runs in bf16."""
ENGINES: Mapping[str, tuple[str, ...]] = {
    "hybridtrain": ("torch",),
    "torch": ("torch", "transformers"),
    "transformers": ("torch", "transformers", "accelerate"),
    "trl": ("torch", "transformers", "accelerate", "trl"),
    "peft": ("torch", "transformers", "accelerate", "peft"),
    "litgpt": ("torch", "lightning", "litgpt"),
    "torchtune": ("torch", "torchtune", "torchao"),
}
"""Engines: file name in this folder -> packages that it always needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One recipe, on the available device."""

    engine: str
    model: ModelConfig
    workload: BatchWorkload
    """Batch of one optimizer step."""
    micro_batches: int = 1
    """Number of equal micro-batches of the batch."""
    precision: Precision = "bf16"
    config: str = "{}"
    """Settings as JSON, with the engine's own names."""
    stack: Stack | None = None
    """Stack of our own engine."""
    num_steps: int = 2
    """Steps: the first creates the optimizer's state, the second runs with it."""
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def settings(self) -> dict[str, Any]:
        """The parsed ``config``."""
        found: dict[str, Any] = json.loads(self.config)
        return found

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch."""
        return self.workload.batch_size // self.micro_batches

    @property
    def sample(self) -> list[int]:
        """Tokens of the sequence, which is always the same, so that learning shows."""
        return [13 * place % self.model.vocab_size for place in range(self.workload.seq_len)]

    @property
    def batches(self) -> list[list[list[int]]]:
        """Tokens of the micro-batches of a step."""
        return [[self.sample] * self.micro_batch_size] * self.micro_batches

    def small(self) -> "Task":
        """Return the recipe at a size that a CPU trains in a second."""
        shape = self.model
        kv_heads = max(1, 4 * shape.num_kv_heads // shape.num_heads)
        model = replace(
            shape, vocab_size=512, max_seq_len=64, num_blocks=2, width=128, num_heads=4, num_kv_heads=kv_heads,
            ffn_width=256, head_size=32 if shape.head_size else 0,
            experts=replace(shape.experts, count=4, per_token=2, ffn_width=64) if shape.experts else None,
        )  # fmt: skip
        workload = BatchWorkload(batch_size=2 * self.micro_batches, seq_len=32)
        return replace(self, model=model, workload=workload, num_steps=5, device="cpu")


def train(task: Task) -> list[float]:
    """Run the steps of a task; return the loss of each."""
    return engine_of(task).train(task)  # type: ignore[no-any-return]


def engine_of(task: Task) -> Any:
    """Return the engine's module."""
    return import_module(f"hybridvalidation.engines.{task.engine}")

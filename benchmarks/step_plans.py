"""Recorded steps of recorded_steps.toml as counts of kernels, by dry runs of our trainer.

A model is recorded with one block and with two, a micro-batch at a time; a longer one adds their difference. What the
source's software does otherwise is told by ``benchmarks/time_model.py``.
"""

import pickle
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from recorded_steps import Register, Source, Step

from hybridtrain.config.decode import decode
from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.models.presets import SHAPES
from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Nf4Weights,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.cards.card import find_card

Key = tuple[Any, ...]
"""Name, stage, flops, bytes, dtype and shape of an op."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the kernels of a micro-batch."""

    model: str
    micro_batch: int
    length: int
    is_checkpointed: bool
    method: str
    rank: int
    targets: tuple[str, ...]

    @property
    def stack(self) -> list[Optimization]:
        """The recipe in our terms, with one micro-batch."""
        stack: list[Optimization] = [
            MixedPrecision(master="absent"),
            GradAccumulation(grad_accum_steps=1, accumulator="bfloat16"),
        ]
        if self.is_checkpointed:
            stack.append(GradientCheckpointing(recompute_every=1))
        if self.method in {"lora", "qlora"}:
            stack.append(Lora(rank=self.rank, targets=self.targets))
        if self.method == "qlora":
            stack.append(Nf4Weights())
        return stack


ADAPTED = {
    "foundation-model-stack/fms-acceleration": ("attention",),
    "huggingface/peft": ("query", "value"),
    "pytorch/torchtune": ("query", "value", "attention_out", "mlp"),
}
"""Matrices with an adapter, by repository; all of a block in others."""


def recipe_of(source: Source, step: Step) -> Recipe | None:
    """Return the recipe; None of a step that is not planned here."""
    targets = ADAPTED.get(source.repository, ("all-linear",)) if step.method != "full" else ("all-linear",)
    if step.method == "adapter" or not step.length or not step.micro_batch:
        return None
    return Recipe(
        step.model, step.micro_batch, step.length, step.checkpointing in {"full", "offload"}, step.method, 16,
        targets,
    )  # fmt: skip


def model_of(register: Register, name: str, length: int) -> ModelConfig | None:
    """Return a decoder's shape; None of a foreign model."""
    if name in register.shapes:
        config = register.shapes[name]
    elif name in SHAPES:
        config = decode(ModelConfig, dict(SHAPES[name]), source=name)
    else:
        return None
    return replace(config, max_seq_len=max(length, config.max_seq_len)) if config.max_seq_len < length else config


def kernels_of(config: ModelConfig, recipe: Recipe) -> tuple[Counter[Key], Counter[Key]]:
    """Return forward and backward of a micro-batch, and the kernels of one more block."""
    counts = []
    for blocks in (1, 2):
        ids = np.zeros((recipe.micro_batch, recipe.length), dtype=np.int64)
        batch = TokenBatch(token_ids_BT=ids, target_ids_BT=ids)
        plan = compose(recipe.stack)
        trace = record_steps(
            replace(config, num_blocks=blocks), plan, [[batch]], VirtualTransfer(), card=find_card("a100-80gb")
        )
        counts.append(
            Counter(
                (op.name, op.stage.value, op.flops, op.bytes_moved, op.dtype, op.shape)
                for op in trace.step_ops(0)
                if op.lane is Lane.COMPUTE and op.bytes_moved and op.stage in {Stage.FORWARD, Stage.BACKWARD}
            )
        )
    one, two = counts
    return one, two - one


def load_kernels(path: Path) -> dict[Any, Any]:
    """Return kept kernels, by recipe."""
    return pickle.loads(path.read_bytes()) if path.exists() else {}  # noqa: S301  our own file

"""The one executor: it realises any plan and never asks which optimization is on.

A micro-batch passes embedding, blocks and head, and back. A horizontal schedule does that for each micro-batch in turn;
a vertical one takes all micro-batches of the step through a block before the next block is touched. Both are bit-equal
to plain autograd: every sum of gradients has the order that ``loss.backward()`` per micro-batch would give it.

B batch, T sequence, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.engine.block_step import BlockGraph, differentiate_block, run_block
from hybridtrain.engine.head_step import differentiate_head, differentiate_tied_weight
from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.boundary_store import BoundaryStore
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.transfer import Transfer
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import BlockModel
from hybridtrain.plan.claim import Schedule
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.profiler.observer import MemoryObserver, Stage


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on the compute device, int64."""

    token_ids_BT: Tensor
    target_ids_BT: Tensor


class Executor:
    """Runs forward and backward passes of one model under one plan; gradients end up in ``grads``."""

    def __init__(self, model: BlockModel, plan: PhasePlan, transfer: Transfer, observer: MemoryObserver) -> None:
        self._plan = plan
        self._transfer = transfer
        self._observer = observer
        self._units = model.units()
        self._num_blocks = len(model.blocks)
        self._is_tied = model.config.tied
        self._draws = model.config.dropout > 0
        self._weights = WeightStore(model)
        self._boundaries = BoundaryStore(observer)
        vertical = plan.schedule is Schedule.VERTICAL and plan.grad_accum_steps > 1
        kept_dtype = to_torch_dtype(plan.grad.codec)
        self.grads = GradStore(
            self._units,
            sum_dtype=torch.float32 if vertical else kept_dtype,
            kept_dtype=kept_dtype,
            observer=observer,
        )
        interval = plan.recompute_every or 1
        self._segments = [
            range(start, min(start + interval, self._num_blocks)) for start in range(0, self._num_blocks, interval)
        ]

    def forward_backward(self, batches: Sequence[DeviceBatch], *, seed: int) -> list[Tensor]:
        """Return the loss of each micro-batch; add 1/len(batches) times their gradients to ``grads``.

        Args:
            batches: The micro-batches of one optimizer step.
            seed: Key of the step's random streams (dropout).

        Returns:
            Scalars float32 on the device, mean cross entropy in nats per token.
        """
        groups: list[list[int]] = [[index] for index in range(len(batches))]
        if self._plan.schedule is Schedule.VERTICAL:
            groups = [list(range(len(batches)))]
        losses: list[Tensor] = []
        with self._transfer.keyed_random():
            for group in groups:
                visit = _Visit(self, batches, group, seed)
                losses += visit.run()
        for unit in self._units:
            with self._observer.region(Stage.BACKWARD, unit.name):
                self.grads.seal(unit.name)
        return losses

    @torch.no_grad()
    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return logits_BTV in the compute dtype, without dropout if the model is in eval mode."""
        hidden_BTD = self._weights.acquire_embedding()(token_ids_BT)
        for block in range(self._num_blocks):
            hidden_BTD = self._weights.acquire(block)(hidden_BTD)
        return self._weights.acquire_head().logits(hidden_BTD)

    def drop(self) -> None:
        """Forget gradients and boundaries of an unfinished step."""
        self.grads.drop()
        self._boundaries.drop()


class _Visit:
    """Forward and backward of a group of micro-batches through all units."""

    def __init__(self, executor: Executor, batches: Sequence[DeviceBatch], group: Sequence[int], seed: int) -> None:
        self._executor = executor
        self._batches = batches
        self._group = group
        self._seed = seed
        self._scale = 1.0 / len(batches)
        self._recomputes = executor._plan.recompute_every > 0
        self._defers_tied = executor._is_tied and len(group) > 1
        self._embedded: dict[int, GradientEdge] = {}
        self._graphs: dict[tuple[int, int], BlockGraph] = {}
        self._hidden: dict[int, Tensor] = {}
        self._grad: dict[int, Tensor] = {}
        self._tied_grads: dict[int, Tensor] = {}

    def run(self) -> list[Tensor]:
        for micro_batch in self._group:
            self._embed(micro_batch)
        for segment in self._executor._segments:
            for micro_batch in self._group:
                self._forward_segment(micro_batch, segment)
        losses = [self._head(micro_batch) for micro_batch in self._group]
        for segment in reversed(self._executor._segments):
            for micro_batch in self._group:
                self._backward_segment(micro_batch, segment)
        for micro_batch in self._group:
            self._embed_backward(micro_batch)
        return losses

    def _seed_unit(self, micro_batch: int, unit: int) -> None:
        if self._executor._draws:
            self._executor._transfer.seed(random_key(self._seed, micro_batch, unit))

    def _embed(self, micro_batch: int) -> None:
        executor = self._executor
        with executor._observer.region(Stage.FORWARD, "embedding"):
            self._seed_unit(micro_batch, 0)
            with torch.enable_grad():
                embedded_BTD = executor._weights.acquire_embedding()(self._batches[micro_batch].token_ids_BT)
        self._embedded[micro_batch] = get_gradient_edge(embedded_BTD)
        self._hidden[micro_batch] = embedded_BTD.detach()

    def _forward_segment(self, micro_batch: int, segment: range) -> None:
        hidden_BTD = self._hidden.pop(micro_batch)
        for block in segment:
            if block == segment.start or not self._recomputes:
                self._executor._boundaries.put(micro_batch, block, hidden_BTD)
            hidden_BTD = self._forward_block(micro_batch, block, hidden_BTD)
        self._hidden[micro_batch] = hidden_BTD

    def _forward_block(self, micro_batch: int, block: int, hidden_BTD: Tensor) -> Tensor:
        module = self._executor._weights.acquire(block)
        with self._executor._observer.region(Stage.FORWARD, f"block.{block}"):
            self._seed_unit(micro_batch, block + 1)
            if self._recomputes:
                with torch.no_grad():
                    result: Tensor = module(hidden_BTD)
                return result
            self._graphs[micro_batch, block], hidden_BTD = run_block(module, hidden_BTD)
        return hidden_BTD

    def _head(self, micro_batch: int) -> Tensor:
        executor = self._executor
        hidden_BTD = self._hidden.pop(micro_batch)
        with executor._observer.region(Stage.BACKWARD, "head"):
            step = differentiate_head(
                executor._weights.acquire_head(), executor._units[-1], hidden_BTD,
                self._batches[micro_batch].target_ids_BT, scale=self._scale,
                chunk_tokens=executor._plan.loss_chunk_tokens, wants_tied=not self._defers_tied,
            )  # fmt: skip
            executor.grads.accumulate("head", step.unit_grads)
        self._grad[micro_batch] = step.grad_BTD
        if step.tied_grad_VD is not None:
            self._tied_grads[micro_batch] = step.tied_grad_VD
        if self._defers_tied:
            executor._boundaries.put(micro_batch, executor._num_blocks, hidden_BTD)
        return step.loss

    def _backward_segment(self, micro_batch: int, segment: range) -> None:
        executor = self._executor
        if self._recomputes:
            hidden_BTD = executor._boundaries.take(micro_batch, segment.start)
            for block in segment:
                with executor._observer.region(Stage.BACKWARD, f"block.{block}"):
                    self._seed_unit(micro_batch, block + 1)
                    graph, hidden_BTD = run_block(
                        executor._weights.acquire(block), hidden_BTD, computes_output=block != segment[-1]
                    )
                self._graphs[micro_batch, block] = graph
                del graph
            del hidden_BTD
        for block in reversed(segment):
            if not self._recomputes:
                executor._boundaries.take(micro_batch, block)
            unit = executor._units[block + 1]
            with executor._observer.region(Stage.BACKWARD, unit.name):
                self._grad[micro_batch], grads = differentiate_block(
                    self._graphs.pop((micro_batch, block)), unit.tensors, self._grad.pop(micro_batch)
                )
                executor.grads.accumulate(unit.name, grads)
                del grads  # or they would live through the next block's backward pass

    def _embed_backward(self, micro_batch: int) -> None:
        executor = self._executor
        unit = executor._units[0]
        with executor._observer.region(Stage.BACKWARD, unit.name):
            grads = list(
                torch.autograd.grad(self._embedded.pop(micro_batch), unit.tensors, self._grad.pop(micro_batch))
            )
            if executor._is_tied:
                grads[0] = self._tied_grad(micro_batch).add_(grads[0])
            executor.grads.accumulate(unit.name, grads)

    def _tied_grad(self, micro_batch: int) -> Tensor:
        """Return the head's contribution to the token embedding's gradient, which is the unit's first parameter."""
        if not self._defers_tied:
            return self._tied_grads.pop(micro_batch)
        executor = self._executor
        return differentiate_tied_weight(
            executor._weights.acquire_head(),
            executor._boundaries.take(micro_batch, executor._num_blocks),
            self._batches[micro_batch].target_ids_BT,
            scale=self._scale,
            chunk_tokens=executor._plan.loss_chunk_tokens,
        )

"""The one executor: it realises any plan and never asks which optimization is on.

A micro-batch passes embedding, blocks and head, and back. A horizontal schedule does that for each micro-batch in turn;
a vertical one takes all micro-batches of the step through a block before the next block is touched. Both are bit-equal
to plain autograd: every sum of gradients has the order that ``loss.backward()`` per micro-batch would give it.

B batch, T sequence, D width, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.engine.step import StepShare
from hybridtrain.engine.step_visit import BlockDone, DeviceBatch, StepVisit
from hybridtrain.memory.boundary_store import BoundaryStore
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.weight_store import Visit, WeightStore
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.layers import ATTENTION
from hybridtrain.models.linear import Linear
from hybridtrain.plan.memory_plan import LinearKind, PhasePlan, Schedule
from hybridtrain.virtual_gpu.observer import MemoryObserver


class Executor:
    """Runs forward and backward passes of one model under one plan; gradients end up in ``grads``.

    Args:
        model: Its packed blocks bound by ``weights``.
        weights: Hands out the model's parts.
        plan: Of the phase.
        wants_norm: Whether the global norm of the gradients will be asked for.
        copies: The device, and the way to the other tiers.
        observer: Told what each tensor is for.
        shards: What of gradients this rank keeps; None: everything.
    """

    def __init__(
        self,
        model: BlockModel,
        weights: WeightStore,
        plan: PhasePlan,
        *,
        wants_norm: bool,
        copies: CopyEngine,
        observer: MemoryObserver,
        shards: Shards | None = None,
    ) -> None:
        self.plan = plan
        self._model = model
        self.transfer = copies.transfer
        self.observer = observer
        self.units = model.units()
        self.num_blocks = len(model.blocks)
        self.trains_tied = model.config.tied and model.head.weight.requires_grad
        experts = model.config.experts
        self.balances = experts is not None and experts.balance_coefficient > 0
        self.scale_loss = model.scale_loss
        self.draws = model.config.dropout > 0 or plan.adapter_dropout > 0
        self.weights = weights
        self._wants_norm = wants_norm
        self._copies = copies
        self._shards = shards or Shards(copies)
        self._arrange(plan)
        self._served = plan
        """Plan that gradients and boundaries are stored by: the last one with backward passes."""
        self.boundaries = BoundaryStore(plan.boundary.placement, copies, observer)
        self.grads = self._new_grads()

    def enter(self, plan: PhasePlan, weights: WeightStore, *, runs_backward: bool) -> None:
        """Go on under another plan, between two steps; without backward passes the stores for them are left alone."""
        self.plan, self.weights = plan, weights
        self._arrange(plan)
        if not runs_backward:
            return
        before, self._served = self._served, plan
        if _boundary_storage(before) != _boundary_storage(plan):
            self.boundaries.release()
            self.boundaries = BoundaryStore(plan.boundary.placement, self._copies, self.observer)
        if _grad_storage(before) != _grad_storage(plan):
            self.grads.release()
            self.grads = self._new_grads()

    def _arrange(self, plan: PhasePlan) -> None:
        """Set how attention is computed, and lay out the segments of blocks that are recomputed together."""
        self._model.compute_attention(ATTENTION[plan.attention])
        for linear in (module for module in self._model.blocks.modules() if isinstance(module, Linear)):
            linear.is_ternary = plan.linear is LinearKind.TERNARY
        self.num_recomputed = max(self.num_blocks - plan.kept_blocks, 0) if plan.recompute_every else 0
        interval = plan.recompute_every or 1
        self.segments = [
            range(start, min(start + interval, self.num_recomputed))
            for start in range(0, self.num_recomputed, interval)
        ] + [range(block, block + 1) for block in range(self.num_recomputed, self.num_blocks)]

    def _new_grads(self) -> GradStore:
        plan = self.plan
        vertical = plan.schedule is Schedule.VERTICAL and plan.grad_accum_steps > 1
        kept_dtype = to_torch_dtype(plan.grad.codec)
        return GradStore(
            self.units,
            sum_dtype=torch.float32 if vertical else kept_dtype,
            kept_dtype=kept_dtype,
            placement=plan.grad.placement,
            wants_norm=self._wants_norm,
            copies=self._copies,
            observer=self.observer,
            shards=self._shards,
            grad_accum_steps=plan.grad_accum_steps,
        )

    def forward_backward(
        self,
        batches: Sequence[DeviceBatch],
        *,
        seed: int,
        share: StepShare | None = None,
        on_block_done: BlockDone | None = None,
        loss_scale: float = 1.0,
    ) -> list[Tensor]:
        """Return the loss of each micro-batch; add the gradients of the mean over all their targets to ``grads``.

        Args:
            batches: The micro-batches of one optimizer step.
            seed: Key of the step's random streams (dropout).
            share: Which of the step's micro-batches these are; None: all of them.
            on_block_done: Called after a block's last visit, while its weights are on the device.
            loss_scale: Factor of the gradients.

        Returns:
            Scalars float32 on the device, mean cross entropy in nats per token.
        """
        share = share or StepShare(0, tuple(batch.num_targets for batch in batches))
        groups = self._groups(len(batches))
        calls = on_block_done is not None
        self.weights.plan_visits(
            [visit for group in groups for visit in self._visits(len(group), calls=calls and group is groups[-1])]
        )
        losses: list[Tensor] = []
        with self.transfer.keyed_random():
            for group in groups:
                visit = StepVisit(
                    self, batches, group, seed, share=share, is_last=group is groups[-1], on_block_done=on_block_done,
                    loss_scale=loss_scale,
                )  # fmt: skip
                losses += visit.run()
        return losses

    @torch.no_grad()
    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return logits_BTV in the compute dtype, without dropout if the model is in eval mode."""
        self.weights.plan_visits([*_whole(range(self.num_blocks))])
        hidden_BTD = self.weights.acquire_embedding()(token_ids_BT)
        for block in range(self.num_blocks):
            hidden_BTD = self.weights.acquire(block)(hidden_BTD)
        return self.weights.acquire_head().logits(hidden_BTD)

    @torch.no_grad()
    def loss(self, batch: DeviceBatch) -> Tensor:
        """Return the mean cross entropy of a batch in nats per token, a scalar float32; nothing is kept."""
        self.weights.plan_visits([*_whole(range(self.num_blocks))])
        hidden_BTD = self.weights.acquire_embedding()(batch.token_ids_BT, batch.documents)
        for block in range(self.num_blocks):
            hidden_BTD = self.weights.acquire(block)(hidden_BTD, batch.documents)
        loss: Tensor = self.weights.acquire_head()(
            hidden_BTD, batch.target_ids_BT, chunk_tokens=self.plan.loss_chunk_tokens, num_targets=batch.num_targets
        )
        return loss

    def drop(self) -> None:
        """Forget gradients and boundaries of an unfinished step."""
        self.grads.drop()
        self.boundaries.drop()

    def _groups(self, count: int) -> list[range]:
        """Return the micro-batches that are taken through the blocks together."""
        size = 1 if self.plan.schedule is Schedule.HORIZONTAL else self.plan.visit_micro_batches or count
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _visits(self, group_size: int, *, calls: bool) -> Iterator[Visit]:
        """Yield the blocks in the order in which ``StepVisit`` asks for them; ``calls``: ``on_block_done`` is."""
        yield from _whole(range(self.num_blocks))
        for segment in reversed(self.segments):
            for _ in range(group_size):
                if segment.start < self.num_recomputed:
                    yield from _whole(segment)
                yield from _whole(reversed(segment))
            if calls:
                yield from (Visit(block) for block in reversed(segment))


def _whole(blocks: Iterable[int]) -> Iterator[Visit]:
    """Yield the visits of blocks that are computed with."""
    return (Visit(block, is_whole=True) for block in blocks)


def _boundary_storage(plan: PhasePlan) -> tuple[object, ...]:
    """Return what decides which boundaries are kept, where, and of which size."""
    return plan.boundary, plan.compute_dtype, plan.recompute_every, plan.kept_blocks, plan.schedule


def _grad_storage(plan: PhasePlan) -> tuple[object, ...]:
    return plan.grad, plan.schedule, plan.grad_accum_steps

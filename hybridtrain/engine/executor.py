"""The one executor: it realises any plan and never asks which optimization is on.

A micro-batch passes embedding, blocks and head, and back. A horizontal schedule does that for each micro-batch in turn;
a vertical one takes all micro-batches of the step through a block before the next block is touched. Both are bit-equal
to plain autograd: every sum of gradients has the order that ``loss.backward()`` per micro-batch would give it.

B batch, T sequence, D width, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
from hybridtrain.models.block_model import BlockModel, Documents
from hybridtrain.models.layers import ATTENTION
from hybridtrain.models.linear import Linear
from hybridtrain.plan.memory_plan import LinearKind, PhasePlan, Schedule, suited
from hybridtrain.virtual_gpu.account.observer import MemoryObserver


@dataclass(frozen=True, slots=True)
class Pass:
    """Of a group of micro-batches through the held blocks."""

    group: range
    is_backward: bool = False


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
        self.units = model.units(everywhere=True)
        self.part = model.part
        self.copies = copies
        self.stages_after = 0 if self.part.is_whole else copies.group.world - 1 - copies.group.rank
        """Of a pipeline; the last one has the head."""
        self.width = model.config.width
        self.trains_tied = model.config.tied and model.head.weight.requires_grad
        experts = model.config.experts
        self.balanced = experts if experts is not None and experts.balance_coefficient else None
        self.draws = model.config.dropout > 0 or plan.adapter_dropout > 0
        self.weights = weights
        self._wants_norm = wants_norm
        self._shards = shards or Shards(copies)
        self._arrange(plan)
        self._served = plan
        """Plan that gradients and boundaries are stored by: the last one with backward passes."""
        self.boundaries = self._new_boundaries()
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
            self.boundaries = self._new_boundaries()
        if _grad_storage(before) != _grad_storage(plan):
            self.grads.release()
            self.grads = self._new_grads()

    def _arrange(self, plan: PhasePlan) -> None:
        """Set how attention is computed, and lay out the segments of blocks that are recomputed together."""
        self._model.compute_attention(ATTENTION[plan.attention])
        for linear in (module for module in self._model.blocks.modules() if isinstance(module, Linear)):
            linear.is_ternary = plan.linear is LinearKind.TERNARY
        first, stop = self.part.blocks.start, self.part.blocks.stop
        plan = suited(plan, stop - first)
        self.first_kept = stop - plan.kept_blocks if plan.recompute_every else first
        interval = plan.recompute_every or 1
        self.segments = [
            range(start, min(start + interval, self.first_kept)) for start in range(first, self.first_kept, interval)
        ] + [range(block, block + 1) for block in range(self.first_kept, stop)]

    def _new_boundaries(self) -> BoundaryStore:
        return BoundaryStore(
            self.plan.boundary.placement, self.copies, self.observer, by_micro_batch=not self.part.is_whole
        )

    def _new_grads(self) -> GradStore:
        plan = self.plan
        vertical = plan.schedule is Schedule.VERTICAL and plan.grad_accum_steps > 1
        kept_dtype = to_torch_dtype(plan.grad.codec)
        return GradStore(
            self._model.units(),
            sum_dtype=torch.float32 if vertical else kept_dtype,
            kept_dtype=kept_dtype,
            placement=plan.grad.placement,
            wants_norm=self._wants_norm,
            copies=self.copies,
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
            Scalars float32 on the device, mean cross entropy in nats per token; none where another stage has the head.
        """
        share = share or StepShare(0, tuple(batch.num_targets for batch in batches))
        groups = self._groups(len(batches))
        passes = self._passes(groups)
        calls = on_block_done is not None
        self.weights.plan_visits(
            [visit for passed in passes for visit in self._visits(passed, calls=calls and passed.group is groups[-1])]
        )
        losses: list[Tensor] = []
        visits: dict[range, StepVisit] = {}
        with self.transfer.keyed_random():
            for passed in passes:
                if passed.is_backward:
                    visits.pop(passed.group).backward()
                    continue
                visits[passed.group] = StepVisit(
                    self, batches, passed.group, seed, share=share, is_last=passed.group is groups[-1],
                    on_block_done=on_block_done, loss_scale=loss_scale,
                )  # fmt: skip
                losses += visits[passed.group].forward()
        self.copies.finish_sends()
        return losses

    @torch.no_grad()
    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return logits_BTV in the compute dtype, without dropout if the model is in eval mode."""
        hidden_BTD = self._hidden(token_ids_BT, None)
        if self.part.is_whole:
            return self.weights.acquire_head().logits(hidden_BTD)
        last = self.copies.group.world - 1
        if not self.part.has_head:
            return self.receive((*token_ids_BT.shape, self._model.config.vocab_size), last)
        logits_BTV = self.weights.acquire_head().logits(hidden_BTD)
        for rank in range(last):
            self.copies.send(logits_BTV, rank)
        self.copies.finish_sends()
        return logits_BTV

    @torch.no_grad()
    def loss(self, batch: DeviceBatch) -> Tensor:
        """Return the mean cross entropy of a batch in nats per token, a scalar float32; nothing is kept.

        It is NaN where another stage has the head.
        """
        hidden_BTD = self._hidden(batch.token_ids_BT, batch.documents)
        if not self.part.has_head:
            return torch.full((), torch.nan, device=self.transfer.device)
        loss: Tensor = self.weights.acquire_head()(
            hidden_BTD, batch.target_ids_BT, chunk_tokens=self.plan.loss_chunk_tokens, num_targets=batch.num_targets
        )
        return loss

    def _hidden(self, token_ids_BT: Tensor, documents: Documents | None) -> Tensor:
        """Return what the held blocks make of tokens, after it was given to the next stage if there is one."""
        self.weights.plan_visits([*_whole(self.part.blocks)])
        if self.part.has_embedding:
            hidden_BTD = self.weights.acquire_embedding()(token_ids_BT, documents)
        else:
            hidden_BTD = self.receive((*token_ids_BT.shape, self._model.config.width), self.copies.group.rank - 1)
        for block in self.part.blocks:
            hidden_BTD = self.weights.acquire(block)(hidden_BTD, documents)
        if not self.part.has_head:
            self.copies.send(hidden_BTD, self.copies.group.rank + 1)
            self.copies.finish_sends()
        return hidden_BTD  # type: ignore[no-any-return]

    def receive(self, shape: Sequence[int], rank: int) -> Tensor:
        """Return a tensor of the compute dtype that another stage gives."""
        target = torch.empty(tuple(shape), dtype=self.weights.compute_dtype, device=self.transfer.device)
        self.copies.receive(target, rank)
        return target

    def drop(self) -> None:
        """Forget gradients and boundaries of an unfinished step."""
        self.grads.drop()
        self.boundaries.drop()

    def _groups(self, count: int) -> list[range]:
        """Return the micro-batches that are taken through the blocks together."""
        size = 1 if self.plan.schedule is Schedule.HORIZONTAL else self.plan.visit_micro_batches or count
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _passes(self, groups: Sequence[range]) -> list[Pass]:
        """Return forward and backward passes in order: one of each in turn, the first stages some groups ahead."""
        ahead = min(self.stages_after, len(groups))
        passes = [Pass(group) for group in groups[:ahead]]
        for number, group in enumerate(groups):
            passes += [Pass(other) for other in groups[number + ahead : number + ahead + 1]]
            passes.append(Pass(group, is_backward=True))
        return passes

    def _visits(self, passed: Pass, *, calls: bool) -> Iterator[Visit]:
        """Yield the blocks in the order in which ``StepVisit`` asks for them; ``calls``: ``on_block_done`` is."""
        for wave in self.waves(passed.group):
            if not passed.is_backward:
                yield from _whole(self.part.blocks)
                continue
            for segment in reversed(self.segments):
                for _ in wave:
                    if segment.start < self.first_kept:
                        yield from _whole(segment)
                    yield from _whole(reversed(segment))
                if calls:
                    yield from (Visit(block) for block in reversed(segment))

    def waves(self, group: range) -> list[range]:
        """Return the micro-batches that pass block by block: all of a group, each alone where another stage waits."""
        return [group] if self.part.is_whole else [group[i : i + 1] for i in range(len(group))]


def _whole(blocks: Iterable[int]) -> Iterator[Visit]:
    """Yield the visits of blocks that are computed with."""
    return (Visit(block, is_whole=True) for block in blocks)


def _boundary_storage(plan: PhasePlan) -> tuple[object, ...]:
    """Return what decides which boundaries are kept, where, and of which size."""
    return plan.boundary, plan.compute_dtype, plan.recompute_every, plan.kept_blocks, plan.schedule


def _grad_storage(plan: PhasePlan) -> tuple[object, ...]:
    return plan.grad, plan.schedule, plan.grad_accum_steps

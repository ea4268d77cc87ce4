"""The executor of any plan, without any case for single optimizations.

A horizontal schedule runs one micro-batch after another through all blocks; a vertical one runs all micro-batches of a
step through a block before the next block. Both are bit-equal to plain autograd: gradients are summed in the order of
``loss.backward()`` per micro-batch.

B batch, T sequence, D width, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hybridtrain.engine.model_run import ModelRun
from hybridtrain.engine.step import StepShare
from hybridtrain.engine.step_visit import BlockDone, DeviceBatch, StepVisit, StepWork
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Documents
from hybridtrain.plan.memory_plan import PhasePlan, Schedule

_Pass = tuple[range, bool]
"""A group of micro-batches that pass the held blocks, and whether backward."""


class Executor(ModelRun):
    """Runs forward and backward passes of one model under one plan; gradients end up in ``grads``."""

    def enter(self, plan: PhasePlan, weights: WeightStore, *, runs_backward: bool) -> None:
        """Switch to another plan between two steps; without backward passes gradient and boundary stores stay."""
        self.plan, self.weights = plan, weights
        self.arrange(plan)
        if not runs_backward:
            return
        before, self.served = self.served, plan
        if _boundary_storage(before) != _boundary_storage(plan):
            self.boundaries.release()
            self.boundaries = self.new_boundaries()
        if _grad_storage(before) != _grad_storage(plan):
            self.grads.release()
            self.grads = self.new_grads()

    def forward_backward(
        self,
        batches: Sequence[DeviceBatch],
        *,
        seed: int,
        share: StepShare | None = None,
        on_block_done: BlockDone | None = None,
        loss_scale: float = 1.0,
    ) -> list[Tensor]:
        """Return the loss of each micro-batch; add the gradients of the mean over all targets to ``grads``.

        The losses are scalars float32 on the device, mean cross entropy in nats per token; there are none if another
        pipeline stage has the head. Other arguments are as in ``StepWork``; without ``share`` these are all
        micro-batches of the step.
        """
        share = share or StepShare(0, tuple(batch.num_targets for batch in batches))
        work = StepWork(batches, seed, share, on_block_done, loss_scale)
        groups = self._groups(len(batches))
        passes = self._passes(groups)
        calls = on_block_done is not None
        self.weights.plan_visits(
            [visit for passed in passes for visit in self._visits(passed, calls=calls and passed[0] is groups[-1])]
        )
        losses: list[Tensor] = []
        visits: dict[range, StepVisit] = {}
        with self.transfer.keyed_random():
            for group, is_backward in passes:
                if is_backward:
                    visits.pop(group).backward()
                    continue
                visits[group] = StepVisit(self, work, group, is_last=group is groups[-1])
                losses += visits[group].forward()
        self.copies.finish_sends()
        return losses

    @torch.no_grad()
    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return logits_BTV in the compute dtype, without dropout if the model is in eval mode."""
        hidden_BTD = self._hidden(token_ids_BT, None)
        if self.part.is_whole:
            return self.model.head.logits(hidden_BTD)
        last = self.copies.group.world - 1
        if not self.part.has_head:
            return self.receive((*token_ids_BT.shape, self.model.config.vocab_size), last)
        logits_BTV = self.model.head.logits(hidden_BTD)
        for rank in range(last):
            self.copies.send(logits_BTV, rank)
        self.copies.finish_sends()
        return logits_BTV

    @torch.no_grad()
    def loss(self, batch: DeviceBatch) -> Tensor:
        """Return the mean cross entropy of a batch in nats per token, a scalar float32, without autograd.

        It is NaN if another pipeline stage has the head.
        """
        hidden_BTD = self._hidden(batch.token_ids_BT, batch.documents)
        if not self.part.has_head:
            return torch.full((), torch.nan, device=self.transfer.device)
        loss: Tensor = self.model.head(
            hidden_BTD, batch.target_ids_BT, chunk_tokens=self.plan.loss_chunk_tokens, num_targets=batch.num_targets
        )
        return loss

    def _hidden(self, token_ids_BT: Tensor, documents: Documents | None) -> Tensor:
        """Return the output of the held blocks, after it was sent to the next stage if there is one."""
        self.weights.plan_visits([*_whole(self.part.blocks)])
        if self.part.has_embedding:
            hidden_BTD = self.model.embedding(token_ids_BT, documents)
        else:
            hidden_BTD = self.receive((*token_ids_BT.shape, self.model.config.width), self.copies.group.rank - 1)
        for block in self.part.blocks:
            hidden_BTD = self.weights.acquire(block)(hidden_BTD, documents)
        if not self.part.has_head:
            self.copies.send(hidden_BTD, self.copies.group.rank + 1)
            self.copies.finish_sends()
        return hidden_BTD  # type: ignore[no-any-return]

    def drop(self) -> None:
        """Discard gradients and boundaries of an unfinished step."""
        self.grads.drop()
        self.boundaries.drop()

    def _groups(self, count: int) -> list[range]:
        size = 1 if self.plan.schedule is Schedule.HORIZONTAL else self.plan.visit_micro_batches or count
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _passes(self, groups: Sequence[range]) -> list[_Pass]:
        """Return forward and backward passes in order: one of each in turn, the first stages some groups ahead."""
        ranks = self.copies.group
        ahead = 0 if self.part.is_whole else min(ranks.world - 1 - ranks.rank, len(groups))  # the last has the head
        passes = [(group, False) for group in groups[:ahead]]
        for number, group in enumerate(groups):
            passes += [(other, False) for other in groups[number + ahead : number + ahead + 1]]
            passes.append((group, True))
        return passes

    def _visits(self, passed: _Pass, *, calls: bool) -> Iterator[Visit]:
        """Yield the blocks in the order in which ``StepVisit`` asks for them; ``calls``: ``on_block_done`` is."""
        group, is_backward = passed
        for wave in self.waves(group):
            if not is_backward:
                yield from _whole(self.part.blocks)
                continue
            for segment in reversed(self.segments):
                for _ in wave:
                    if segment.start < self.first_kept:
                        yield from _whole(segment)
                    yield from _whole(reversed(segment))
                if calls:
                    yield from (Visit(block) for block in reversed(segment))


def _whole(blocks: Iterable[int]) -> Iterator[Visit]:
    """Return visits that use whole blocks."""
    return (Visit(block, is_whole=True) for block in blocks)


def _boundary_storage(plan: PhasePlan) -> tuple[object, ...]:
    """Return the settings that decide number, place and size of kept boundaries."""
    return (
        plan.boundary, plan.compute_dtype, plan.recompute_every, plan.kept_blocks, plan.keep_attention, plan.schedule,
    )  # fmt: skip


def _grad_storage(plan: PhasePlan) -> tuple[object, ...]:
    return plan.grad, plan.schedule, plan.grad_accum_steps

"""Forward and backward of a group of micro-batches through all units of a model. B batch, T sequence, D width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridkernels.flash_attention import KeptAttention
from hybridtrain.data.batches import IGNORED, TokenBatch, document_positions
from hybridtrain.engine.block_work import block_work
from hybridtrain.engine.model_run import ModelRun
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.step import StepShare
from hybridtrain.memory.boundary_store import HEAD_INPUT
from hybridtrain.memory.transfer import Transfer
from hybridtrain.models.block_model import Documents, Unit
from hybridtrain.models.experts import BalanceLoss
from hybridtrain.models.layers import Head
from hybridtrain.models.model_config import Experts
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.repeated_work import PendingBackward


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """A block's forward pass that can be differentiated once."""

    hidden_in_BTD: Tensor
    output: GradientEdge | None
    """Graph node of the block's output; holding the tensor itself would keep a boundary alive. None: the pass was only
    recorded."""
    held: PendingBackward | None
    kept: KeptAttention | None = None
    """What its attention was taken from, until the backward pass has read it."""


def run_block(
    block: nn.Module, hidden_BTD: Tensor, documents: Documents | None, balance: BalanceLoss | None,
    observer: MemoryObserver, *, computes_output: bool = True, kept: KeptAttention | None = None,
) -> tuple[BlockGraph, Tensor]:  # fmt: skip
    """Run ``block`` on a detached input; return its graph and its detached hidden_BTD."""
    hidden_in_BTD = hidden_BTD.detach().requires_grad_()

    def run() -> tuple[Tensor]:
        with torch.enable_grad():
            return (block(hidden_in_BTD, documents, balance, computes_output=computes_output, kept=kept),)

    work = block_work(block, run, hidden_in_BTD, documents, balance, computes_output, kept=kept)
    (hidden_out_BTD,), held = observer.repeat_forward(work)
    output = get_gradient_edge(hidden_out_BTD) if hidden_out_BTD.requires_grad else None
    return BlockGraph(hidden_in_BTD, output, held, kept), hidden_out_BTD.detach()


def differentiate_block(
    graph: BlockGraph, parameters: tuple[nn.Parameter, ...], grad_BTD: Tensor, observer: MemoryObserver
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient by the block's input and those by its parameters; the graph is used up."""

    def differentiate(again: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        output = get_gradient_edge(again[0]) if again else graph.output
        assert output is not None, "a recorded forward pass must be run again first"
        return torch.autograd.grad(output, (graph.hidden_in_BTD, *parameters), grad_BTD)

    grad_in_BTD, *grads = observer.repeat_backward(graph.held, (grad_BTD,), differentiate)
    if graph.kept is not None:
        graph.kept.tensors = ()
    return grad_in_BTD, tuple(grads)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on the compute device, int64."""

    token_ids_BT: Tensor
    target_ids_BT: Tensor
    num_targets: int
    """Targets that count; the loss is their mean."""
    documents: Documents | None = None
    counted_BT: Tensor | None = None
    """bool: positions that are not padding, where needed; None: all."""
    num_tokens: int = 0
    """Tokens of ``counted_BT``; 0: all count."""


def differentiate_head(
    head: Head, unit: Unit, hidden_BTD: Tensor, batch: DeviceBatch,
    *, scale: float, chunk_tokens: int, wants_tied: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """Run the head, then differentiate ``scale`` times its loss.

    Returns:
        The loss, a scalar float32 of the device, mean over the micro-batch; the gradients by the input, by the head's
        own parameters, and by the token embedding, which is added to the embedding's own of the same micro-batch.
    """
    hidden_BTD = hidden_BTD.detach().requires_grad_()
    own = unit.tensors
    is_owner = any(parameter is head.weight for parameter in own)
    wants_tied = wants_tied and not is_owner and head.weight.requires_grad
    weight_VD = head.weight if is_owner or wants_tied else head.weight.detach()
    inputs = [hidden_BTD, *own, *([head.weight] if wants_tied else [])]
    with torch.enable_grad():
        loss = head(
            hidden_BTD, batch.target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=weight_VD,
            num_targets=batch.num_targets,
        )  # fmt: skip
    grad_BTD, *grads = torch.autograd.grad(loss, inputs, torch.full_like(loss, scale))
    tied_grad_VD = grads.pop() if wants_tied else None
    return loss.detach(), grad_BTD, tuple(grads), tied_grad_VD


def differentiate_tied_weight(
    head: Head, hidden_BTD: Tensor, batch: DeviceBatch, *, scale: float, chunk_tokens: int
) -> Tensor:
    """Return the gradient by the tied weight alone, from the head's input.

    A vertical schedule reaches the embedding only after every micro-batch has passed the head. Adding all of the head's
    contributions first would change the order of the sum; keeping one (V, D) gradient per micro-batch would cost more
    than anything the schedule saves. So the projection is run once more, when the embedding's own gradient is at hand.
    """
    with torch.no_grad():
        normed_BTD = head.norm(hidden_BTD)
    with torch.enable_grad():
        loss = head.projection_loss(
            normed_BTD, batch.target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=head.weight,
            num_targets=batch.num_targets,
        )  # fmt: skip
    (grad_VD,) = torch.autograd.grad(loss, (head.weight,), torch.full_like(loss, scale))
    return grad_VD


BlockDone = Callable[[Unit], object]


def upload_batch(batch: TokenBatch, transfer: Transfer, *, marks_padding: bool = False) -> DeviceBatch:
    """Return a micro-batch on the device; ``marks_padding``: with a mask of its padding."""
    documents = counted_BT = None
    if marks_padding and batch.lengths_B is not None:
        counted_BT = transfer.upload(np.arange(batch.token_ids_BT.shape[1]) < batch.lengths_B[:, None])
    if batch.document_ids_BT is not None:
        positions_BT = document_positions(batch.document_ids_BT)
        documents = Documents(transfer.upload(batch.document_ids_BT), transfer.upload(positions_BT))
    return DeviceBatch(
        token_ids_BT=transfer.upload(batch.token_ids_BT),
        target_ids_BT=transfer.upload(batch.target_ids_BT),
        num_targets=int((batch.target_ids_BT != IGNORED).sum()),
        documents=documents,
        counted_BT=counted_BT,
        num_tokens=batch.num_tokens,
    )


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float:
    """Return the mean over all targets, given each micro-batch's mean and number of targets."""
    if len(set(counts)) == 1:
        return sum(losses) / len(losses)
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The forward and backward pass of one step."""

    batches: Sequence[DeviceBatch]
    seed: int
    """Key of the step's random streams (dropout)."""
    share: StepShare
    on_block_done: BlockDone | None
    """Called after a block's last visit, while its weights are on the device."""
    loss_scale: float
    """Factor of the gradients."""

    def scales(self, plan: PhasePlan) -> list[float]:
        """Return the factor of each micro-batch's loss."""
        counts = self.share.num_targets
        scale = self.loss_scale * (1 if plan.normalize_gradients else len(counts))
        return [scale * (batch.num_targets / sum(counts)) for batch in self.batches]


class StepVisit:
    """Takes micro-batches of one step through embedding, blocks and head, and back."""

    def __init__(self, run: ModelRun, work: StepWork, group: range, *, is_last: bool) -> None:
        self._run = run
        self._work = work
        self._batches = work.batches
        self._waves = run.waves(group)
        self._is_last = is_last
        self._scales = work.scales(run.plan)
        self._defers_tied = run.trains_tied and len(group) > 1
        self._embedded: dict[int, GradientEdge] = {}
        self._graphs: dict[tuple[int, int], BlockGraph] = {}
        self._hidden: dict[int, Tensor] = {}
        self._grad: dict[int, Tensor] = {}
        self._tied_grads: dict[int, Tensor] = {}
        self._balance: dict[int, BalanceLoss] = {}

    def forward(self) -> list[Tensor]:
        """Return the losses of the group, scalars float32 on the device; none where another stage has the head."""
        losses: list[Tensor] = []
        for wave in self._waves:
            for micro_batch in wave:
                self._enter(micro_batch)
            for segment in self._run.segments:
                for block in segment:
                    for micro_batch in wave:
                        self._forward_block(micro_batch, block, is_boundary=block == segment.start)
            for micro_batch in wave:
                if self._run.part.has_head:
                    losses.append(self._head(micro_batch))
                else:
                    self._send(self._hidden.pop(micro_batch), micro_batch, 1)
        if self._run.part.has_head:
            self._finish("head")
        return losses

    def backward(self) -> None:
        """Add the gradients of the group, after ``forward``."""
        run = self._run
        for wave in self._waves:
            for micro_batch in () if run.part.has_head else wave:
                with run.observer.region(Stage.BACKWARD, f"block.{run.part.blocks[-1]}"):
                    self._grad[micro_batch] = self._receive(micro_batch, 1)
            for balance in self._balance.values():
                balance.is_counting = False
            for segment in reversed(run.segments):
                for block in reversed(segment):
                    with run.observer.region(Stage.BACKWARD, f"block.{block}"):
                        run.grads.prefetch(f"block.{block}")
                for micro_batch in wave:
                    self._backward_segment(micro_batch, segment)
                for block in reversed(segment) if wave is self._waves[-1] else ():
                    self._finish_block(block)
            for micro_batch in wave:
                self._leave(micro_batch)
        if run.part.has_embedding:
            self._finish("embedding")

    def _enter(self, micro_batch: int) -> None:
        """Begin with the embedding, or with the previous stage's output."""
        run = self._run
        if run.balanced is not None:
            self._balance[micro_batch] = self._new_balance(micro_batch, run.balanced)
        if run.part.has_embedding:
            self._embed(micro_batch)
            return
        with run.observer.region(Stage.FORWARD, f"block.{run.part.blocks[0]}"):
            self._hidden[micro_batch] = self._receive(micro_batch, -1)

    def _leave(self, micro_batch: int) -> None:
        """End with the embedding, or send gradients to the previous stage, that of a tied matrix to the first one."""
        run = self._run
        if run.part.has_embedding:
            self._embed_backward(micro_batch)
            return
        with run.observer.region(Stage.BACKWARD, f"block.{run.part.blocks[0]}"):
            self._send(self._grad.pop(micro_batch), micro_batch, -1)
        if run.trains_tied and run.part.has_head:
            with run.observer.region(Stage.BACKWARD, "head"):
                run.copies.send(self._own_tied_grad(micro_batch), 0)

    def _send(self, tensor: Tensor, micro_batch: int, step: int) -> None:
        """Start sending a tensor to another stage, with the counts for the load-balancing loss.

        Both go in one message: a second send would wait for the first, while the other stage may wait to send itself.
        """
        tensor = tensor.contiguous()
        if micro_batch in self._balance:
            rows_E = self._balance[micro_batch].rows_E
            tensor = torch.cat([tensor.view(-1).view(torch.uint8), rows_E.view(torch.uint8)])
        self._run.copies.send(tensor, self._run.copies.group.rank + step)

    def _receive(self, micro_batch: int, step: int) -> Tensor:
        run, rank = self._run, self._run.copies.group.rank + step
        shape = (*self._batches[micro_batch].token_ids_BT.shape, run.model.config.width)
        if micro_batch not in self._balance:
            return run.receive(shape, rank)
        balance, dtype = self._balance[micro_batch], run.weights.compute_dtype
        size = prod(shape) * dtype.itemsize
        message = torch.empty(size + balance.rows_E.nbytes, dtype=torch.uint8, device=run.transfer.device)
        run.copies.receive(message, rank)
        balance.rows_E = message[size:].clone().view(torch.int64)
        return message[:size].view(dtype).view(shape)

    def _new_balance(self, micro_batch: int, experts: Experts) -> BalanceLoss:
        """Return the load-balancing loss of a micro-batch before its first block."""
        run, batch = self._run, self._batches[micro_batch]
        with run.observer.region(Stage.FORWARD, f"block.{run.part.blocks[0]}"):
            rows_E = torch.zeros(experts.count, dtype=torch.int64, device=run.transfer.device)
        num_tokens = batch.num_tokens or batch.token_ids_BT.numel()
        scale = self._scales[micro_batch] * experts.balance_coefficient
        return BalanceLoss(rows_E, scale, num_tokens * run.part.num_blocks, batch.counted_BT)

    def _seed_unit(self, micro_batch: int, unit: int) -> None:
        if self._run.draws:
            self._run.transfer.seed(random_key(self._work.seed, self._work.share.first + micro_batch, unit))

    def _embed(self, micro_batch: int) -> None:
        run, batch = self._run, self._batches[micro_batch]
        with run.observer.region(Stage.FORWARD, "embedding"):
            self._seed_unit(micro_batch, 0)
            with torch.enable_grad():
                embedded_BTD = run.model.embedding(batch.token_ids_BT, batch.documents)
        if embedded_BTD.requires_grad:
            self._embedded[micro_batch] = get_gradient_edge(embedded_BTD)
        self._hidden[micro_batch] = embedded_BTD.detach()

    def _forward_block(self, micro_batch: int, block: int, *, is_boundary: bool) -> None:
        run, documents, balance = self._run, self._batches[micro_batch].documents, self._balance.get(micro_batch)
        hidden_BTD = self._hidden.pop(micro_batch)
        with run.observer.region(Stage.FORWARD, f"block.{block}"):
            module = run.weights.acquire(block)
            self._seed_unit(micro_batch, block + 1)
            if block < run.first_kept:
                keeps = run.plan.keep_attention
                if is_boundary and not keeps:
                    run.boundaries.store(micro_batch, block, hidden_BTD)
                self._hidden[micro_batch], *kept = self._outputs(module, hidden_BTD, documents, balance, keeps=keeps)
                if keeps:
                    run.boundaries.store(micro_batch, block, hidden_BTD, *kept)
            else:
                run.boundaries.note(block, hidden_BTD)
                found = run_block(module, hidden_BTD, documents, balance, run.observer)
                self._graphs[micro_batch, block], self._hidden[micro_batch] = found

    def _outputs(
        self, block: nn.Module, hidden_BTD: Tensor, documents: Documents | None, balance: BalanceLoss | None,
        *, keeps: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return a block's hidden_BTD, and what its attention leaves if it ``keeps`` that for the backward pass."""
        kept = KeptAttention() if keeps else None

        def run() -> tuple[Tensor, ...]:
            with torch.no_grad():
                hidden_out_BTD = block(hidden_BTD, documents, balance, kept=kept)
                return hidden_out_BTD, *(() if kept is None else kept.tensors)

        return self._run.observer.repeat(block_work(block, run, hidden_BTD, documents, balance, kept=kept))

    def _head(self, micro_batch: int) -> Tensor:
        run = self._run
        hidden_BTD = self._hidden.pop(micro_batch)
        with run.observer.region(Stage.BACKWARD, "head"):
            loss, self._grad[micro_batch], unit_grads, tied_grad_VD = differentiate_head(
                run.model.head, run.units[-1], hidden_BTD,
                self._batches[micro_batch], scale=self._scales[micro_batch],
                chunk_tokens=run.plan.loss_chunk_tokens, wants_tied=not self._defers_tied,
            )  # fmt: skip
            run.grads.accumulate("head", unit_grads)
        if tied_grad_VD is not None:
            self._tied_grads[micro_batch] = tied_grad_VD
        if self._defers_tied:
            with run.observer.region(Stage.BACKWARD, "head"):
                run.boundaries.store(micro_batch, HEAD_INPUT, hidden_BTD)
        return loss

    def _backward_segment(self, micro_batch: int, segment: range) -> None:
        run, documents, balance = self._run, self._batches[micro_batch].documents, self._balance.get(micro_batch)
        if segment.start < run.first_kept:
            with run.observer.region(Stage.BACKWARD, f"block.{segment.start}"):
                hidden_BTD, *tensors = run.boundaries.fetch(micro_batch, segment.start)
                kept = KeptAttention(tuple(tensors)) if tensors else None
                del tensors
            for block in segment:
                with run.observer.region(Stage.BACKWARD, f"block.{block}"):
                    module = run.weights.acquire(block)
                    self._seed_unit(micro_batch, block + 1)
                    # The last output is of no use: nothing in the backward pass reads it.
                    graph, hidden_BTD = run_block(
                        module, hidden_BTD, documents, balance, run.observer, computes_output=block != segment[-1],
                        kept=kept,
                    )  # fmt: skip
                self._graphs[micro_batch, block] = graph
                del graph
            del hidden_BTD, kept
        for block in reversed(segment):
            unit = run.units[block + 1]
            with run.observer.region(Stage.BACKWARD, unit.name):
                run.weights.acquire(block)
                self._grad[micro_batch], grads = differentiate_block(
                    self._graphs.pop((micro_batch, block)), unit.tensors, self._grad.pop(micro_batch), run.observer
                )
                run.grads.accumulate(unit.name, grads)
                del grads  # or they would live through the next block's backward pass

    def _finish_block(self, block: int) -> None:
        run = self._run
        unit = run.units[block + 1]
        self._finish(unit.name)
        if self._is_last and self._work.on_block_done is not None:
            with run.observer.region(Stage.BACKWARD, unit.name):
                run.weights.acquire(block)
            self._work.on_block_done(unit)

    def _finish(self, unit: str) -> None:
        with self._run.observer.region(Stage.BACKWARD, unit):
            self._run.grads.finish_visit(unit, is_last=self._is_last)

    def _embed_backward(self, micro_batch: int) -> None:
        run = self._run
        unit = run.units[0]
        if not unit.parameters:
            del self._grad[micro_batch]
            run.grads.accumulate(unit.name, ())
            return
        with run.observer.region(Stage.BACKWARD, unit.name):
            grads = [*torch.autograd.grad(self._embedded.pop(micro_batch), unit.tensors, self._grad.pop(micro_batch))]
            if run.trains_tied:
                grads[0] = self._tied_grad(micro_batch).add_(grads[0])
            run.grads.accumulate(unit.name, grads)

    def _tied_grad(self, micro_batch: int) -> Tensor:
        """Return the head's contribution to the token embedding's gradient, which is the unit's first parameter."""
        if self._run.part.has_head:
            return self._own_tied_grad(micro_batch)
        last = self._run.copies.group.world - 1
        return self._run.receive(self._run.units[0].tensors[0].shape, last)

    def _own_tied_grad(self, micro_batch: int) -> Tensor:
        if not self._defers_tied:
            return self._tied_grads.pop(micro_batch)
        run = self._run
        (hidden_BTD,) = run.boundaries.fetch(micro_batch, HEAD_INPUT)
        return differentiate_tied_weight(
            run.model.head, hidden_BTD, self._batches[micro_batch],
            scale=self._scales[micro_batch], chunk_tokens=run.plan.loss_chunk_tokens,
        )  # fmt: skip

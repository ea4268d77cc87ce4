"""A model with its plan, gradients and boundaries. B batch, T sequence, D width."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrain.memory.boundary_store import BoundaryStore
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.layers import ATTENTION
from hybridtrain.models.linear import Linear
from hybridtrain.plan.memory_plan import LinearKind, PhasePlan, suited


class ModelRun:
    """Owns gradients and boundaries, and knows the order of blocks.

    The model's packed blocks are bound by ``weights``; ``wants_norm``: whether the gradient norm will be needed.
    """

    def __init__(
        self, model: BlockModel, weights: WeightStore, plan: PhasePlan, shards: Shards, *, wants_norm: bool
    ) -> None:
        self.model = model
        self.weights = weights
        self.plan = plan
        self.copies = shards.copies
        self.transfer = shards.copies.transfer
        self.observer = shards.copies.observer
        self.units = model.units(everywhere=True)
        self.part = model.part
        """The part of the model that this process has: all of it, or a pipeline stage."""
        self.trains_tied = model.config.tied and model.head.weight.requires_grad
        """Whether the head's weight is the token embedding, and trained."""
        experts = model.config.experts
        self.balanced = experts if experts is not None and experts.balance_coefficient else None
        """Number of blocks with a load-balancing loss."""
        self.draws = model.config.dropout > 0 or plan.adapter_dropout > 0
        self._shards = shards
        self._wants_norm = wants_norm
        self.first_kept = 0
        """Blocks before this number are recomputed; later ones keep their autograd graphs."""
        self.segments: list[range] = []
        """Groups of blocks that are recomputed together."""
        self.arrange(plan)
        self.served = plan
        """Plan of the gradient and boundary stores: the latest one with backward passes."""
        self.boundaries = self.new_boundaries()
        self.grads = self.new_grads()

    def arrange(self, plan: PhasePlan) -> None:
        """Set how blocks are computed, and lay out their segments.

        Raises:
            ConfigError: The feed-forward part cannot be cut into tiles.
        """
        self.model.compute_attention(ATTENTION[plan.attention])
        self.model.compute_in_tiles(plan.mlp_tile_tokens)
        last = len(self.model.blocks) - 1
        for number, block in enumerate(self.model.blocks):
            is_full = min(number, last - number) < plan.full_ends
            for linear in (module for module in block.modules() if isinstance(module, Linear)):
                linear.kind = LinearKind.FULL if is_full else plan.linear
        first, stop = self.part.blocks.start, self.part.blocks.stop
        plan = suited(plan, stop - first)
        self.first_kept = stop - plan.kept_blocks if plan.recompute_every else first
        interval = plan.recompute_every or 1
        self.segments = [
            range(start, min(start + interval, self.first_kept)) for start in range(first, self.first_kept, interval)
        ] + [range(block, block + 1) for block in range(self.first_kept, stop)]

    def new_boundaries(self) -> BoundaryStore:
        """Return an empty store according to the plan."""
        return BoundaryStore(self.plan.boundary.placement, self.copies, by_micro_batch=not self.part.is_whole)

    def new_grads(self) -> GradStore:
        """Return an empty store according to the plan."""
        return GradStore(self.model.units(), self.plan, self._shards, wants_norm=self._wants_norm)

    def waves(self, group: range) -> list[range]:
        """Return the micro-batches of each pass over blocks: the whole group, or single ones in a pipeline."""
        return [group] if self.part.is_whole else [group[i : i + 1] for i in range(len(group))]

    def receive(self, shape: Sequence[int], rank: int) -> Tensor:
        """Receive a tensor of the compute dtype from another pipeline stage."""
        target = torch.empty(tuple(shape), dtype=self.weights.compute_dtype, device=self.transfer.device)
        self.copies.receive(target, rank)
        return target

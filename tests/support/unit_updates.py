"""The optimizer alone: one unit of parameters under one storage format, updated with given gradients."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hybridkernels.int8_quantize import int8_dequantize, num_groups
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.engine.parameter_pass import ParameterPass
from hybridtrain.engine.step import StepSettings
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import StoredWeight, WeightFormats, weight_formats
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.memory.transfer import Transfer
from hybridtrain.models.block_model import Unit
from hybridtrain.optim import AdamWConfig, Optimizer
from hybridtrain.optim.optimizer import Role
from hybridtrain.plan.memory_plan import Cell
from hybridtrain.plan.placement import Codec, Placement
from memory_parts import new_copies, plan_of

CONFIG = AdamWConfig()


class PlainWeights:
    """Stands in for the weight store: everything is on the device."""

    def __init__(self, stored: list[StoredWeight]) -> None:
        self.stored = stored

    def plan_visits(self, visits: Sequence[Visit]) -> None:
        """Do nothing."""

    def acquire_stored(self, unit: str, parameters: Sequence[nn.Parameter], *, reads: bool) -> list[StoredWeight]:  # noqa: ARG002
        """Return what is stored."""
        return list(self.stored)

    def write_back(self, unit: str) -> None:
        """Do nothing."""


class UnitUpdates:
    """A unit named ``unit``.

    Args:
        initial: fp32 values of its parameters.
        weight: How they are stored; of int8 weights the matrices.
        master: How exact values are kept.
        moments: How moments are stored.
        placement: Of master, moments and gradients.
        static_scales: Of int8 weights.
        transfer: The device.
        clip_factor: Of all gradients.
        optimizer: Whose updates they are.
    """

    def __init__(
        self,
        initial: Sequence[Tensor],
        weight: Codec,
        master: Codec,
        moments: Codec,
        *,
        placement: Placement = Placement.DEVICE,
        static_scales: bool = False,
        transfer: Transfer | None = None,
        clip_factor: float | None = None,
        optimizer: Optimizer = CONFIG,
    ) -> None:
        compute = Codec.FLOAT32 if weight is Codec.INT8_BLOCKS else weight
        dtype = to_torch_dtype(compute)
        self.unit = Unit("unit", tuple(("name", nn.Parameter(torch.empty_like(v, dtype=dtype))) for v in initial))
        is_int8 = weight is Codec.INT8_BLOCKS
        self.weights = PlainWeights([_stored(parameter, is_int8=is_int8) for parameter in self.unit.tensors])
        plan = replace(
            plan_of([]), weight=Cell(codec=weight), compute_dtype=compute, static_scales=static_scales,
            optim_state=Cell(placement=placement, codec=moments), master=Cell(placement=placement, codec=master),
            grad=Cell(placement=placement),
        )  # fmt: skip
        self.formats: WeightFormats = weight_formats(plan)
        self.copies: CopyEngine = new_copies(transfer)
        shards = Shards(self.copies)
        self.states = StateStore(plan, self.formats, shards)
        for parameter, value, stored in zip(self.unit.tensors, initial, self.weights.stored, strict=True):
            role = Role(tuple(parameter.shape), in_block=False)
            self.states.initialize("unit", parameter, value.clone(), stored, optimizer.state(role))
        self.grads = GradStore([self.unit], plan, shards, wants_norm=False)
        self.parameters = ParameterPass([self.unit], self.weights, self.states, optimizer)
        self.factor = None if clip_factor is None else torch.tensor(clip_factor)
        self.steps_done = 0

    def run(self, steps: Sequence[Sequence[Tensor]], lr: float = 1e-2) -> None:
        """Apply one update per entry; gradients keep their dtype."""
        for grads in steps:
            self.steps_done += 1
            self.grads._sum_dtype = self.grads._kept_dtype = grads[0].dtype
            self.grads.accumulate("unit", [grad.clone() for grad in grads])
            self.grads.finish_visit("unit", is_last=True)
            settings = StepSettings(self.steps_done, lr, seed=self.steps_done, factor=self.factor)
            self.parameters.update(self.grads, settings)

    def values(self) -> list[Tensor]:
        """Return the exact values behind the weights, in the shapes of the parameters."""
        values = []
        for state, weight in zip(self.states.of("unit"), self.weights.stored, strict=True):
            master_weight = None if state.master_weight is None else self.fetch(state.master_weight)
            values.append(self.formats.of(weight).load(weight, master_weight).view(state.parameter.shape))
        return values

    def rounded(self) -> list[Tensor]:
        """Return the weights as a forward pass would read them."""
        values = []
        for parameter, weight in zip(self.unit.tensors, self.weights.stored, strict=True):
            if len(weight) == 1:
                values.append(weight[0].view(parameter.shape))
            else:
                values.append(torch.empty_like(parameter.data))
                int8_dequantize(*weight, values[-1].view(-1))
        return values

    def moments(self) -> list[Tensor]:
        """Return all stored moments."""
        return [self.fetch(t) for state in self.states.of("unit") for slot in state.slots for t in slot.tensors]

    def fetch(self, stored: Stored) -> Tensor:
        """Return a stored tensor on the device."""
        if not isinstance(stored, TierTensor):
            return stored
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.copies.wait(self.copies.fetch(tensor, stored.buffer, stored.offset, after=[self.copies.mark()]))
        return tensor


def _stored(parameter: nn.Parameter, *, is_int8: bool) -> StoredWeight:
    if not is_int8 or parameter.dim() < 2:
        return (parameter.data,)
    return (torch.empty(parameter.numel(), dtype=torch.int8), torch.empty(num_groups(parameter.numel())))

"""The reference trainer: one model, one plan, one step after the other, on any device. B batch, T sequence."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hybridtrain.data.batches import TokenBatch
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.engine.executor import Executor
from hybridtrain.engine.parameter_pass import ParameterPass
from hybridtrain.engine.plan_engine import PlanEngine
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.step import StepLimits, StepResult, StepSettings
from hybridtrain.engine.step_visit import DeviceBatch
from hybridtrain.errors import DivergenceError, SpikeError
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import StoredWeight
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.transfer import Transfer, VirtualTransfer
from hybridtrain.memory.weight_slots import packed_blocks, placeholder_scope
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.models.build import build_model
from hybridtrain.models.layers import fill_initial
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim.optimizer import Role, StepHook
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan, check_history
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.observer import MemoryObserver, NullObserver, Stage
from hybridtrain.virtual_gpu.tensor_class import TensorClass

_DROPOUT_STREAM, _UPDATE_STREAM, _BORDER_STREAM = 0, 1, 2


class Trainer:
    """Trains one model under one memory plan.

    Args:
        model_config: Shape of the model.
        plan: Where everything lives and how it is stored.
        config: Optimizer, schedule, seed.
        transfer: The device, and the way to it.
        observer: Told what each tensor is for.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        plan: MemoryPlan,
        config: TrainerConfig,
        transfer: Transfer,
        observer: MemoryObserver | None = None,
    ) -> None:
        has_hook = config.optimizer.step_hook(1, config.schedule.total_steps) is not None
        check_history(plan.for_phase(Phase.FULL), has_hook, f"optimizer.kind = '{config.optimizer.kind}'")
        self.config = config
        self.memory_plan = plan
        self.plan = plan.for_phase(Phase.FULL)
        """Of FULL, whatever the phase."""
        self.phase = Phase.FULL
        self.steps_done = 0
        self.transfer = transfer
        self._observer = observer or NullObserver()
        self._hook: StepHook | None = None
        self._limits: StepLimits | None = None
        self.previous_norm: Tensor | None = None
        """Of the last step's gradients, where updates are clipped by it."""
        self.copies = CopyEngine(transfer, self._observer)
        packed = packed_blocks(self.plan, model_config.num_blocks)

        def block_scope(block: int) -> AbstractContextManager[None]:
            return placeholder_scope() if block in packed else nullcontext()

        compute_dtype = to_torch_dtype(self.plan.compute_dtype)
        with self._observer.region(Stage.BUILD, ""):
            self.model = build_model(model_config, compute_dtype, transfer.device, block_scope)
        self._engine = PlanEngine(self.model, plan, config.optimizer, self.copies, self._observer)
        self._initialize(self._engine.units)

    @property
    def weights(self) -> WeightStore:
        """Of the plan in force."""
        return self._engine.weights

    @property
    def states(self) -> StateStore:
        """Master and moments."""
        return self._engine.states

    @property
    def executor(self) -> Executor:
        """Runs forward and backward passes."""
        return self._engine.executor

    @property
    def parameters(self) -> ParameterPass:
        """Passes over weights and state: updates, and what an extension does besides."""
        return self._engine.parameters

    @torch.no_grad()
    def _initialize(self, units: Sequence[Unit]) -> None:
        index = 0
        for unit in units:
            with self._observer.region(Stage.UPDATE, unit.name):
                weights = self.weights.acquire_stored(unit.name, unit.tensors, reads=False)
            for (name, parameter), weight in zip(unit.parameters, weights, strict=True):
                self._initialize_parameter(unit.name, name, parameter, weight, index)
                index += 1
            with self._observer.region(Stage.UPDATE, unit.name):
                self.weights.initialized(unit.name, unit.tensors)

    def _initialize_parameter(
        self, unit: str, name: str, parameter: nn.Parameter, weight: StoredWeight, index: int
    ) -> None:
        if not self.weights.is_packed(unit):
            self._observer.label(parameter, TensorClass.WEIGHT, unit)
        with self._observer.region(Stage.UPDATE, unit):
            initial = weight[0]
            if initial.dtype != torch.float32 or len(weight) > 1:
                initial = torch.empty(parameter.shape, dtype=torch.float32, device=self.transfer.device)
            generator = self.transfer.generator(random_key(self.config.seed, index))
            fill_initial(name, initial, self.model.config, generator)
            role = Role(tuple(parameter.shape), in_block=unit.startswith("block."))
            self.states.initialize(unit, parameter, initial, weight, self.config.optimizer.state(role))

    def enter_phase(self, phase: Phase) -> None:
        """Let the plan of ``phase`` be in force: everything is stored, and steps run, as it says.

        What FULL trains comes back to the bit; plans that could not are refused by ``compose``.
        """
        if phase is self.phase:
            return
        with self._observer.region(Stage.UPDATE, ""):
            self._engine.enter(phase, step=self.steps_done, key=self.border_key(self.steps_done))
        self.phase = phase

    @contextmanager
    def stored_as(self, phase: Phase) -> Iterator[None]:
        """Store weights as another phase does for a while; the phase stays."""
        key = self.border_key(self.steps_done)
        before = self._engine.store_as(phase, key=key)
        yield
        self._engine.store_as(before, key=key)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.config.optimizer.lr * self.config.schedule.factor(step)

    def step(
        self,
        batches: Sequence[TokenBatch],
        *,
        hook: StepHook | None = None,
        limits: StepLimits | None = None,
        lr_factor: float = 1.0,
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of one batch.

        Args:
            batches: One per accumulation step.
            hook: What is done to every slice of a parameter right after its update; None: what the optimizer says.
            limits: Loss and gradient norm beyond which the step is refused.
            lr_factor: Of the scheduled learning rate.

        Raises:
            SpikeError: a limit is exceeded; nothing was applied, as with ``DivergenceError``.
            DivergenceError: loss or gradient norm is not finite; weights and optimizer state are those before the step,
                unless updates are fused into the backward pass and clipped by the previous norm.
        """
        assert len(batches) == self.plan.grad_accum_steps, "one batch per accumulation step"
        assert self.phase is not Phase.PREDICT, "a predicted step needs no gradients; enter another phase first"
        number = self.steps_done + 1
        lr = self.lr_at(number) * lr_factor
        device_batches = self._upload(batches)
        self._limits = limits
        self._hook = self.config.optimizer.step_hook(number, self.config.schedule.total_steps) if hook is None else hook
        self.parameters.last = None  # what a border rounds from now on is not a visit's
        run = self._fused_step if self._engine.plan.grad.placement is Placement.DROPPED else self._stored_step
        loss, grad_norm = run(device_batches, number, lr)
        self.steps_done = number
        num_tokens = sum(batch.token_ids_BT.size for batch in batches)
        return StepResult(number, loss, lr, grad_norm, num_tokens)

    def loss(self, batches: Sequence[TokenBatch]) -> float:
        """Return the mean loss of batches in nats per token, without dropout; weights and random streams stay."""
        self.model.eval()
        try:
            losses = [self.executor.loss(batch) for batch in self._upload(batches)]
        finally:
            self.model.train()
        return sum(self.transfer.read(loss) for loss in losses) / len(losses)

    def _upload(self, batches: Sequence[TokenBatch]) -> list[DeviceBatch]:
        with self._observer.region(Stage.LOAD, ""):
            return [
                DeviceBatch(self.transfer.upload(batch.token_ids_BT), self.transfer.upload(batch.target_ids_BT))
                for batch in batches
            ]

    def _stored_step(self, batches: list[DeviceBatch], number: int, lr: float) -> tuple[float, float | None]:
        """Gather all gradients, then update."""
        losses = self.executor.forward_backward(batches, seed=self._dropout_key(number))
        batches.clear()
        grads = self.executor.grads
        norm = self.parameters.norm(grads) if self.config.optimizer.max_grad_norm else None
        factor = None if norm is None else self.parameters.clip_factor(norm)
        loss, grad_norm = self._checked(number, losses, norm)
        self.parameters.update(grads, self._settings(number, lr, factor))
        return loss, grad_norm

    def _fused_step(self, batches: list[DeviceBatch], number: int, lr: float) -> tuple[float, float | None]:
        """Update each block at the end of its backward visit."""
        factor, optimizer = None, self.config.optimizer
        if optimizer.max_grad_norm:
            norm = self.previous_norm if optimizer.clip == "previous" else None
            factor = self.parameters.clip_factor(self._norm_alone(batches, number) if norm is None else norm)
        settings = self._settings(number, lr, factor)
        grads = self.executor.grads
        losses = self.executor.forward_backward(
            batches,
            seed=self._dropout_key(number),
            on_block_done=lambda unit: self.parameters.update(grads, settings, [unit]),
        )
        batches.clear()
        norm = self.parameters.norm(grads) if optimizer.max_grad_norm else None
        loss, grad_norm = self._checked(number, losses, norm, is_applied=True)
        self.previous_norm = norm
        self.parameters.update(grads, settings, [unit for unit in self.parameters.units if not self._is_block(unit)])
        return loss, grad_norm

    def _norm_alone(self, batches: list[DeviceBatch], number: int) -> Tensor:
        """Run the step's forward and backward pass for the norm of its gradients; same random numbers, same sums."""
        grads = self.executor.grads
        losses = self.executor.forward_backward(
            batches, seed=self._dropout_key(number), on_block_done=lambda unit: grads.discard(unit.name)
        )
        norm = self.parameters.norm(grads)
        self._checked(number, losses, norm)
        grads.drop()
        return norm

    def _settings(self, number: int, lr: float, factor: Tensor | None) -> StepSettings:
        return StepSettings(number, lr, random_key(self.config.seed, number, _UPDATE_STREAM), factor, self._hook)

    def border_key(self, number: int) -> int:
        """Return the key of stochastic rounding after step ``number`` and before the next one."""
        return random_key(self.config.seed, number, _BORDER_STREAM)

    def _dropout_key(self, number: int) -> int:
        return random_key(self.config.seed, number, _DROPOUT_STREAM)

    @staticmethod
    def _is_block(unit: Unit) -> bool:
        return unit.name.startswith("block.")

    def _checked(
        self, step: int, losses: Sequence[Tensor], norm: Tensor | None, *, is_applied: bool = False
    ) -> tuple[float, float | None]:
        """Return loss and norm as numbers; raise when one of them is none."""
        loss = sum(self.transfer.read(value) for value in losses) / len(losses)
        grad_norm = None if norm is None else self.transfer.read(norm)
        if isinstance(self.transfer, VirtualTransfer):
            return loss, grad_norm
        limits = self._limits or StepLimits(math.inf, math.inf)
        for name, value, limit in (("loss", loss, limits.loss), ("gradient norm", grad_norm, limits.grad_norm)):
            if value is not None and not (math.isfinite(value) and value <= limit):
                self.executor.drop()
                applied = (
                    "Blocks were updated already; go on from the last saved state."
                    if is_applied
                    else "The step was not applied."
                )
                kind = SpikeError if math.isfinite(value) else DivergenceError
                allowed = f"at most {limit:.4g}" if math.isfinite(value) else "a finite number"
                raise kind(
                    f"step {step}: {name} is {value}; it must be {allowed}. {applied} "
                    f"Lower optimizer.lr ({self.config.optimizer.lr}), lengthen schedule.warmup_steps, or check data."
                )
        return loss, grad_norm

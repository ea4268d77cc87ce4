"""The reference trainer: one model, one plan, one step after the other, on any device. B batch, T sequence."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from hybridtrain.config.encode import flat_settings
from hybridtrain.data.batches import TokenBatch
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.engine.first_values import FirstValues
from hybridtrain.engine.loss_scale import LossScale
from hybridtrain.engine.plan_engine import PlanEngine
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.ranks import require_agreement, require_ranks
from hybridtrain.engine.step import StepLimits, StepResult, StepSettings, StepShare
from hybridtrain.engine.step_visit import BlockDone, DeviceBatch, mean_loss, upload_batch
from hybridtrain.errors import DivergenceError, SpikeError
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.group import DirectGroup, Group
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.stages import Stages
from hybridtrain.memory.stored_layout import block_number, packed_blocks, placeholder_scope
from hybridtrain.memory.transfer import Transfer, VirtualTransfer
from hybridtrain.models.adapter import attach_adapters
from hybridtrain.models.block_model import Unit, model_parts
from hybridtrain.models.build import build_model
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.optim.optimizer import StepHook
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan, check_history
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.observer import MemoryObserver, NullObserver
from hybridtrain.virtual_gpu.account.op_record import Stage

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; here too, bit-exactly."""
_DROPOUT_STREAM, _UPDATE_STREAM, _BORDER_STREAM = 0, 1, 2


class Trainer(PlanEngine):
    """Trains one model under one memory plan.

    Args:
        model_config: Shape of the model.
        plan: Where everything lives and how it is stored.
        config: Optimizer, schedule, seed.
        transfer: The device, and the way to it.
        observer: Told what each tensor is for.
        source: Where first values are read from; None: random ones by the seed.
        group: The ranks that train together, this one among them; None: this process alone.

    Raises:
        ConfigError: the plan lacks the optimizer's state, adapters are meant for a matrix that is not
            there, the source cannot be read, or the ranks were given other settings.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        plan: MemoryPlan,
        config: TrainerConfig,
        transfer: Transfer,
        observer: MemoryObserver | None = None,
        *,
        source: WeightSource | None = None,
        group: Group | None = None,
    ) -> None:
        has_hook = config.optimizer.step_hook(1, config.schedule.total_steps) is not None
        check_history(plan.for_phase(Phase.FULL), has_hook, f"optimizer.kind = '{config.optimizer.kind}'")
        self.config = config
        self.plan = plan.for_phase(Phase.FULL)
        """Plan of phase FULL."""
        self.phase = Phase.FULL
        self.steps_done = 0
        self.transfer = transfer
        self._observer = observer or NullObserver()
        self._hook: StepHook | None = None
        self._limits: StepLimits | None = None
        self._share = StepShare(0, ())
        self.previous_norm: Tensor | None = None
        """Gradient norm of the last step, by which previous-norm clipping scales."""
        with_gradients = (plan.for_phase(phase) for phase in Phase if phase is not Phase.PREDICT)
        is_half = any(table.compute_dtype is Codec.FLOAT16 for table in with_gradients)
        self.loss_scale = LossScale() if is_half else None
        """Factor of the loss, where gradients are float16 in some phase."""
        self.copies = CopyEngine(transfer, self._observer, group)
        self.group = self.copies.group
        is_pipeline = self.group.world > 1 and self.plan.pipeline_stages > 1
        self.data_group: Group = DirectGroup() if is_pipeline else self.group
        """The ranks that have micro-batches of their own; stages of a pipeline have the same ones."""
        if self.group.world > 1:
            given = flat_settings({"": config, "model": model_config, "plan": self.plan})
            require_agreement(self.group, transfer.device, given)
        if self.group.shares > 1:
            require_ranks(self.group, plan, config.optimizer, model_config.num_blocks)
        parts = model_parts(model_config.num_blocks, self.group.world if is_pipeline else 1)
        part = parts[self.group.rank if is_pipeline else 0]
        packed = packed_blocks(self.plan, part.blocks)

        def held_scope(block: int) -> AbstractContextManager[None]:
            return nullcontext() if part.holds(block) else placeholder_scope()

        def block_scope(block: int) -> AbstractContextManager[None]:
            return placeholder_scope() if block in packed else held_scope(block)

        compute_dtype = to_torch_dtype(self.plan.compute_dtype)
        with self._observer.region(Stage.BUILD, ""):
            self.model = build_model(model_config, compute_dtype, transfer.device, block_scope, part)
            if self.plan.adapter_rank:
                with torch.device(transfer.device):
                    attach_adapters(self.model, self.plan, compute_dtype, held_scope)
        self.stages = Stages(self.copies, self.model) if is_pipeline else None
        self.shards = self.stages or Shards(self.copies, self.plan.zero_stage)
        super().__init__(self.model, plan, config.optimizer, self.shards, wants_norm=self._wants_norm)
        FirstValues(self.model, self.weights, self.states, config.optimizer, config.seed, source).write(self.units)
        self.pass_tied()

    def pass_tied(self) -> None:
        """Send the tied matrix, updated by the first stage, to the last stage of a pipeline."""
        if self.stages is not None:
            with self._observer.region(Stage.UPDATE, "head"):
                self.stages.pass_tied()

    def enter_phase(self, phase: Phase) -> None:
        """Switch to the plan of ``phase``.

        Trained values are restored bit-exactly in FULL; ``compose`` rejects plans that could not.
        """
        if phase is self.phase:
            return
        with self._observer.region(Stage.UPDATE, ""):
            self.enter(phase, step=self.steps_done, key=self.border_key(self.steps_done))
        self.phase = phase

    def restore_ahead(self) -> None:
        """Start fetching back state offloaded in PREDICT; the phase stays, and users of the state wait for it."""
        assert self.phase is Phase.PREDICT, "nothing is away in another phase"
        with self._observer.region(Stage.UPDATE, ""):
            self.states.fetch_back()

    @contextmanager
    def stored_as(self, phase: Phase) -> Iterator[None]:
        """Store weights temporarily as another phase does; the phase stays."""
        key = self.border_key(self.steps_done)
        before = self.store_as(phase, key=key)
        yield
        self.store_as(before, key=key)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        micro_batches = self.plan.grad_accum_steps if self.plan.scale_lr else 1
        return self.config.optimizer.lr * self.config.schedule.factor(step) * micro_batches

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
            batches: One per accumulation step; with several ranks this one's, ``grad_accum_steps`` / world in order; in
                a pipeline all of them.
            hook: Work on every slice of a parameter right after its update; None: the optimizer's.
            limits: Loss and gradient norm beyond which the step is refused.
            lr_factor: Factor of the scheduled learning rate.

        Raises:
            SpikeError: a limit is exceeded; nothing was applied, as with ``DivergenceError``.
            DivergenceError: loss or gradient norm is not finite; weights and optimizer state are those before the step,
                unless updates are fused into the backward pass and clipped by the previous norm.
        """
        assert len(batches) * self.data_group.world == self.plan.grad_accum_steps, "one batch per accumulation step"
        assert self.phase is not Phase.PREDICT, "a predicted step needs no gradients; enter another phase first"
        number = self.steps_done + 1
        lr = self.lr_at(number) * lr_factor
        device_batches = self._upload(batches)
        targets = self.data_group.gather_numbers([batch.num_targets for batch in device_batches])
        self._share = StepShare(self.data_group.rank * len(batches), tuple(map(int, targets)))
        self._limits = limits
        self._hook = self.config.optimizer.step_hook(number, self.config.schedule.total_steps) if hook is None else hook
        self.parameters.last = None  # what a border rounds from now on is not a visit's
        run = self._fused_step if self.current_plan.grad.placement is Placement.DROPPED else self._stored_step
        loss, grad_norm = run(device_batches, number, lr)
        if self.loss_scale is not None:
            self.loss_scale.succeeded()
        self.steps_done = number
        num_tokens = int(sum(self.data_group.gather_numbers([batch.num_tokens for batch in batches])))
        return StepResult(number, loss, lr, grad_norm, num_tokens)

    def loss(self, batches: Sequence[TokenBatch]) -> float:
        """Return the mean loss of batches in nats per token, without dropout; weights and random streams stay."""
        self.model.eval()
        uploaded = self._upload(batches)
        try:
            losses = [self.executor.loss(batch) for batch in uploaded]
        finally:
            self.model.train()
        return mean_loss(self._of_head(losses, len(uploaded)), [batch.num_targets for batch in uploaded])

    def _of_head(self, losses: Sequence[Tensor], count: int) -> list[float]:
        """Return losses as numbers; in a pipeline, those of the stage with the head."""
        found = [self.transfer.read(value) for value in losses]
        if self.stages is None:
            return found
        return self.group.gather_numbers(found or [math.nan] * count)[-count:]

    def _upload(self, batches: Sequence[TokenBatch]) -> list[DeviceBatch]:
        with self._observer.region(Stage.LOAD, ""):
            marks = self.executor.balanced is not None
            return [upload_batch(batch, self.transfer, marks_padding=marks) for batch in batches]

    def _stored_step(self, batches: list[DeviceBatch], number: int, lr: float) -> tuple[float, float | None]:
        """Compute all gradients, then update."""
        losses = self._run_backward(batches, number)
        if self.loss_scale is None:
            batches.clear()
        grads = self.executor.grads
        norm = grads.norm() if self._wants_norm else None
        while norm is not None and self._has_overflowed(norm):
            self.executor.drop()
            losses = self._run_backward(batches, number)
            norm = grads.norm()
        factor = self._factor(norm)
        loss, grad_norm = self._checked(number, losses, norm)
        self.parameters.update(grads, self._settings(number, lr, factor))
        self.pass_tied()
        return loss, grad_norm

    def _fused_step(self, batches: list[DeviceBatch], number: int, lr: float) -> tuple[float, float | None]:
        """Update each block at the end of its backward visit."""
        factor, optimizer, looks = None, self.config.optimizer, not isinstance(self.transfer, VirtualTransfer)
        if self._wants_norm:
            # What overflows must be known before the first block is updated.
            is_known = optimizer.clip == "previous" and self.loss_scale is None
            norm = self.previous_norm if is_known else None
            looks = looks and norm is not None
            factor = self._factor(self._norm_alone(batches, number) if norm is None else norm)
        settings = self._settings(number, lr, factor)
        grads = self.executor.grads
        updated: list[Unit] = []

        def look(*units: Unit) -> None:
            if looks and not grads.are_finite([unit.name for unit in units]):
                raise self._refusal(number, "a gradient is not finite", is_applied=bool(updated))

        def update(unit: Unit) -> None:
            look(unit)
            self.parameters.update(grads, settings, [unit])
            updated.append(unit)

        losses = self._run_backward(batches, number, on_block_done=update)
        batches.clear()
        outside = [unit for unit in self.units if block_number(unit.name) < 0]
        look(*outside)
        norm = grads.norm() if self._wants_norm else None
        loss, grad_norm = self._checked(number, losses, norm, is_applied=True)
        self.previous_norm = norm
        self.parameters.update(grads, settings, outside)
        return loss, grad_norm

    def _norm_alone(self, batches: list[DeviceBatch], number: int) -> Tensor:
        """Run the step's forward and backward pass for the norm of its gradients; same random numbers, same sums."""
        grads = self.executor.grads
        while True:
            losses = self._run_backward(batches, number, on_block_done=lambda unit: grads.take(unit.name))
            norm = grads.norm()
            if not self._has_overflowed(norm):
                break
            self.executor.drop()
        try:
            self._checked(number, losses, norm)
        except SpikeError:
            raise
        except DivergenceError as error:  # once more, to inspect the dropped gradients
            layers: list[str] = []

            def look(unit: Unit) -> None:
                layers.extend(grads.non_finite([unit.name]))
                grads.take(unit.name)

            self._run_backward(batches, number, on_block_done=look)
            error.layers = (*layers, *grads.non_finite())
            self.executor.drop()
            raise
        grads.drop()
        return norm

    def _run_backward(
        self, batches: Sequence[DeviceBatch], number: int, *, on_block_done: BlockDone | None = None
    ) -> list[Tensor]:
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        seed = random_key(self.config.seed, number, _DROPOUT_STREAM)
        return self.executor.forward_backward(
            batches, seed=seed, share=self._share, on_block_done=on_block_done, loss_scale=scale
        )

    @property
    def _wants_norm(self) -> bool:
        return self.config.optimizer.max_grad_norm > 0 or self.loss_scale is not None

    def _has_overflowed(self, norm: Tensor) -> bool:
        """Return whether to repeat the step with a smaller loss scale."""
        if self.loss_scale is None or isinstance(self.transfer, VirtualTransfer):
            return False
        return not math.isfinite(self.transfer.read(norm)) and self.loss_scale.overflowed()

    @torch.no_grad()
    def _factor(self, norm: Tensor | None) -> Tensor | None:
        """Return the factor for gradients of this norm, loss scale included; None: they stay as they are."""
        if norm is None:
            return None
        limit, scale = self.config.optimizer.max_grad_norm, self.loss_scale
        with self._observer.region(Stage.UPDATE, ""):
            norm = norm if scale is None else norm / scale.value
            factor = torch.clamp(limit / (norm + _CLIP_EPS), max=1.0) if limit > 0 else torch.ones_like(norm)
            return factor if scale is None else factor / scale.value

    def _settings(self, number: int, lr: float, factor: Tensor | None) -> StepSettings:
        return StepSettings(number, lr, random_key(self.config.seed, number, _UPDATE_STREAM), factor, self._hook)

    def border_key(self, number: int) -> int:
        """Return the key of stochastic rounding after step ``number`` and before the next one."""
        return random_key(self.config.seed, number, _BORDER_STREAM)

    def _checked(
        self, step: int, losses: Sequence[Tensor], norm: Tensor | None, *, is_applied: bool = False
    ) -> tuple[float, float | None]:
        """Return loss and norm as numbers; raise if one of them is not finite."""
        count = len(self._share.num_targets) // self.data_group.world
        gathered = self.data_group.gather_numbers(self._of_head(losses, count))
        loss = mean_loss(gathered, self._share.num_targets)
        grad_norm = None if norm is None else self.transfer.read(norm)
        if grad_norm is not None and self.loss_scale is not None:
            grad_norm /= self.loss_scale.value
        if isinstance(self.transfer, VirtualTransfer):
            return loss, grad_norm
        limits = self._limits or StepLimits(math.inf, math.inf)
        for name, value, limit in (("loss", loss, limits.loss), ("gradient norm", grad_norm, limits.grad_norm)):
            if value is None or (math.isfinite(value) and value <= limit):
                continue
            kind = SpikeError if math.isfinite(value) else DivergenceError
            allowed = f"at most {limit:.4g}" if math.isfinite(value) else "a finite number"
            raise self._refusal(step, f"{name} is {value}; it must be {allowed}", is_applied=is_applied, kind=kind)
        if norm is None and not self.executor.grads.are_finite():
            raise self._refusal(step, "a gradient is not finite", is_applied=is_applied)
        return loss, grad_norm

    def _refusal(
        self, step: int, fault: str, *, is_applied: bool, kind: type[DivergenceError] = DivergenceError
    ) -> DivergenceError:
        """Return the error of a refused step, after dropping its gradients."""
        layers = () if issubclass(kind, SpikeError) else self.executor.grads.non_finite()
        self.executor.drop()
        outcome = "The update was not applied."
        if is_applied:
            outcome = "Some blocks are already updated; resume from the last checkpoint."
        return kind(
            f"step {step}: {fault}. {outcome} "
            f"Lower optimizer.lr ({self.config.optimizer.lr}), lengthen schedule.warmup_steps, or check data.",
            layers=layers, is_applied=is_applied,
        )  # fmt: skip

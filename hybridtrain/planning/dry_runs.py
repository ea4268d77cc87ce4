"""A dry run: the real trainer, step after step, on a card that does not exist. Nothing is computed, all is counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import ConfigError
from hybridtrain.kernel_rules import rules_of
from hybridtrain.memory.group import Group, VirtualGroup
from hybridtrain.memory.transfer import Transfer, VirtualTransfer
from hybridtrain.models.model_config import ModelConfig, Workload, check_workload
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import LinearKind, MemoryPlan
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.lean_meta import bypass_meta_wrappers
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.replay import SETTLING_STEPS, StepMemory, replay_on_card, replay_trace
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict, Host
from hybridtrain.virtual_gpu.cards.links import Collective, World
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck, StepTime, estimate_step
from hybridtrain.virtual_gpu.facade.card_run import CardRun

if TYPE_CHECKING:  # a plan without a cycle does not depend on what makes one
    from hybridtrain.hybrid.config import HybridConfig


_BYTES_PER_TOKEN = 2 * 8
"""Itself and its target, as int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(CardRun):
    """The figures of a dry run. Bytes are ``planned``, times are ``estimated``."""

    num_params: int
    tokens_per_step: int
    host: Host
    host_peak_bytes: int
    """Offloaded tensors and the batch on its way; the process itself comes on top."""
    host_by_class: dict[TensorClass, int]
    disk_peak_bytes: int
    phases: tuple[Phase, ...] = ()
    """Of the steps, where they are those of a cycle; empty: ordinary ones."""
    world: World = field(default_factory=World)
    """Which rank of how many this is; bytes are its own, tokens those of all."""

    @property
    def machine_host_bytes(self) -> int:
        """Host memory of all ranks of a machine, each taken to hold as much as this one."""
        return self.host_peak_bytes * self.world.local_size

    @property
    def machine_disk_bytes(self) -> int:
        """Likewise of its disk."""
        return self.disk_peak_bytes * self.world.local_size

    @property
    def fits(self) -> bool:
        """Whether card, host memory and disk hold every step."""
        return self.fits_card and self.fits_host

    @property
    def verdict(self) -> FitVerdict:
        """Whether it fits, and leaves the card's margin free."""
        return self.card.verdict(self.device_used_bytes, fits=self.fits)

    @property
    def fits_host(self) -> bool:
        """Whether host memory and disk hold what is offloaded."""
        return self.machine_host_bytes <= self.host.tensor_bytes and self.machine_disk_bytes <= self.host.disk_bytes

    def phase_of(self, step: int) -> Phase:
        """Return the phase of a step, counted from 1."""
        return self.phases[step - 1] if self.phases else Phase.FULL

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over its estimated time."""
        return self.tokens_per_step / self.time.seconds


def record_steps(
    model: ModelConfig,
    plan: MemoryPlan,
    batches: Sequence[Sequence[TokenBatch]],
    transfer: Transfer,
    config: TrainerConfig | None = None,
    hybrid: "HybridConfig | None" = None,
    group: Group | None = None,
    card: Card | None = None,
) -> LedgerTrace:
    """Return the ledger of building the trainer and running one phase step per entry of ``batches`` on any device.

    With ``hybrid`` a PREDICT phase is a step of the ledger too, and leaves its entry unused. ``card``: whose kernels
    run; None: one with flash attention.
    """
    ledger = StorageLedger()
    ledger.scratch_rules = {} if card is None else rules_of(card)
    with bypass_meta_wrappers(), ledger:
        trainer = Trainer(model, plan, config or TrainerConfig(), transfer, ledger, group=group)
        if hybrid is None:
            for step_batches in batches:
                ledger.begin_step()
                trainer.step(step_batches)
            return ledger.trace()
        from hybridtrain.hybrid.cycle import HybridTrainer  # noqa: PLC0415  as above

        runner = HybridTrainer(trainer, hybrid, lambda _: batches[0])
        for step_batches in batches:
            if runner.phase is Phase.PREDICT:  # what leaves the device for it belongs to the step before
                trainer.enter_phase(Phase.PREDICT)
            ledger.begin_step()
            runner.advance(lambda _, chosen=step_batches: chosen)  # type: ignore[misc]
    return ledger.trace()


def check_low_bit(plan: MemoryPlan, card: Card) -> None:
    """Raise ``ConfigError`` if a card cannot multiply in the plan's 8-bit format."""
    kind = plan.for_phase(Phase.FULL).linear
    if kind in {LinearKind.INT8, LinearKind.FLOAT8}:
        check_format(kind.value, card, "low_bit_matmul.format")


def check_format(name: str, card: Card, where: str) -> None:
    """Raise ``ConfigError`` if a card cannot multiply in an 8-bit format; ``where`` it was asked for."""
    if name not in card.low_bit_formats:
        allowed = ", ".join(card.low_bit_formats) or "none; drop it"
        raise ConfigError(where, [f"{card.name} multiplies no {name}; allowed: {allowed}"])


def on_card(run: DryRun, card: Card, host: Host) -> DryRun:
    """Return the dry run of one rank as it is on another card, with as large cuBLAS workspaces and the same kernels."""
    capacity, workspace = card.allocator_capacity_bytes, card.cublas_workspace_bytes
    fits = max(step.reserved_bytes for step in run.uncapped.steps) <= capacity
    capped = run.uncapped if fits else replay_trace(
        run.trace, workspace_bytes=workspace, capacity_bytes=capacity, repeats=SETTLING_STEPS
    )  # fmt: skip
    last = len(run.trace.steps) - 1
    time = estimate_step(
        run.trace.step_ops(last), card, upload_bytes=_BYTES_PER_TOKEN * run.tokens_per_step,
        first=run.trace.steps[last].op, host=host,
    )  # fmt: skip
    return replace(run, card=card, host=host, capped=capped, time=time)


def cycle_config() -> "HybridConfig":
    """Return the shortest cycle that has every phase: WARMUP, FULL, PREDICT on its own, CORRECT."""
    from hybridtrain.hybrid.config import HybridConfig  # noqa: PLC0415  as above

    return HybridConfig(warmup_steps=1, full_steps=1, fuse=False)


def phases_of_cycle() -> tuple[Phase, ...]:
    """Return the phases of the steps of ``cycle_config``."""
    return (Phase.WARMUP, Phase.FULL, Phase.PREDICT, Phase.CORRECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The bytes that a run asks for where nothing is too small; no times. ``planned``."""

    peak: StepMemory
    """The step with the most allocated bytes of the card."""
    reserved_bytes: int
    """Of the card, without the CUDA context."""
    host_bytes: int
    host_by_class: dict[TensorClass, int]
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunInputs:
    """A configuration to dry-run, its names and files resolved."""

    model: ModelConfig
    plan: MemoryPlan
    card: Card
    workload: Workload
    """One micro-batch."""
    config: TrainerConfig = field(default_factory=TrainerConfig)
    host: Host = field(default_factory=Host)
    """The machine around the card; by default one with enough of everything."""
    world: World = field(default_factory=World)
    """Which rank of how many cards, and what joins them."""
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    record_history: bool = False
    """Keep what snapshots need."""

    def dry_run(self, num_steps: int = 2) -> DryRun:
        """Run optimizer steps of one rank on the virtual card; as the function ``dry_run``."""
        check_low_bit(self.plan, self.card)
        model, world, transfer = self.model, self.world, VirtualTransfer()
        phases = phases_of_cycle() if self.plan.for_phase(Phase.FULL).history_tensors == 1 else ()
        num_steps = len(phases) or num_steps
        trace = self._record(num_steps, transfer, cycle_config() if phases else None)
        tokens, accum_steps = self.workload.micro_batch_size * self.workload.seq_len, self._accum_steps
        uncapped, capped = replay_on_card(
            trace, self.card, config=self.allocator, record_history=self.record_history, repeats=SETTLING_STEPS
        )
        time = estimate_step(
            on_links(trace.step_ops(num_steps - 1), self.card, world, is_pipeline=self._is_pipeline), self.card,
            upload_bytes=2 * accum_steps * tokens * np.dtype(np.int64).itemsize, first=trace.steps[-1].op,
            host=self.host.shared(world.local_size),
        )  # fmt: skip
        return DryRun(
            num_params=model.num_params, card=self.card, trace=trace, uncapped=uncapped, capped=capped,
            time=_with_idle_stages(time, world.size, accum_steps) if self._is_pipeline else time,
            tokens_per_step=self._all_steps * tokens, host=self.host,
            host_peak_bytes=transfer.host_bytes + transfer.tiers.peak_bytes(Placement.HOST),
            host_by_class=transfer.tiers.by_class(Placement.HOST),
            disk_peak_bytes=transfer.tiers.peak_bytes(Placement.DISK), phases=phases, world=world,
        )  # fmt: skip

    def demand(self) -> Demand:
        """Return the bytes that two steps of a plan without a cycle ask for, of the rank that asks for most."""
        found = []
        for rank in sorted({0, self.world.size - 1}):
            transfer, inputs = VirtualTransfer(), replace(self, world=replace(self.world, rank=rank))
            trace = inputs._record(2, transfer)  # the first step makes the state
            workspace = self.card.cublas_workspace_bytes
            steps = replay_trace(trace, workspace_bytes=workspace, repeats=SETTLING_STEPS).steps
            demand = Demand(
                peak=max(steps, key=lambda step: step.allocated_bytes),
                reserved_bytes=max(step.reserved_bytes for step in steps),
                host_bytes=transfer.host_bytes + transfer.tiers.peak_bytes(Placement.HOST),
                host_by_class=transfer.tiers.by_class(Placement.HOST),
                disk_bytes=transfer.tiers.peak_bytes(Placement.DISK),
            )
            found.append(demand)
        return max(found, key=lambda demand: demand.reserved_bytes)

    def _record(self, num_steps: int, transfer: VirtualTransfer, hybrid: "HybridConfig | None" = None) -> LedgerTrace:
        workload, world = self.workload, self.world
        check_workload(self.model, workload)
        group = VirtualGroup(world.rank, world.size) if world.size > 1 else None
        empty = np.zeros((workload.micro_batch_size, workload.seq_len), dtype=np.int64)
        batches = [[TokenBatch(token_ids_BT=empty, target_ids_BT=empty)] * self._accum_steps] * num_steps
        return record_steps(self.model, self.plan, batches, transfer, self.config, hybrid, group, self.card)

    @property
    def _all_steps(self) -> int:
        """Micro-batches of a step, of all ranks."""
        return self.plan.for_phase(Phase.FULL).grad_accum_steps

    @property
    def _accum_steps(self) -> int:
        """Those of one rank."""
        return self._all_steps if self._is_pipeline else max(self._all_steps // self.world.size, 1)

    def dry_run_ranks(self) -> tuple[DryRun, ...]:
        """Run the ranks that differ, the one that holds most of its card first; errors of ``dry_run``.

        Ranges and data differ by what does not divide evenly: the first rank and the last are run. Of a pipeline the
        second stage is too, which has neither embedding nor head and keeps more in flight than those after it.
        """
        size = self.world.size
        ranks = {0, min(1, size - 1) if self._is_pipeline else 0, size - 1}
        runs = [replace(self, world=replace(self.world, rank=rank)).dry_run() for rank in sorted(ranks)]
        return tuple(sorted(runs, key=lambda run: -run.device_used_bytes))

    @property
    def _is_pipeline(self) -> bool:
        return self.plan.for_phase(Phase.FULL).pipeline_stages > 1


def dry_run(
    model: ModelConfig, plan: MemoryPlan, card: Card, workload: Workload, *, host: Host | None = None,
    num_steps: int = 2, config: TrainerConfig | None = None, allocator: AllocatorConfig | None = None,
    record_history: bool = False, world: World | None = None,
) -> DryRun:  # fmt: skip
    """Run optimizer steps of a model on the virtual card.

    The first step allocates the optimizer state, a later one is the steady state, whose reserved bytes are those that
    it settles at when it is repeated; time is estimated for the last. A plan that keeps a slow average is run through a
    whole cycle instead: WARMUP, FULL, PREDICT, CORRECT.

    ``workload`` is one micro-batch; the fields of ``DryRunInputs`` say what the others are. The first of several ranks
    holds the most: a range that does not divide evenly is shorter on the last ones.

    Raises:
        ConfigError: the workload does not suit the model, or the plan the ranks or the card.
    """
    return DryRunInputs(
        model=model, plan=plan, card=card, workload=workload, host=host or Host(), config=config or TrainerConfig(),
        allocator=allocator or AllocatorConfig(), record_history=record_history, world=world or World(),
    ).dry_run(num_steps)  # fmt: skip


def on_links(ops: Sequence[OpRecord], card: Card, world: World, *, is_pipeline: bool) -> Sequence[OpRecord]:
    """Return the ops of a step of one rank, what passes between cards with the time that it keeps the link.

    All-to-all and all-gather, the two collectives that a ``Group`` has, send as much in as many steps; a stage gives a
    tensor to one other.
    """
    if world.size == 1:
        return ops
    kind, ranks = (Collective.BROADCAST, 2) if is_pipeline else (Collective.ALL_GATHER, world.size)
    return [
        replace(op, link_seconds=world.seconds(kind, op.bytes_moved, ranks, card)) if op.lane is Lane.LINK else op
        for op in ops
    ]


def _with_idle_stages(time: StepTime, stages: int, micro_batches: int) -> StepTime:
    """Return a step in which a stage waits while the first micro-batches come and the last ones go.

    (S - 1) / M of its passes, for GPipe (Huang et al., 1811.06965) and 1F1B (Narayanan et al., 2104.04473) alike, where
    all stages take as long; the update waits for nobody.
    """
    passes = time.seconds - time.seconds_by_bound.get(Bottleneck.OPTIMIZER, 0.0)
    idle = passes * (stages - 1) / micro_batches
    by_bound = time.seconds_by_bound | {Bottleneck.LINK: time.seconds_by_bound.get(Bottleneck.LINK, 0.0) + idle}
    return replace(time, seconds=time.seconds + idle, seconds_by_bound=by_bound)

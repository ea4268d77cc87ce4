"""A stack of optimizations becomes one memory plan. The order of the stack never matters."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from hybridtrain.errors import PlanConflictError
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, PlanValue, Schedule, UpdateDevice
from hybridtrain.plan.memory_plan import MemoryPlan, PhasePlan, resolve
from hybridtrain.plan.phase_change import border_faults
from hybridtrain.plan.placement import Codec, Placement


class Optimization(Protocol):
    """What a stack is made of: a frozen dataclass that turns its settings into claims and knows nothing else."""

    kind: ClassVar[str]

    def claims(self) -> Iterable[Claim]:
        """Return the cells and settings this optimization asks for."""
        ...


def compose(stack: Sequence[Optimization]) -> MemoryPlan:
    """Unite the claims of a stack into a plan.

    A claim for one phase wins over a claim for every phase by the same owner or another one.

    Raises:
        PlanConflictError: two owners ask for different values of one cell, one kind is listed twice, or the values
            together describe nothing that could run.
    """
    _refuse_twice(stack)
    plan = MemoryPlan(phases={phase: resolve(_claims_for(stack, phase)) for phase in Phase})
    faults = [
        fault
        for phase in Phase
        for fault in plan_faults(plan.for_phase(phase), keeps_boundaries=phase is not Phase.PREDICT)
    ] + border_faults(plan)
    if faults:
        raise PlanConflictError("\n".join(dict.fromkeys(faults)))
    return plan


def plan_faults(plan: PhasePlan, *, keeps_boundaries: bool = True) -> list[str]:
    """Return what contradicts itself in a table, one sentence each; PREDICT keeps no boundaries."""
    faults = []
    is_offloaded = keeps_boundaries and plan.boundary.placement in {Placement.HOST, Placement.DISK}
    if is_offloaded and not plan.recompute_every:
        faults.append(
            "boundary.placement: activation_offload needs gradient_checkpointing in the stack; without it the "
            "activations inside the blocks stay on the device and nothing would be saved."
        )
    if plan.grad.placement is Placement.DROPPED and plan.grad_accum_steps > 1:
        in_one_visit = plan.visit_micro_batches in {0, plan.grad_accum_steps}
        if plan.schedule is Schedule.HORIZONTAL or not in_one_visit:
            faults.append(
                f"grad.placement: fused_update with {plan.grad_accum_steps} accumulated micro-batches needs "
                "grad_accumulation with schedule = 'vertical' and all micro-batches in one visit."
            )
    if plan.update_on is UpdateDevice.HOST and Codec.FACTORED is plan.optim_state.codec:
        faults.append("update_on: factored_optimizer updates on the device; use update_on = 'device' with it.")
    if plan.update_on is UpdateDevice.HOST and plan.weight.placement is Placement.DISK:
        faults.append(
            "update_on: an update on the host works in host memory; stream weights with tier = 'host', not 'disk'."
        )
    if plan.weight.codec is Codec.INT8_BLOCKS and plan.master.codec is Codec.SPLIT16:
        faults.append("master.codec: split16 completes bfloat16 weights only; with int8_weights use float32 or absent.")
    if plan.history_tensors and plan.optim_state.placement is Placement.DROPPED:
        faults.append(
            "optim_state.placement: predict_memory with optimizer_state = 'drop' forgets the second moment that a "
            "predicted step divides by; with predictor_state use 'cpu', 'compress' or 'none'."
        )
    return faults


def _claims_for(stack: Sequence[Optimization], phase: Phase) -> dict[str, PlanValue]:
    every_phase = _unite(stack, None)
    return every_phase | _unite(stack, phase)


def _unite(stack: Sequence[Optimization], phase: Phase | None) -> dict[str, PlanValue]:
    owners: dict[str, tuple[str, PlanValue]] = {}
    for optimization in stack:
        for claim in optimization.claims():
            if claim.phase is not phase:
                continue
            owner, value = owners.setdefault(claim.path, (optimization.kind, claim.value))
            if value != claim.value:
                raise PlanConflictError(
                    f"{claim.path}: '{owner}' asks for {value}, '{optimization.kind}' asks for {claim.value}; "
                    f"a cell has one value: drop one of them or make them agree."
                )
    return {path: value for path, (_, value) in owners.items()}


def _refuse_twice(stack: Sequence[Optimization]) -> None:
    kinds = [optimization.kind for optimization in stack]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise PlanConflictError(f"'{kind}' stands {kinds.count(kind)} times in the stack; keep one of them.")

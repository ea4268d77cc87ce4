"""A stack of optimizations becomes one memory plan. The order of the stack never matters."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from hybridtrain.errors import PlanConflictError
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, PlanValue
from hybridtrain.plan.memory_plan import MemoryPlan, resolve


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
        PlanConflictError: two owners ask for different values of one cell, or one kind is listed twice.
    """
    _refuse_twice(stack)
    return MemoryPlan(phases={phase: resolve(_claims_for(stack, phase)) for phase in Phase})


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

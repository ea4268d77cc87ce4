"""A stack of optimizations becomes one memory plan. The order of the stack never matters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.errors import PlanConflictError
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, check_settings, setting_claims
from hybridtrain.plan.memory_plan import SETTINGS, MemoryPlan, PhasePlan, PlanValue, resolve
from hybridtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """A memory optimization of a stack: a frozen dataclass whose settings become claims.

    A field with the name of a plan setting claims it, and is checked against its range.
    """

    kind: ClassVar[str]
    SWITCH: ClassVar[str] = ""
    """The plan setting that is 0 without this optimization."""
    CELLS: ClassVar[Mapping[str, PlanValue]] = {}
    """Constant claims by path."""
    PATHS: ClassVar[Mapping[str, str]] = {}
    """Field names -> paths, where they differ."""

    def __post_init__(self) -> None:
        check_settings(self)

    def claims(self) -> Iterable[Claim]:
        """Yield the claims of this optimization."""
        yield from (Claim(path, value) for path, value in self.CELLS.items())
        yield from (Claim(path, SETTINGS[path].read(getattr(self, name))) for name, path in self.PATHS.items())
        yield from setting_claims(self)


def compose(stack: Sequence[Optimization]) -> MemoryPlan:
    """Compose the claims of a stack to a plan. A claim for one phase takes precedence over claims for all phases.

    Raises:
        PlanConflictError: two optimizations claim different values, one kind is listed twice, or the values are
        contradictory.
    """
    _refuse_twice(stack)
    owned = [(optimization.kind, claim) for optimization in stack for claim in optimization.claims()]
    tables: dict[Phase, PhasePlan] = {}
    faults: list[str] = []
    for phase, claims in {phase: _claims_for(owned, phase) for phase in Phase}.items():
        try:
            tables[phase] = resolve(claims)
        except PlanConflictError as error:
            faults += str(error).splitlines()
    if faults:
        raise PlanConflictError("\n".join(dict.fromkeys(faults)))
    return MemoryPlan(phases=tables)


_Owned = Sequence[tuple[str, Claim]]
"""Claims with the kinds of their owners."""


def _claims_for(owned: _Owned, phase: Phase) -> dict[str, PlanValue]:
    claims = _unite(owned, None) | _unite(owned, phase)
    is_offloaded = claims.get("boundary.placement") in {Placement.HOST, Placement.DISK}
    if phase is Phase.PREDICT and is_offloaded and not claims.get("recompute_every"):
        claims["boundary.placement"] = Placement.DROPPED  # without a backward pass nothing asks for them
    return claims


def _unite(owned: _Owned, phase: Phase | None) -> dict[str, PlanValue]:
    owners: dict[str, tuple[str, PlanValue]] = {}
    for kind, claim in owned:
        if claim.phase is not phase:
            continue
        owner, value = owners.setdefault(claim.path, (kind, claim.value))
        if value != claim.value:
            raise PlanConflictError(
                f"{claim.path}: '{owner}' requires {value}, but '{kind}' requires {claim.value}; drop one of them, or "
                f"make them agree."
            )
    return {path: value for path, (_, value) in owners.items()}


def _refuse_twice(stack: Sequence[Optimization]) -> None:
    kinds = [optimization.kind for optimization in stack]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise PlanConflictError(f"'{kind}' appears {kinds.count(kind)} times in the stack; keep one of them.")

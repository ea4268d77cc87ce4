"""How exact numbers are in each phase, and where they are: the part of a plan that a reader asks for first."""

from collections.abc import Mapping

from tabulate import tabulate

from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import Cell, MemoryPlan, PhasePlan
from hybridtrain.plan.placement import Codec, Placement

_COLUMNS = ("compute", "weights", "master", "gradients", "optimizer_state")


def phase_precision(plan: MemoryPlan) -> dict[str, dict[str, str]] | None:
    """Return, by phase, what arithmetic is in and how each class is stored and where; None: all phases are alike."""
    rows = {phase.value: _row(plan.for_phase(phase), phase) for phase in Phase}
    asked = [row | {"gradients": ""} for row in rows.values()]  # PREDICT never has any
    return None if all(row == asked[0] for row in asked) else rows


def phase_table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the same for a reader."""
    told = [[phase, *(row[name] for name in _COLUMNS)] for phase, row in rows.items()]
    headers = ["phase", *(name.replace("_", " ") for name in _COLUMNS)]
    return tabulate(told, headers=headers, tablefmt="simple", disable_numparse=True)


def _row(plan: PhasePlan, phase: Phase) -> dict[str, str]:
    return {
        "compute": str(plan.compute_dtype),
        "weights": _words(plan.weight),
        "master": _words(plan.master),
        "gradients": "none" if phase is Phase.PREDICT else _words(plan.grad),
        "optimizer_state": _words(plan.optim_state),
    }


def _words(cell: Cell) -> str:
    if cell.codec is Codec.ABSENT:
        return "none"
    if cell.placement is Placement.DROPPED:
        return "dropped"
    return f"{str(cell.codec).removesuffix('_blocks')} on {cell.placement}"

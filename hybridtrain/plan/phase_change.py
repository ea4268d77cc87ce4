"""What may change at the border between two phases: everything that leaves what FULL trains as it is, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec, Placement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridtrain.plan.memory_plan import PhasePlan

_SAME_EVERYWHERE = ("grad_accum_steps", "update_on", "history_codec", "history_tensors")
_SAME_IN_STEPS = ("optim_state", *_SAME_EVERYWHERE)
"""Of phases with true steps; PREDICT puts optimizer state elsewhere."""


def weight_storage(plan: PhasePlan) -> tuple[object, ...]:
    """Return what decides how weights are stored; at a border where it changes they are stored anew."""
    is_int8 = plan.weight.codec is Codec.INT8_BLOCKS
    is_streamed = plan.weight.placement is not Placement.DEVICE
    return (
        plan.weight,
        plan.master.codec,
        plan.compute_dtype,
        plan.max_active_layers if is_int8 or is_streamed else None,
        (plan.prefetch_distance, plan.resident_layers) if is_streamed else None,
        plan.static_scales if is_int8 else None,
    )


def border_faults(full: PhasePlan, other: PhasePlan, phase: Phase) -> Iterator[str]:
    """Yield what cannot change between FULL and ``phase``, one sentence each."""
    for name in _SAME_EVERYWHERE if phase is Phase.PREDICT else _SAME_IN_STEPS:
        if getattr(other, name) != getattr(full, name):
            yield (
                f"{name}: {_words(getattr(other, name))} in {phase}, {_words(getattr(full, name))} in full; it must be "
                "the same there: let the optimization act in every phase."
            )
    yield from _losses(full, other, phase)


def _losses(full: PhasePlan, other: PhasePlan, phase: Phase) -> Iterator[str]:
    """Yield a sentence where a phase cannot keep all that FULL trains."""
    for what, trained, kept in zip(("matrices", "vectors"), _exactness(full), _exactness(other), strict=True):
        is_wider = kept[0] is Codec.FLOAT32 and trained[0] is not Codec.INT8_BLOCKS
        if kept == trained or is_wider:
            continue
        allowed = f"{trained[0]} values"
        if trained[0] is Codec.INT8_BLOCKS:
            allowed = "int8 codes without a master and with the same scales, whose grid no other storage returns to"
        elif trained[0] is not Codec.FLOAT32:
            allowed += " or wider ones"
        yield (
            f"weight: {what} are trained as {trained[0]} in full, but {phase} would keep {kept[0]}, and they would not "
            f"come back to the bit; allowed in {phase}: {allowed}. Set master = 'float32' (or 'split16' with bfloat16 "
            f"weights) where only {phase} is meant, or let the optimization act in every phase."
        )
        return


def _exactness(plan: PhasePlan) -> tuple[tuple[Codec, bool], tuple[Codec, bool]]:
    """Return what is kept of matrices and of vectors, and whether its scales are static."""
    exact = (Codec.FLOAT32, False)
    has_master = plan.master.codec is not Codec.ABSENT
    is_int8 = plan.weight.codec is Codec.INT8_BLOCKS
    values = exact if has_master else (plan.compute_dtype if is_int8 else plan.weight.codec, False)
    if not is_int8:
        return values, values
    return (exact if has_master else (Codec.INT8_BLOCKS, plan.static_scales)), values


def _words(value: object) -> str:
    placement, codec = getattr(value, "placement", None), getattr(value, "codec", None)
    return str(value) if placement is None else f"{codec} on {placement}"

"""Precision of a run: casts in each phase, and advice on dtypes for the card."""

from collections import Counter
from collections.abc import Iterator

import torch

from hybridtrain.engine.loss_scale import LossScale
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.units import format_bytes

_HALF_PRODUCTS, _BFLOAT16_PRODUCTS = (7, 0), (8, 0)
"""Compute capability from which tensor cores multiply float16, and bfloat16 (CUDA C++ Programming Guide, appendix on
compute capabilities)."""


class CastCounts:
    """Casts of weights and gradients by phase: slices and bytes written.

    Dequantization for a block visit is not included.
    """

    def __init__(self) -> None:
        self._slices: Counter[tuple[Phase, str, str]] = Counter()
        self._bytes: Counter[tuple[Phase, str, str]] = Counter()

    def add(self, phase: Phase, source: torch.dtype, target: torch.dtype, num_elements: int) -> None:
        """Count one slice, unless both dtypes are equal."""
        if source == target:
            return
        key = (phase, _name(source), _name(target))
        self._slices[key] += 1
        self._bytes[key] += num_elements * target.itemsize

    def as_mapping(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return counts and bytes by phase and by types."""
        by_phase: dict[str, dict[str, dict[str, int]]] = {}
        for (phase, source, target), count in sorted(self._slices.items()):
            casts = {"count": count, "bytes": self._bytes[phase, source, target]}
            by_phase.setdefault(phase.value, {})[f"{source} to {target}"] = casts
        return by_phase

    def as_text(self) -> str:
        """Return a line for each phase; empty where nothing was cast."""
        lines = []
        for phase, by_type in self.as_mapping().items():
            words = (f"{cast['count']:,} {types} ({format_bytes(cast['bytes'])})" for types, cast in by_type.items())
            lines.append(f"casts in {phase}: {', '.join(words)}")
        return "\n".join(lines)


def device_capability() -> tuple[int, int] | None:
    """Return the compute capability of the card of this process; None: there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def precision_advice(plans: MemoryPlan, capability: tuple[int, int] | None) -> Iterator[str]:
    """Yield advice if another dtype suits the card better.

    ``capability`` None means the CPU, where 16 bits save memory but no time.
    """
    used = {plans.for_phase(phase).compute_dtype for phase in Phase}
    if capability is None:
        return
    has_bfloat16 = capability >= _BFLOAT16_PRODUCTS
    if Codec.BFLOAT16 in used and not has_bfloat16:
        yield (
            f"precision: this card (compute capability {_words(capability)}) has no bfloat16 tensor cores, which need "
            f"{_words(_BFLOAT16_PRODUCTS)}; set mixed_precision's compute_dtype = 'float16', master = 'float32'"
        )
    if used == {Codec.FLOAT32} and capability >= _HALF_PRODUCTS:
        yield (
            "precision: this card multiplies 16-bit matrices faster than float32; add mixed_precision with "
            "compute_dtype = "
            f"'{'bfloat16' if has_bfloat16 else 'float16'}'"
        )


def overflow_advice(loss_scale: LossScale | None, capability: tuple[int, int] | None) -> Iterator[str]:
    """Yield advice if float16 gradients overflowed and bfloat16 would not."""
    overflows = 0 if loss_scale is None else loss_scale.overflows
    if overflows and (capability is None or capability >= _BFLOAT16_PRODUCTS):
        yield (
            f"precision: float16 gradients overflowed {overflows} times, and each of these steps was repeated; "
            f"bfloat16 has the "
            "range of float32: set mixed_precision's compute_dtype = 'bfloat16'"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))

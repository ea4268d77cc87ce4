"""Result of the fixture ``memory_plan``: planned memory of a model's training step."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hybridtrain.sizes import parse_size
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridvalidation.gate.holders import fold
from hybridvalidation.gate.memory_baseline import PlanFigures

if TYPE_CHECKING:  # torch is imported when the first plan is made: the plugin is in every run of pytest
    import torch

    from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
    from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
    from hybridtrain.virtual_gpu.cards.card import Card
    from hybridtrain.virtual_gpu.facade.card_run import CardRun
    from hybridtrain.virtual_gpu.facade.estimate import Batch, Loss

_PACKAGES = ("torch", "transformers", "peft", "hybridtrain")


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Planned memory of a training step, from a dry run."""

    name: str
    run: "CardRun"
    verdict: FitVerdict
    """Whether reserved bytes and CUDA context fit the card; BARELY: without the margin."""
    limits_bytes: list[int] = field(default_factory=list)
    """Limit of ``assert_peak_below``."""

    @property
    def fits_card(self) -> bool:
        """Whether the plan fits the card, with or without the margin."""
        return self.verdict is not FitVerdict.NO

    @property
    def peak_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated`` of a step."""
        return self.run.peak.allocated_bytes

    def by_class(self) -> "dict[TensorClass, int]":
        """Return the peak's bytes by holder: weights, gradients, optimizer state, activations."""
        return self.run.by_class()

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Return the peak's bytes by module path, the largest first; ``depth`` as for ``MemoryEstimate.by_module``."""
        from hybridtrain.virtual_gpu.facade.estimate import by_module  # noqa: PLC0415  torch

        return by_module(self.run, depth)

    def assert_peak_below(self, limit: str | int) -> None:
        """Fail unless the peak is below ``limit``: bytes, or a size like ``"12 GiB"``.

        Raises:
            AssertionError: the peak is not below; the message lists the largest holders. ConfigError: the limit is not
            a size.
        """
        __tracebackhide__ = True
        limit_bytes = limit if isinstance(limit, int) else parse_size(limit, "assert_peak_below")
        self.limits_bytes.append(limit_bytes)
        if self.peak_bytes >= limit_bytes:
            largest = list(self.by_module().items())[:3]
            held = ", ".join(f"{name or 'the model itself'} {format_bytes(size)}" for name, size in largest)
            raise AssertionError(
                f"planned memory of '{self.name}': the peak is {format_bytes(self.peak_bytes)} on "
                f"{self.run.card.name}; the limit is {format_bytes(limit_bytes)}. Largest holders: {held}; reduce "
                f"them, or raise the limit."
            )

    def figures(self, test: str) -> PlanFigures:
        """Return the figures for a baseline."""
        peak = self.run.peak
        held = {f"{kind}/{unit}": size for (kind, unit), size in peak.by_unit.items() if size}
        with_ = (f"{name} {version(name).partition('+')[0]}" for name in _PACKAGES if name in sys.modules)
        return PlanFigures(
            test=test, card=self.run.card.name, fits=self.fits_card, peak_bytes=self.peak_bytes, by_module=fold(held),
            made_with=", ".join(with_), fits_barely=self.verdict is FitVerdict.BARELY,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryPlanner:
    """The fixture ``memory_plan``: call it with a model and a batch."""

    test: str
    """Node id of the test, the default name of the plan."""
    plans: list[PlannedMemory] = field(default_factory=list)

    def __call__(
        self, model: "torch.nn.Module | Callable[[], torch.nn.Module]", batch: "Batch", *,
        card: "Card | str" = "rtx-4090", name: str | None = None,
        optimizer: "str | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]" = "AdamW",
        loss: "Loss | None" = None, autocast: "torch.dtype | None" = None, clip_grad_norm: float | None = None,
        micro_batches: int = 1, allocator: "AllocatorConfig | None" = None,
    ) -> PlannedMemory:  # fmt: skip
        """Plan a training step; ``name`` is that of the plan in the baseline, the rest as for ``estimate_memory``."""
        from hybridtrain.errors import ConfigError  # noqa: PLC0415  with torch
        from hybridtrain.virtual_gpu.facade.estimate import estimate_memory  # noqa: PLC0415

        __tracebackhide__ = True
        try:
            found = estimate_memory(
                model, batch, card=card, optimizer=optimizer, loss=loss, autocast=autocast,
                clip_grad_norm=clip_grad_norm, micro_batches=micro_batches, allocator=allocator,
            )  # fmt: skip
        except ConfigError as error:  # the test's line and the sentence say all
            raise error.with_traceback(None) from None
        return self._keep(name, found.run, verdict=found.verdict)

    def of_run(self, run: "CardRun", *, name: str | None = None) -> PlannedMemory:
        """Use the report of a ``VirtualGpu``, for custom training loops."""
        return self._keep(name, run, verdict=run.verdict)

    def _keep(self, name: str | None, run: Any, *, verdict: FitVerdict) -> PlannedMemory:
        plan = PlannedMemory(name=name or self.test, run=run, verdict=verdict)
        if any(plan.name == other.name for other in self.plans):
            raise ValueError(f"memory_plan: {self.test} plans '{plan.name}' twice; give each plan its own name=.")
        self.plans.append(plan)
        return plan

"""What ``recommend`` searches: how exact numbers are, times where things live."""

from dataclasses import dataclass
from typing import Literal

from hybridtrain.optimizations.activation_offload import ActivationOffload
from hybridtrain.optimizations.bf16_optimizer import Bf16Optimizer
from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.optimizations.factored_optimizer import FactoredOptimizer
from hybridtrain.optimizations.fused_update import FusedUpdate
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_optimizer import Int8Optimizer
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.optimizer_offload import OptimizerOffload
from hybridtrain.optimizations.weight_streaming import WeightStreaming
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True)
class Numerics:
    """How exact weights and optimizer state are: one level of the search."""

    name: str
    says: str
    optimizations: tuple[Optimization, ...]
    weight_bytes: float
    """Per parameter, as streamed."""
    state_bytes: float
    """Master and moments, per parameter."""
    accumulator: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type in which gradients wait."""

    @property
    def grad_bytes(self) -> int:
        """Per parameter."""
        return 4 if self.accumulator == "float32" else 2


LEVELS = (
    Numerics(
        "exact", "exact fp32 master weights, fp32 moments", (MixedPrecision(master="split16"),), 2, 10, "float32"
    ),
    Numerics(
        "int8-state", "exact fp32 master weights, 8-bit moments",
        (MixedPrecision(master="split16"), Int8Optimizer()), 2, 4.05, "float32",
    ),
    Numerics(
        "bf16", "bf16 weights with stochastic rounding, bf16 moments",
        (MixedPrecision(master="absent"), Bf16Optimizer()), 2, 4,
    ),
    Numerics(
        "bf16-int8-state", "bf16 weights with stochastic rounding, 8-bit moments",
        (MixedPrecision(master="absent"), Int8Optimizer()), 2, 2.05,
    ),
    Numerics(
        "bf16-factored", "bf16 weights with stochastic rounding, factored state",
        (MixedPrecision(master="absent"), FactoredOptimizer()), 2, 0.02,
    ),
    Numerics(
        "int8-factored", "8-bit weights with stochastic rounding, factored state",
        (MixedPrecision(master="absent"), Int8Weights(), FactoredOptimizer()), 1.02, 0.02,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where things live, and in which order micro-batches pass: one shape of the search."""

    name: str
    streams: bool = False
    offloads_state: bool = False
    fuses: bool = False
    """Vertical, gradients never stored, boundaries on the host."""

    def optimizations(
        self, level: Numerics, num_micro_batches: int, keep_last: int, resident_layers: int = 0
    ) -> tuple[Optimization, ...]:
        """Return the whole stack for a number of micro-batches."""
        stack: list[Optimization] = [
            *level.optimizations,
            GradientCheckpointing(recompute_every=1, kept_blocks=keep_last),
            ChunkedLoss(loss_chunk_tokens=2048),
            GradAccumulation(
                grad_accum_steps=num_micro_batches,
                schedule="vertical" if self.fuses else "horizontal",
                accumulator=level.accumulator,
            ),
        ]
        if self.streams:
            stack.append(WeightStreaming(resident_layers=resident_layers))
        if self.offloads_state:
            stack.append(OptimizerOffload(offload_grads=not self.fuses))
        if self.fuses:
            stack += [FusedUpdate(), ActivationOffload()]
        return tuple(stack)


ARRANGEMENTS = (
    Arrangement("all on the card"),
    Arrangement("optimizer state on the host", offloads_state=True),
    Arrangement("weights and state on the host", streams=True, offloads_state=True),
    Arrangement("weights on the host, update fused", streams=True, offloads_state=True, fuses=True),
)

"""The memory optimizations: one file each, one line here."""

from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_optimizer import Int8Optimizer
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.plan.compose import Optimization

OPTIMIZATIONS: dict[str, type[Optimization]] = {
    ChunkedLoss.kind: ChunkedLoss,
    GradAccumulation.kind: GradAccumulation,
    GradientCheckpointing.kind: GradientCheckpointing,
    Int8Optimizer.kind: Int8Optimizer,
    MixedPrecision.kind: MixedPrecision,
}

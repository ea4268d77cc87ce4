"""The memory optimizations: one file each, one line here."""

from hybridtrain.optimizations.activation_offload import ActivationOffload
from hybridtrain.optimizations.bf16_optimizer import Bf16Optimizer
from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.optimizations.factored_optimizer import FactoredOptimizer
from hybridtrain.optimizations.flash_attention import FlashAttention
from hybridtrain.optimizations.fused_update import FusedUpdate
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_optimizer import Int8Optimizer
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.optimizer_offload import OptimizerOffload
from hybridtrain.optimizations.predict_memory import PredictMemory
from hybridtrain.optimizations.predictor_state import PredictorState
from hybridtrain.optimizations.weight_streaming import WeightStreaming
from hybridtrain.plan.compose import Optimization

OPTIMIZATIONS: dict[str, type[Optimization]] = {
    ActivationOffload.kind: ActivationOffload,
    Bf16Optimizer.kind: Bf16Optimizer,
    ChunkedLoss.kind: ChunkedLoss,
    FactoredOptimizer.kind: FactoredOptimizer,
    FlashAttention.kind: FlashAttention,
    FusedUpdate.kind: FusedUpdate,
    GradAccumulation.kind: GradAccumulation,
    GradientCheckpointing.kind: GradientCheckpointing,
    Int8Optimizer.kind: Int8Optimizer,
    Int8Weights.kind: Int8Weights,
    MixedPrecision.kind: MixedPrecision,
    OptimizerOffload.kind: OptimizerOffload,
    PredictMemory.kind: PredictMemory,
    PredictorState.kind: PredictorState,
    WeightStreaming.kind: WeightStreaming,
}

"""Stated figures recomputed from a model's shape, compared with a dry run's."""

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE
from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.models.model_config import block_params
from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.units import GB, format_count
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.judge.case import Case, Decider, Metric, MetricOf
from hybridvalidation.judge.planned import kept_bytes_reduction, optimizer_reduction, weight_peak_reduction
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import StatedParts

_BACKWARD_SHARE = 0.3
"""Share of steps with a backward pass, as stated (20-30 %); the upper end."""
_PREDICT_SHARE = 0.8
"""Share of predicted steps, as stated."""
_INT8_BYTES = 1 + 4 / GROUP_SIZE
"""Bytes per weight: its code and its part of a float32 scale."""
_MOMENT_BYTES = 1 + 4 / QUANT_GROUP_SIZE
"""Bytes per moment: its code and its part of a float32 scale."""
_HALF_BYTES = 2.0
"""Bytes of a 16-bit weight."""
_MB = 10**6


def sum_of_parts_gb(case: Case) -> Metric:
    """Recompute a stated total in GB from its stated parts; a dry run decides if there is one."""
    parts, own = _parts(case), case.model.num_params
    num_params = own if parts.num_params is None else parts.num_params
    value = parts.bytes_per_param * num_params / GB + parts.activation_gb
    remark = (
        f"{parts.weight:g} + {parts.grad:g} + {parts.optim_state:g} bytes for each of {num_params / 1e9:.2f}B "
        f"parameters and {parts.activation_gb:g} GB of activations as stated"
    )
    if parts.num_params is not None:
        remark += f" (this model has {own / 1e9:.2f}B: {parts.bytes_per_param * own / GB + parts.activation_gb:.2f} GB)"
    if case.memory is None:
        return Metric(value, Evidence.ARITHMETIC, "GB", remark=remark)
    decider = Decider(
        case.memory.peak_allocated_bytes / GB, Evidence.PLANNED, "adds up the document's own parts",
        "the peak of allocated bytes", is_saving=False,
    )  # fmt: skip
    remark += f"; {_planned_parts(case.memory)}"
    return Metric(value, Evidence.ARITHMETIC, "GB", remark=remark, decider=decider)


def bytes_per_layer_mb(case: Case) -> Metric:
    """Return MB of one block's weights, gradients and optimizer state."""
    parts, num_params = _parts(case), block_params(case.model)
    value = parts.bytes_per_param * num_params / _MB
    remark = (
        f"{format_count(num_params)} parameters per block, its weights alone {parts.weight * num_params / _MB:.0f} MB, "
        f"{case.model.num_blocks} blocks {case.model.num_blocks * value / 1000:.1f} GB"
    )
    return Metric(value, Evidence.ARITHMETIC, "MB", remark=remark)


def _activation_reduction(backward_share: float, stated_is: str) -> MetricOf:
    """Return the metric: reduction of kept block inputs by checkpointing, in steps that run backward."""

    def metric(case: Case) -> Metric | None:
        planned = kept_bytes_reduction(case)
        if planned is None or case.dry_run is None:
            return None
        num_blocks = case.model.num_blocks
        kept = -(-num_blocks // max(1, int(case.dry_run.plan["recompute_every"])))
        decides = "activations and kept block inputs at their peak"
        return Metric(
            100 * (1 - backward_share * kept / num_blocks), Evidence.ARITHMETIC, "%",
            remark=f"{kept} of {num_blocks} block inputs are kept",
            decider=Decider(planned.value, planned.evidence, stated_is, decides),
        )  # fmt: skip

    return metric


stored_activation_reduction = _activation_reduction(1.0, "counts kept block inputs only")
averaged_activation_reduction = _activation_reduction(
    _BACKWARD_SHARE, f"is an average over steps, {100 * _BACKWARD_SHARE:.0f} % with backward pass"
)


def int8_weight_reduction(case: Case) -> Metric | None:
    """Return the reduction of 16-bit weights by int8 codes and scales."""
    planned = weight_peak_reduction(case)
    if planned is None:
        return None
    value = 100 * (1 - _INT8_BYTES / _HALF_BYTES)
    scales = 4 / GROUP_SIZE * case.model.num_params / _MB
    decider = Decider(
        planned.value, planned.evidence, "counts stored codes only",
        "the largest sum of codes, blocks widened for their visit, embedding and head",
    )  # fmt: skip
    remark = f"a float32 scale per {GROUP_SIZE} weights, {scales:.0f} MB of scales"
    return Metric(value, Evidence.ARITHMETIC, "%", remark=remark, decider=decider)


def int8_state_reduction(case: Case) -> Metric | None:
    """Return the reduction of fp32 moments by 8-bit codes and scales; planned bytes decide."""
    planned = optimizer_reduction(case)
    if planned is None:
        return None
    before, after = (2 * size * case.model.num_params / GB for size in (4.0, _MOMENT_BYTES))
    decider = Decider(
        planned.value, planned.evidence, "counts codes and scales only",
        "the whole state, with small tensors that stay fp32 and the allocator's rounding",
    )  # fmt: skip
    remark = f"{before:.2f} to {after:.2f} GB"
    value = 100 * (1 - after / before)
    return Metric(value, Evidence.ARITHMETIC, "%", fits=planned.fits, remark=remark, decider=decider)


def phase_aware_weight_reduction(case: Case) -> Metric:
    """Return the reduction of 16-bit weights by int8 in most steps: on average, and in the deciding phase."""
    full, predict = (size * case.model.num_params / GB for size in (_HALF_BYTES, 1.0))
    average = _PREDICT_SHARE * predict + (1 - _PREDICT_SHARE) * full
    decider = Decider(
        100 * (1 - max(full, predict) / full), Evidence.ARITHMETIC,
        f"is an average over steps, {100 * _PREDICT_SHARE:.0f} % of them in Predict", "the phase that stores most",
    )  # fmt: skip
    scaled = 100 * _PREDICT_SHARE * (1 - _INT8_BYTES / _HALF_BYTES)
    remark = (
        f"{predict:.2f} GB of weights in Predict, {full:.2f} GB in Full; on average {scaled:.1f} % with a scale per "
        f"{GROUP_SIZE} weights"
    )
    return Metric(100 * (1 - average / full), Evidence.ARITHMETIC, "%", remark=remark, decider=decider)


def _parts(case: Case) -> StatedParts:
    assert case.target.parts is not None, f"target {case.target.id} states no parts"
    return case.target.parts


def _planned_parts(memory: MemoryFigures) -> str:
    kept = memory.by_class[TensorClass.BOUNDARY] + memory.by_class[TensorClass.ACTIVATION]
    state = memory.by_class[TensorClass.OPTIM_STATE] + memory.by_class[TensorClass.MASTER]
    return (
        f"planned: weights {memory.by_class[TensorClass.WEIGHT] / GB:.2f}, gradients "
        f"{memory.by_class[TensorClass.GRAD] / GB:.2f}, optimizer {state / GB:.2f}, activations {kept / GB:.2f}"
    )

"""The update of a flat slice of any storage: its float32 value is made, updated and stored, or never made at all.

Weights that are all there is of their value, with 8-bit moments, are updated and rounded in one op. P elements.
"""

from collections.abc import Sequence

from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_rounded_
from hybridtrain.engine.adamw import AdamWStep, update_slice
from hybridtrain.engine.slow_momentum import track
from hybridtrain.memory.master_codec import MasterCodec, StoredWeight, weight_part

_SLICE_ELEMENTS = 1 << 23
"""Elements that share a seed. Larger slices are cut: a weight draws the same numbers wherever its state lives."""


def update_stored(
    codec: MasterCodec,
    weight: StoredWeight,
    companion_P: Tensor | None,
    grad_P: Tensor,
    moments: Sequence[Tensor],
    history: Sequence[Tensor],
    step: AdamWStep,
) -> None:
    """Update a flat slice of a weight, with all that is kept beside it, in place; its first element begins a group."""
    if takes_rounded_update(codec, moments, step):
        update_rounded(weight, grad_P, moments, history, step)
        return
    value_P = codec.load(weight, companion_P)
    update_slice(value_P, grad_P, moments, history, step)
    codec.store(value_P, weight, companion_P)


def takes_rounded_update(codec: MasterCodec, moments: Sequence[Tensor], step: AdamWStep) -> bool:
    """Return whether a weight of this codec, with these moments, is updated and rounded in one op.

    A step that also moves along the slow average needs the exact value; one that only tracks it does not.
    """
    return codec.rounds_stochastically and len(moments) == 4 and not (step.slow and step.slow.predicted_steps)


def update_rounded(
    weight: StoredWeight, grad_P: Tensor, moments: Sequence[Tensor], history: Sequence[Tensor], step: AdamWStep
) -> None:
    """Update a flat slice and its history in place; its first element begins a group.

    Args:
        weight: bfloat16 (P,), or int8 codes (P,) and a float32 scale per group.
        grad_P: (P,) float32 or bfloat16.
        moments: m_codes, m_scale, v_codes, v_scale of whole groups.
        history: What remembers the slow average, where the step tracks one.
        step: Learning rate, decay, number.
    """
    config = step.config
    for start in range(0, grad_P.numel(), _SLICE_ELEMENTS):
        part = slice(start, min(start + _SLICE_ELEMENTS, grad_P.numel()))
        groups = slice(start // QUANT_GROUP_SIZE, -(-part.stop // QUANT_GROUP_SIZE))
        codes = slice(start, groups.stop * QUANT_GROUP_SIZE)
        m_codes, m_scale, v_codes, v_scale = moments
        adamw_int8_rounded_(
            weight_part(weight, part), grad_P[part],
            (m_codes[codes], m_scale[groups], v_codes[codes], v_scale[groups]), lr=step.lr,
            betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=step.weight_decay, step=step.number,
        )  # fmt: skip
    if step.slow is not None:
        track(history, grad_P, step.slow)

"""One AdamW update with 8-bit moments in plain torch: the definition, and the fallback without a compiler.

Also the rounding of an updated value onto a weight of fewer bits, given its random words.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import dequantize, quantize
from hybridkernels.int8_quantize.philox import uniform_of
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference


class Settings(TypedDict):
    """Settings of one update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    """Epsilon added to the root of the second moment."""
    weight_decay: float
    """Decoupled, multiplied by ``lr``."""
    step: int
    """Number of the step, from 1."""


def adamw_int8_reference(param_GS: Tensor, grad_GS: Tensor, moments: Sequence[Tensor], hyper: Tensor) -> None:
    """Update parameter and moments in place; arithmetic in fp32, decoupled weight decay (1711.05101).

    G groups of S = 256 elements.
    ``moments``: codes (G, S) and scales (G,) of the first and of the second.
    ``hyper``: (8,) float32: lr, beta1, beta2, eps, weight_decay, 1 - beta1^t, sqrt(1 - beta2^t), unused.
    """
    lr, beta1, beta2, eps, weight_decay, correction1, correction2, _ = hyper.unbind()
    grad_fp32, (m_codes_GS, m_scale_G, v_codes_GS, v_scale_G) = grad_GS.float(), moments
    m_GS = beta1 * dequantize(m_codes_GS, m_scale_G, signed=True) + (1 - beta1) * grad_fp32
    v_GS = beta2 * dequantize(v_codes_GS, v_scale_G, signed=False) + (1 - beta2) * grad_fp32 * grad_fp32
    update_GS = (m_GS / correction1) / (v_GS.sqrt() / correction2 + eps)
    param_GS.copy_(param_GS * (1 - lr * weight_decay) - lr * update_GS)
    rounded = (*quantize(m_GS, signed=True), *quantize(v_GS, signed=False))
    for stored, value in zip(moments, rounded, strict=True):
        stored.copy_(value)


def load_weight(weight: tuple[Tensor, ...]) -> Tensor:
    """Return the (P,) float32 values of bfloat16 values, or of int8 codes and their scales."""
    return weight[0].float() if len(weight) == 1 else int8_dequantize_reference(*weight)


def store_weight(value_P: Tensor, weight: tuple[Tensor, ...], words_P: Tensor) -> None:
    """Round (P,) float32 values onto a weight, up or down with probabilities that keep their mean.

    bfloat16: add the upper 16 bits of a random word below the kept bits, then cut; NaN stays NaN.
    int8: ``int8_quantize_reference`` with new scales and the words' upper 23 bits as uniforms.
    """
    if len(weight) == 2:
        rounded = int8_quantize_reference(value_P, uniform_P=uniform_of(words_P))
        for stored, value in zip(weight, rounded, strict=True):
            stored.copy_(value)
        return
    # In int64 no sum wraps: the sign is put back by the cut to 16 bits.
    bits_P = (value_P.view(torch.int32).long() + (words_P >> 16)) >> 16
    weight[0].copy_(bits_P.to(torch.int16).view(torch.bfloat16).masked_fill_(value_P.isnan(), torch.nan))

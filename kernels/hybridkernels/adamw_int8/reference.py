"""One AdamW update with 8-bit moments in plain torch: the definition, and what runs where there is no compiler."""

from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import dequantize, quantize


def adamw_int8_reference(
    param_GS: Tensor,
    grad_GS: Tensor,
    m_codes_GS: Tensor,
    m_scale_G: Tensor,
    v_codes_GS: Tensor,
    v_scale_G: Tensor,
    hyper: Tensor,
) -> None:
    """Update parameter and moments in place; arithmetic in fp32, decoupled weight decay (1711.05101).

    G groups of S = 256 elements.
    ``hyper``: (8,) float32: lr, beta1, beta2, eps, weight_decay, 1 - beta1^t, sqrt(1 - beta2^t), unused.
    """
    lr, beta1, beta2, eps, weight_decay, correction1, correction2, _ = hyper.unbind()
    grad_fp32 = grad_GS.float()
    m_GS = beta1 * dequantize(m_codes_GS, m_scale_G, signed=True) + (1 - beta1) * grad_fp32
    v_GS = beta2 * dequantize(v_codes_GS, v_scale_G, signed=False) + (1 - beta2) * grad_fp32 * grad_fp32
    update_GS = (m_GS / correction1) / (v_GS.sqrt() / correction2 + eps)
    param_GS.copy_(param_GS * (1 - lr * weight_decay) - lr * update_GS)
    m_codes, m_scale = quantize(m_GS, signed=True)
    v_codes, v_scale = quantize(v_GS, signed=False)
    m_codes_GS.copy_(m_codes)
    m_scale_G.copy_(m_scale)
    v_codes_GS.copy_(v_codes)
    v_scale_G.copy_(v_scale)

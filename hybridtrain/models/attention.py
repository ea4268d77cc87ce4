"""Which function computes attention, by the plan's name for it."""

from collections.abc import Callable

from torch import Tensor

from hybridkernels.flash_attention.op import causal_attention
from hybridkernels.flash_attention.unfused import unfused_attention
from hybridtrain.plan.memory_plan import Attention

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of q_BTNH, k_BTKH and v_BTKH: out_BTNH."""

ATTENTION: dict[Attention, AttentionFunction] = {
    Attention.FLASH: causal_attention,
    Attention.UNFUSED: unfused_attention,
}

"""Causal attention that never materialises the T x T matrix, and one that does, to compare with."""

from hybridkernels.flash_attention.op import (
    KeptAttention,
    causal_attention,
    masked_backward_workspace_bytes,
    masked_workspace_bytes,
)
from hybridkernels.flash_attention.sdpa import backward_workspace_bytes
from hybridkernels.flash_attention.tiled import tiled_workspace_bytes
from hybridkernels.flash_attention.unfused import unfused_attention

__all__ = [
    "KeptAttention",
    "backward_workspace_bytes",
    "causal_attention",
    "masked_backward_workspace_bytes",
    "masked_workspace_bytes",
    "tiled_workspace_bytes",
    "unfused_attention",
]

"""Causal attention that never materialises the T x T matrix."""

from hybridkernels.flash_attention.op import backward_workspace_bytes, causal_attention

__all__ = ["backward_workspace_bytes", "causal_attention"]

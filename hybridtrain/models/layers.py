"""What both families are built of: layers, attention by the plan's name for it, the output head, initial values.

B batch, T sequence, D width, V vocabulary, N heads, K key heads, H head dim, R half a head dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hybridtrain.kernel_rules  # noqa: F401  tells the ledger of the kernels' scratch
from hybridkernels.flash_attention.op import causal_attention
from hybridkernels.flash_attention.unfused import unfused_attention
from hybridkernels.layer_norm import layer_norm
from hybridkernels.linear_cross_entropy import linear_cross_entropy
from hybridkernels.rms_norm import rms_norm
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.plan.memory_plan import Attention


class Linear(nn.Module):
    """``x @ weight^T + bias`` with uninitialised parameters; torch's own layer initialises, minutes at 7B."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, *, computes_output: bool = True) -> Tensor:
        """Return (..., out_features); without ``computes_output`` undefined values, but the right gradients."""
        if computes_output:
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = _OutputlessLinear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def add_linear(residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
    """Return ``residual + linear(x)`` in one call: the sum is the matmul's own, nothing passes memory twice."""
    assert linear.bias is None, "the matmul adds one term only"
    flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), linear.weight.t())
    return flat.view(residual.shape)


class _OutputlessLinear(torch.autograd.Function):
    """A linear layer that is recomputed for its gradients alone: they need its input, never its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_2d = grad.reshape(-1, weight.shape[0])
        grad_bias = grad_2d.sum(0) if ctx.has_bias else None
        return grad_2d.mm(weight).view(x.shape), grad_2d.t().mm(x.reshape(-1, weight.shape[1])), grad_bias


class LayerNorm(nn.Module):
    """Layer normalisation with fp32 statistics."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """Root-mean-square normalisation with fp32 statistics."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension."""
        return rms_norm(x, self.weight, self.eps)


class RotaryTable(nn.Module):
    """Cosine and sine of every position's angles, (max_seq_len, R) float32, shared by all blocks."""

    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(self, max_seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies_R = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles_TR = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies_R)
        self.register_buffer("cos_TR", angles_TR.cos(), persistent=False)
        self.register_buffer("sin_TR", angles_TR.sin(), persistent=False)


def dropout(x: Tensor, probability: float, *, training: bool) -> Tensor:
    """Return x with elements dropped; one byte of mask per element on every device, nothing at probability 0."""
    if not training or probability == 0:
        return x
    dropped, _mask = torch.native_dropout(x, probability, train=True)
    return dropped


AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of q_BTNH, k_BTKH and v_BTKH: out_BTNH."""

ATTENTION: dict[Attention, AttentionFunction] = {
    Attention.FLASH: causal_attention,
    Attention.UNFUSED: unfused_attention,
}


class Head(nn.Module):
    """Final norm and output projection; ``weight`` may be the token embedding's."""

    def __init__(self, norm: nn.Module, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.norm = norm
        self.weight = weight_VD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits_BTV in the dtype of the weights."""
        return functional.linear(self.norm(hidden_BTD), self.weight)

    def forward(
        self,
        hidden_BTD: Tensor,
        target_ids_BT: Tensor,
        *,
        chunk_tokens: int = 0,
        weight_VD: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross entropy in nats per token, a scalar float32.

        Args:
            hidden_BTD: Output of the last block.
            target_ids_BT: int64.
            chunk_tokens: Tokens per slice of the logits; 0 computes them in one piece.
            weight_VD: Stands in for ``self.weight``, detached when its gradient is not wanted here.
        """
        weight_VD = self.weight if weight_VD is None else weight_VD
        return self.projection_loss(
            self.norm(hidden_BTD), target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=weight_VD
        )

    def projection_loss(
        self, normed_BTD: Tensor, target_ids_BT: Tensor, *, chunk_tokens: int, weight_VD: Tensor
    ) -> Tensor:
        """Return the mean cross entropy of already normalised hidden states."""
        targets = target_ids_BT.reshape(-1)
        if chunk_tokens:
            return linear_cross_entropy(normed_BTD.flatten(0, 1), weight_VD, targets, chunk_tokens=chunk_tokens)
        logits_BTV = functional.linear(normed_BTD, weight_VD)
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets)


_STD = 0.02
"""Standard deviation of GPT-2's and LLaMA's initial weights."""


def fill_initial(name: str, values: Tensor, config: ModelConfig, generator: torch.Generator | None) -> None:
    """Fill ``values`` in place by the rule for the parameter's qualified name.

    Norm weights are 1, biases 0, everything else normal; projections onto the residual stream are scaled by
    1/sqrt(2 * num_blocks) (GPT-2's rule). ``generator`` is None on meta tensors, where nothing is drawn.
    """
    if name.endswith("bias"):
        values.zero_()
    elif "norm" in name:
        values.fill_(1.0)
    else:
        onto_residual = name.endswith(("attention_out.weight", "ffn_out.weight"))
        std = _STD / math.sqrt(2 * config.num_blocks) if onto_residual else _STD
        values.normal_(0.0, std, generator=generator)

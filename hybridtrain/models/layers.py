"""Parts of decoders: layers, attention by its name in the plan, the output head, initial values.

B batch, T sequence, D width, V vocabulary, N heads, K key heads, H head dim, R half a head dim.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

import hybridtrain.kernel_rules  # noqa: F401  registers the kernels' scratch with the ledger
from hybridkernels.flash_attention.op import KeptAttention, causal_attention
from hybridkernels.flash_attention.unfused import unfused_attention
from hybridkernels.layer_norm import layer_norm
from hybridkernels.linear_cross_entropy import linear_cross_entropy
from hybridkernels.rms_norm import rms_norm
from hybridtrain.models.model_config import ModelConfig, RopeScaling
from hybridtrain.plan.memory_plan import Attention


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
    """Root-mean-square normalisation with fp32 statistics.

    ``plus_one``: the stored weight is the weight minus 1, as in Gemma; they are added in fp32.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype, *, plus_one: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dimension."""
        return rms_norm(x, self.weight.float() + 1 if self.plus_one else self.weight, self.eps)


class RotaryTable(nn.Module):
    """Cosine and sine of every position's angles, (max_seq_len, R) float32, shared by all blocks.

    ``rotary_dim`` is 2 R, ``theta`` the base of the angles, ``scaling`` extends them to longer contexts.
    """

    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(self, max_seq_len: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        frequencies_R = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        if scaling is not None:
            frequencies_R = _STRETCHED[scaling.method](frequencies_R, theta, scaling)
        angles_TR = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies_R)
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if scaling is not None and scaling.method == "yarn":
            factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
            cos_TR, sin_TR = cos_TR * factor, sin_TR * factor
        self.register_buffer("cos_TR", cos_TR, persistent=False)
        self.register_buffer("sin_TR", sin_TR, persistent=False)


def _linear(frequencies_R: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Positions divided by the factor (2306.15595)."""
    return frequencies_R / scaling.factor


def _llama3(frequencies_R: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Low frequencies only, with a linear passage between two wavelengths (Meta's llama-models, ``apply_scaling``)."""
    rotations_R = scaling.original_max_seq_len * frequencies_R / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_R = ((rotations_R - low) / (high - low)).clamp(0, 1)
    return frequencies_R * (kept_R + (1 - kept_R) / scaling.factor)


def _yarn(frequencies_R: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """By the rotations that a frequency makes over the original length (2309.00071, section 3.2)."""
    num = len(frequencies_R)

    def index(rotations: float) -> float:
        """Index of the frequency with that many rotations."""
        return num * math.log(scaling.original_max_seq_len / (rotations * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), 2 * num - 1)
    places_R = torch.arange(num, dtype=torch.float32)
    kept_R = 1 - ((places_R - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies_R * (kept_R + (1 - kept_R) / scaling.factor)


_STRETCHED: dict[str, Callable[[Tensor, float, RopeScaling], Tensor]] = {
    "linear": _linear, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip


class AttentionFunction(Protocol):
    """An attention function with the signature of ``hybridkernels.flash_attention.causal_attention``."""

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = 0,
        document_ids_BT: Tensor | None = None,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        """Return out_BTNH."""


ATTENTION: dict[Attention, AttentionFunction] = {
    Attention.FLASH: causal_attention,
    Attention.UNFUSED: unfused_attention,
}


class Head(nn.Module):
    """Final norm and output projection, whose weight may be the token embedding's.

    ``softcap``: c in c * tanh(logit / c); 0: none.
    """

    def __init__(self, norm: nn.Module, weight_VD: nn.Parameter, softcap: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.weight = weight_VD
        self.softcap = softcap

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits_BTV in the dtype of the weights."""
        return self._capped(functional.linear(self.norm(hidden_BTD), self.weight))

    def forward(
        self,
        hidden_BTD: Tensor,
        target_ids_BT: Tensor,
        *,
        chunk_tokens: int = 0,
        weight_VD: Tensor | None = None,
        num_targets: int | None = None,
    ) -> Tensor:
        """Return the mean cross entropy in nats per token, a scalar float32.

        ``chunk_tokens``: tokens per slice of the logits, 0: one piece. ``weight_VD`` replaces ``self.weight``, detached
        if its gradient is not needed. ``num_targets``: targets that count; None: count them.
        """
        weight_VD = self.weight if weight_VD is None else weight_VD
        return self.projection_loss(
            self.norm(hidden_BTD), target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=weight_VD,
            num_targets=num_targets,
        )  # fmt: skip

    def projection_loss(
        self, normed_BTD: Tensor, target_ids_BT: Tensor, *, chunk_tokens: int, weight_VD: Tensor,
        num_targets: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mean cross entropy of normalised hidden states."""
        targets = target_ids_BT.reshape(-1)
        if chunk_tokens:
            return linear_cross_entropy(
                normed_BTD.flatten(0, 1), weight_VD, targets, chunk_tokens=chunk_tokens, softcap=self.softcap,
                num_targets=num_targets,
            )  # fmt: skip
        logits_BTV = functional.linear(normed_BTD, weight_VD)
        return functional.cross_entropy(self._capped(logits_BTV.flatten(0, 1).float()), targets)

    def _capped(self, logits: Tensor) -> Tensor:
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


_STD = 0.02
"""Standard deviation of GPT-2's and LLaMA's initial weights."""


def fill_initial(name: str, values: Tensor, config: ModelConfig, generator: torch.Generator | None) -> None:
    """Fill ``values`` in place by the rule for the parameter's qualified name.

    Norms are 1 (Gemma's stored weights 0), biases 0, all else normal; projections onto
    the residual stream are scaled by 1/sqrt(2 * num_blocks) (GPT-2's rule). ``generator`` is None for meta tensors,
    which have no values.
    """
    if name.endswith("bias"):
        values.zero_()
    elif "norm" in name:
        values.fill_(0.0 if config.architecture.norm == "rms_plus_one" else 1.0)
    else:
        onto_residual = name.endswith(("attention_out.weight", "ffn_out.weight", "experts_out"))
        std = _STD / math.sqrt(2 * config.num_blocks) if onto_residual else _STD
        values.normal_(0.0, std, generator=generator)

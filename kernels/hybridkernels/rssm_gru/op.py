"""Rollout of a recurrent state-space model, several ticks as one op without gradients.

Legend: reference.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, describe, empty_like, triton_or_fallback
from hybridkernels.rssm_gru.reference import RssmRollout, rssm_rollout_reference

LAYERS = ("mix", "action", "seen", "gru_input", "gru_hidden", "prior", "head_hidden", "head")
WEIGHTS = tuple(f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias"))
"""Names of the weights, in the order in which the op takes them."""
_SCHEMA = (
    "(Tensor[] weights, Tensor hidden_EBH, Tensor classes_EBK, Tensor actions_SEBA, Tensor uniforms_SEBK, "
    "Tensor? features_EBF) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _in_torch(weights: Sequence[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(rssm_rollout_reference(dict(zip(WEIGHTS, weights, strict=True)), *inputs))


def _on_cpu(weights: Sequence[Tensor], hidden: Tensor, classes: Tensor, *others: Any) -> tuple[Tensor, ...]:
    num_classes = weights[0].shape[1] // classes.shape[2]
    lowest, highest = (int(end) for end in classes.aminmax()) if classes.numel() else (0, 0)
    if lowest < 0 or highest >= num_classes:
        raise ValueError(f"rssm_rollout: classes go from {lowest} to {highest}; allowed is 0 to {num_classes - 1}")
    return _in_torch(weights, hidden, classes, *others)


def _fake(weights: Sequence[Tensor], hidden: Tensor, classes: Tensor, actions: Tensor, *_: Any) -> tuple[Tensor, ...]:
    logits = hidden.new_empty(*hidden.shape[:2], weights[0].shape[1])
    means, log_variances = (hidden.new_empty(actions.shape[:3]) for _ in range(2))
    return means, log_variances, *empty_like(hidden, classes), logits


def _takes_triton(weights: Sequence[Tensor], hidden_EBH: Tensor, classes_EBK: Tensor, *_: Any) -> bool:
    """Return whether sizes and dtype are those of the kernel: powers of two, whole categoricals in a block."""
    num_categoricals, size, num_widths = classes_EBK.shape[2], weights[0].shape[1], weights[0].shape[2]
    sizes = (hidden_EBH.shape[2], num_categoricals, size // num_categoricals, num_widths)
    return hidden_EBH.dtype is torch.float32 and all(size >= 16 and size & (size - 1) == 0 for size in sizes)


_cuda = triton_or_fallback(_in_torch, "rssm_gru.rssm_rollout_triton", fits=_takes_triton)
_rssm_rollout = define_op("rssm_rollout", _on_cpu, cuda=_cuda, fake=_fake, schema=_SCHEMA)


def rssm_rollout(
    weights: Mapping[str, Tensor],
    hidden_EBH: Tensor,
    classes_EBK: Tensor,
    actions_SEBA: Tensor,
    uniforms_SEBK: Tensor,
    features_EBF: Tensor | None = None,
) -> RssmRollout:
    """Follow the prior for S ticks; the formula is in reference.py. No gradients flow through it.

    Args:
        weights: By name ``<layer>.weight``, (E, inputs, outputs), and ``<layer>.bias``, (E, 1, outputs): ``mix``
            (Z, D), ``action`` (A, D), ``seen`` (F, D), ``gru_input`` (D, 3 H), ``gru_hidden`` (H, 3 H), ``prior``
            (H, Z), ``head_hidden`` (H + Z, D) and ``head`` (D, 2); others are ignored. float32 or float64.
        hidden_EBH: Before the first tick; dtype and device of the weights, as everything but the classes.
        classes_EBK: Sample before the first tick, one class of each categorical, int64 in [0, Z / K). A class outside
            of it is refused on the CPU and means the nearest one on CUDA, where looking would make the host wait.
        actions_SEBA: Of each tick; any strides, so that one action may be expanded to all rows. At least one tick.
        uniforms_SEBK: Numbers in [0, 1) that draw the classes of each tick.
        features_EBF: What is seen in the first tick; None: nothing.

    Returns:
        Means and log-variances (S, E, B); hidden state (E, B, H), classes (E, B, K) and prior logits (E, B, Z) of the
        last tick. With Triton all products are exact fp32, no TF32: a draw differs from torch's only where the number
        falls within rounding of a border.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or there is no tick.
    """
    missing = [name for name in WEIGHTS if name not in weights]
    if missing:
        raise ValueError(f"rssm_rollout: weights lack {missing}; needed are {list(WEIGHTS)}")
    inputs = (hidden_EBH, classes_EBK, actions_SEBA, uniforms_SEBK, features_EBF)
    _require_shapes(weights, *inputs)
    with torch.no_grad():
        return RssmRollout(*_rssm_rollout([weights[name] for name in WEIGHTS], *inputs))


def _require_shapes(
    weights: Mapping[str, Tensor], hidden: Tensor, classes: Tensor, actions: Tensor, uniforms: Tensor,
    features: Tensor | None,
) -> None:  # fmt: skip
    """Raise ``ValueError`` unless shapes, dtypes and devices agree."""
    mix, seen = weights["mix.weight"], weights["seen.weight"]
    if [tensor.dim() for tensor in (hidden, classes, actions, mix, seen)] != [3, 3, 4, 3, 3]:
        raise ValueError(
            f"rssm_rollout: hidden {tuple(hidden.shape)}, classes {tuple(classes.shape)}, actions "
            f"{tuple(actions.shape)}, mix.weight {tuple(mix.shape)} and seen.weight {tuple(seen.shape)} must be "
            "(E, B, H), (E, B, K), (S, E, B, A), (E, Z, D) and (E, F, D); add dimensions of size 1"
        )
    (E, B, H), K, (S, _, _, A), (Z, D), F = (
        hidden.shape, classes.shape[2], actions.shape, mix.shape[1:], seen.shape[1],
    )  # fmt: skip
    inputs_outputs = {
        "mix": (Z, D), "action": (A, D), "seen": (F, D), "gru_input": (D, 3 * H), "gru_hidden": (H, 3 * H),
        "prior": (H, Z), "head_hidden": (H + Z, D), "head": (D, 2),
    }  # fmt: skip
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        f"{name}.weight": (weights[f"{name}.weight"], (E, *pair)) for name, pair in inputs_outputs.items()
    }
    wanted |= {f"{name}.bias": (weights[f"{name}.bias"], (E, 1, pair[1])) for name, pair in inputs_outputs.items()}
    wanted |= {"actions": (actions, (S, E, B, A)), "uniforms": (uniforms, (S, E, B, K))}
    wanted |= {} if features is None else {"features": (features, (E, B, F))}
    for name, (tensor, shape) in wanted.items():
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, hidden.dtype, hidden.device):
            raise ValueError(
                f"rssm_rollout: {name} is {describe(tensor)}; with hidden {tuple(hidden.shape)} and mix.weight "
                f"{tuple(mix.shape)} it must be {hidden.dtype} {shape} on {hidden.device}"
            )
    if (tuple(classes.shape), classes.dtype, classes.device) != ((E, B, K), torch.int64, hidden.device):
        raise ValueError(
            f"rssm_rollout: classes are {describe(classes)}; they must be torch.int64 {(E, B, K)} on {hidden.device}: "
            "the class of each categorical, not one-hot"
        )
    if not S or not K or Z % K or hidden.dtype not in {torch.float32, torch.float64}:
        raise ValueError(
            f"rssm_rollout: {S} ticks, {K} categoricals of {Z} classes together, {hidden.dtype}; there must be a tick, "
            "as many classes in each categorical, and float32 or float64"
        )

"""Several ticks of a recurrent state-space model's imagined path as one op, without gradients.

Legend: reference.py.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridkernels.provider import chosen_provider
from hybridkernels.rssm_gru.reference import RssmRollout, rssm_rollout_reference
from hybridkernels.triton_launch import cuda_backend

LAYERS = ("mix", "action", "seen", "gru_input", "gru_hidden", "prior", "head_hidden", "head")
WEIGHTS = tuple(f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias"))
"""Names of the weights, in the order in which the op takes them."""

_Rollout = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("hybridkernels::rssm_rollout", mutates_args=(), device_types="cpu")
def _rssm_rollout(
    weights: Sequence[Tensor],
    hidden_EBH: Tensor,
    classes_EBK: Tensor,
    actions_SEBA: Tensor,
    uniforms_SEBK: Tensor,
    features_EBF: Tensor | None,
) -> _Rollout:
    _require_classes(classes_EBK, weights[0].shape[1] // classes_EBK.shape[2])
    return _in_torch(weights, hidden_EBH, classes_EBK, actions_SEBA, uniforms_SEBK, features_EBF)


@_rssm_rollout.register_kernel("cuda")
def _rssm_rollout_cuda(
    weights: Sequence[Tensor],
    hidden_EBH: Tensor,
    classes_EBK: Tensor,
    actions_SEBA: Tensor,
    uniforms_SEBK: Tensor,
    features_EBF: Tensor | None,
) -> _Rollout:
    available = ["torch"]
    if cuda_backend() == "triton" and _takes_triton(weights, hidden_EBH, classes_EBK):
        available.insert(0, "triton")
    inputs = (hidden_EBH, classes_EBK, actions_SEBA, uniforms_SEBK, features_EBF)
    if chosen_provider("rssm_rollout", available, hidden_EBH.device) == "torch":
        return _in_torch(weights, *inputs)
    from hybridkernels.rssm_gru.triton_kernel import rssm_rollout_triton  # noqa: PLC0415  Triton is optional

    return rssm_rollout_triton(weights, *inputs)


@_rssm_rollout.register_fake
def _rssm_rollout_fake(
    weights: Sequence[Tensor],
    hidden_EBH: Tensor,
    classes_EBK: Tensor,
    actions_SEBA: Tensor,
    uniforms_SEBK: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    features_EBF: Tensor | None,  # noqa: ARG001
) -> _Rollout:
    per_tick = actions_SEBA.shape[:3]
    logits = hidden_EBH.new_empty(*hidden_EBH.shape[:2], weights[0].shape[1])
    hidden, classes = hidden_EBH.new_empty(hidden_EBH.shape), classes_EBK.new_empty(classes_EBK.shape)
    return hidden_EBH.new_empty(per_tick), hidden_EBH.new_empty(per_tick), hidden, classes, logits


def _in_torch(
    weights: Sequence[Tensor], hidden: Tensor, classes: Tensor, actions: Tensor, uniforms: Tensor,
    features: Tensor | None,
) -> _Rollout:  # fmt: skip
    named = dict(zip(WEIGHTS, weights, strict=True))
    found = rssm_rollout_reference(named, hidden, classes, actions, uniforms, features)
    return found.means_SEB, found.log_variances_SEB, found.hidden_EBH, found.classes_EBK, found.logits_EBZ


def _takes_triton(weights: Sequence[Tensor], hidden_EBH: Tensor, classes_EBK: Tensor) -> bool:
    """Return whether sizes and dtype are those of the kernel: powers of two, whole categoricals in a block."""
    num_categoricals, size, num_widths = classes_EBK.shape[2], weights[0].shape[1], weights[0].shape[2]
    sizes = (hidden_EBH.shape[2], num_categoricals, size // num_categoricals, num_widths)
    return hidden_EBH.dtype is torch.float32 and all(_is_block(size) for size in sizes)


def _is_block(size: int) -> bool:
    return size >= 16 and size & (size - 1) == 0


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
            (H, Z), ``head_hidden`` (H + Z, D) and ``head`` (D, 2); others are not looked at. float32 or float64.
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
    ordered = [weights[name] for name in WEIGHTS]
    _require_shapes(weights, hidden_EBH, classes_EBK, actions_SEBA, uniforms_SEBK, features_EBF)
    with torch.no_grad():
        found = _rssm_rollout(ordered, hidden_EBH, classes_EBK, actions_SEBA, uniforms_SEBK, features_EBF)
    return RssmRollout(*found)


def _require_shapes(
    weights: Mapping[str, Tensor], hidden: Tensor, classes: Tensor, actions: Tensor, uniforms: Tensor,
    features: Tensor | None,
) -> None:  # fmt: skip
    """Refuse what does not fit together."""
    mix, seen = weights["mix.weight"], weights["seen.weight"]
    if [tensor.dim() for tensor in (hidden, classes, actions, mix, seen)] != [3, 3, 4, 3, 3]:
        raise ValueError(
            f"rssm_rollout: hidden {tuple(hidden.shape)}, classes {tuple(classes.shape)}, actions "
            f"{tuple(actions.shape)}, mix.weight {tuple(mix.shape)} and seen.weight {tuple(seen.shape)} must be "
            "(E, B, H), (E, B, K), (S, E, B, A), (E, Z, D) and (E, F, D); add dimensions of size 1"
        )
    (num_members, num_rows, H), K, (S, _, _, A) = hidden.shape, classes.shape[2], actions.shape
    (Z, D), F = mix.shape[1:], seen.shape[1]
    inputs_outputs = {
        "mix": (Z, D), "action": (A, D), "seen": (F, D), "gru_input": (D, 3 * H), "gru_hidden": (H, 3 * H),
        "prior": (H, Z), "head_hidden": (H + Z, D), "head": (D, 2),
    }  # fmt: skip
    rows = (num_members, num_rows)
    wanted: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (num_members, *pair) for name, pair in inputs_outputs.items()
    }
    wanted |= {f"{name}.bias": (num_members, 1, pair[1]) for name, pair in inputs_outputs.items()}
    wanted |= {"actions": (S, *rows, A), "uniforms": (S, *rows, K), "features": (*rows, F), "classes": (*rows, K)}
    given = {name: weights[name] for name in WEIGHTS} | {"actions": actions, "uniforms": uniforms}
    given |= {} if features is None else {"features": features}
    for name, tensor in given.items():
        expected = (wanted[name], hidden.dtype, hidden.device)
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != expected:
            raise ValueError(
                f"rssm_rollout: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; with hidden "
                f"{tuple(hidden.shape)} and mix.weight {tuple(mix.shape)} it must be {expected[1]} "
                f"{expected[0]} on {expected[2]}"
            )
    if (tuple(classes.shape), classes.dtype, classes.device) != (wanted["classes"], torch.int64, hidden.device):
        raise ValueError(
            f"rssm_rollout: classes are {classes.dtype} {tuple(classes.shape)} on {classes.device}; they must be "
            f"torch.int64 {wanted['classes']} on {hidden.device}: the class of each categorical, not one-hot"
        )
    if not S or not K or Z % K or hidden.dtype not in {torch.float32, torch.float64}:
        raise ValueError(
            f"rssm_rollout: {S} ticks, {K} categoricals of {Z} classes together, {hidden.dtype}; there must be a tick, "
            "as many classes in each categorical, and float32 or float64"
        )


def _require_classes(classes: Tensor, num_classes: int) -> None:
    if not classes.numel():
        return
    lowest, highest = (int(end) for end in classes.aminmax())
    if lowest < 0 or highest >= num_classes:
        raise ValueError(f"rssm_rollout: classes go from {lowest} to {highest}; allowed is 0 to {num_classes - 1}")

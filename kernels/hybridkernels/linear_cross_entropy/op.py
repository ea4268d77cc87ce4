"""Cross entropy that turns logits into their own gradient, as an op: a Triton kernel on CUDA, torch's ops elsewhere.

C tokens, V vocabulary.
"""

import torch
from torch import Tensor

from hybridkernels.linear_cross_entropy.plain import cross_entropy_grad_plain
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import cuda_backend

_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@torch.library.custom_op("hybridkernels::cross_entropy_grad_", mutates_args=("logits",), device_types="cpu")
def _cross_entropy_grad(
    logits: Tensor, targets: Tensor, scale: float, softcap: float = 0.0, ignores: bool = False
) -> Tensor:
    return cross_entropy_grad_plain(logits, targets, scale, softcap, ignores=ignores)


@_cross_entropy_grad.register_kernel("cuda")
def _cross_entropy_grad_cuda(
    logits: Tensor, targets: Tensor, scale: float, softcap: float = 0.0, ignores: bool = False
) -> Tensor:
    takes_triton = logits.dtype in _KERNEL_DTYPES and cuda_backend() == "triton"
    available = ["triton", "torch"] if takes_triton else ["torch"]
    if chosen_provider("linear_cross_entropy", available, logits.device) == "torch":
        return cross_entropy_grad_plain(logits, targets, scale, softcap, ignores=ignores)
    from hybridkernels.linear_cross_entropy.triton_kernel import cross_entropy_grad_triton  # noqa: PLC0415  optional

    return cross_entropy_grad_triton(logits, targets, scale, softcap, ignores=ignores)


@_cross_entropy_grad.register_fake
def _cross_entropy_grad_fake(
    logits: Tensor,
    targets: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    scale: float,  # noqa: ARG001
    softcap: float = 0.0,  # noqa: ARG001
    ignores: bool = False,  # noqa: ARG001
) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


def cross_entropy_grad_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, *, softcap: float = 0.0, ignores: bool = False
) -> Tensor:
    """Return the cross entropy of each token and overwrite the logits with the gradient of ``scale`` times its sum.

    Args:
        logits_CV: (C, V), float32, bfloat16, float16 or float64, rows dense; overwritten with
            ``scale * (softmax(logits) - onehot(target))``. Rows that start at multiples of 16 elements are read faster.
        targets_C: (C,) int64, each in [0, V); other values are undefined behaviour on CUDA and an error on the CPU.
        scale: Of the gradient, as 1 / tokens for that of a mean. The losses are not scaled.
        softcap: c, where the loss is of c * tanh(logits / c) and the gradient that of ``logits``; 0: none.
        ignores: A target may be -100 too: its token has loss 0 and gradient 0.

    Returns:
        losses_C: (C,) float32 (float64 for float64 logits), nats.

    Raises:
        ValueError: a shape, dtype or stride is another than these.

    Memory: none besides the losses; on the CPU and without Triton float32 scratch of some rows, unseen by the ledger.
    """
    fits = (
        logits_CV.ndim == 2 and logits_CV.is_floating_point() and targets_C.dtype == torch.int64
        and targets_C.shape == logits_CV.shape[:1] and logits_CV.shape[1] > 0
        and (logits_CV.numel() == 0 or logits_CV.stride(1) == 1)
    )  # fmt: skip
    if not fits:
        raise ValueError(
            f"cross_entropy_grad_: logits are {logits_CV.dtype} {tuple(logits_CV.shape)} with strides "
            f"{logits_CV.stride()}, targets {targets_C.dtype} {tuple(targets_C.shape)}; allowed: floating point (C, V) "
            "with dense rows and int64 (C,); flatten or convert first"
        )
    losses_C: Tensor = _cross_entropy_grad(logits_CV, targets_C, scale, softcap, ignores)
    return losses_C

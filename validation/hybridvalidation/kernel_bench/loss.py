"""Cases of the output projection with its cross entropy. M tokens, D width, V vocabulary.

Ours and Liger's make the gradients in the forward pass, so the backward pass alone is no case; ``forward`` is an
evaluation, without gradients.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.linear_cross_entropy import linear_cross_entropy
from hybridvalidation.kernel_bench.case import (
    Inputs,
    KernelCase,
    Maker,
    Mode,
    ModelBatch,
    Provider,
    liger,
    liger_provider,
    model_batches,
    own_providers,
    trained,
    widened,
)

OP = "linear_cross_entropy"
_DTYPE = torch.bfloat16
_CHUNK_TOKENS = 1024
"""As the stack ``tight`` has it."""


def loss_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of the output projection with its loss."""
    for workload in model_batches(device, quick=quick or device.type != "cuda"):  # seconds a call on a processor
        for mode in (Mode.BOTH, Mode.FORWARD):
            if mode in modes:
                yield _case(workload, mode, device)


def _case(workload: ModelBatch, mode: Mode, device: torch.device) -> KernelCase:
    config, num_tokens = workload.config, workload.num_tokens
    weight, hidden = config.vocab_size * config.width, num_tokens * config.width
    product = 2 * num_tokens * config.vocab_size * config.width
    trains = mode is Mode.BOTH
    # hidden, weight and targets in; the gradients of hidden and weight out
    num_bytes = _DTYPE.itemsize * (weight + hidden) * (2 if trains else 1) + 8 * num_tokens

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, _DTYPE)
        hidden_MD = maker.normal(num_tokens, config.width, grad=trains)
        weight_VD = maker.normal(config.vocab_size, config.width, scale=config.width**-0.5, grad=trains)
        return Inputs((hidden_MD, weight_VD, maker.integers(num_tokens, below=config.vocab_size)))

    wide = torch.float64 if device.type == "cpu" else torch.float32
    return KernelCase(
        op=OP, key=OP, shape=workload.name, dtype="bfloat16", mode=mode, num_bytes=num_bytes,
        flops=product * (3 if trains else 1), uses_tensor_cores=True, make_inputs=make_inputs,
        exact=widened(trained(_plain, mode), wide), same_dtype=trained(_sliced, mode),
        providers=(
            *own_providers(OP, "linear_cross_entropy", trained(_ours, mode), device),
            Provider(name="eager", setup=trained(_plain, mode)),
            liger_provider(_liger, mode, device),
        ),
    )  # fmt: skip


def _ours(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    return linear_cross_entropy(hidden_MD, weight_VD, targets_M, chunk_tokens=_CHUNK_TOKENS)


def _plain(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    logits_MV = functional.linear(hidden_MD, weight_VD)
    return functional.cross_entropy(logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), targets_M)


def _sliced(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """Return the plain loss slice by slice: the weight's gradient is rounded once a slice, as ours and Liger's is."""
    loss = hidden_MD.new_zeros((), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
    slices = (torch.split(tensor, _CHUNK_TOKENS) for tensor in (hidden_MD, targets_M))
    for hidden_CD, targets_C in zip(*slices, strict=True):
        loss = loss + _plain(hidden_CD, weight_VD, targets_C) * (len(targets_C) / len(targets_M))
    return loss


def _liger(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    return liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", hidden_MD, weight_VD, targets_M)

"""Cases of 8-bit storage: values to codes and back, and AdamW whose moments are codes.

P values, G = ceil(P / 256) groups. The ops work in place: a provider gets its own copy of what it overwrites.
"""

from collections.abc import Callable, Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_, adamw_int8_rounded_
from hybridkernels.adamw_int8.reference import adamw_int8_reference
from hybridkernels.int8_quantize import int8_dequantize, int8_quantize, num_groups
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from hybridtrain.models.model_config import block_params
from hybridvalidation.kernel_bench.case import (
    Inputs,
    KernelCase,
    Maker,
    Mode,
    ModelBatch,
    Provider,
    Run,
    Tensors,
    forced,
    model_batches,
    needs_package,
    own_providers,
)

_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_CHECKED_STEPS = 3
"""The first step does not read what the 8-bit moments hold."""
_SLICE_GROUPS = 2**16
"""That the reference takes at a time: it makes a dozen float32 tensors of them."""


def int8_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of the four ops; they have a forward pass only, all modes but ``backward`` mean it."""
    if not {Mode.FORWARD, Mode.BOTH} & set(modes):
        return
    for workload in model_batches(device, quick=quick):
        if device.type == "cuda" and workload.model == "gpt2-small":
            continue  # its blocks are too small to say more than the others
        yield _adamw_case(workload, device)
        yield _rounded_case(workload, device)
        yield _quantize_case(workload, device)
        yield _dequantize_case(workload, device)


def _shape(workload: ModelBatch, device: torch.device) -> tuple[str, int]:
    """Return name and count of the parameters of a block; of a matrix of it where there is no card."""
    if device.type == "cuda":
        return f"{workload.model} block", block_params(workload.config)
    return f"{workload.model} width x width", workload.config.width**2


def _quantize_case(workload: ModelBatch, device: torch.device) -> KernelCase:
    shape, numel = _shape(workload, device)

    def setup(inputs: Inputs) -> Run:
        (values_P,) = inputs.args
        codes_P = torch.empty(numel, dtype=torch.int8, device=values_P.device)
        scales_G = torch.empty(num_groups(numel), device=values_P.device)

        def run() -> Tensors:
            int8_quantize(values_P, codes_P, scales_G, stochastic=False)
            return codes_P, scales_G

        return run

    def reference(inputs: Inputs) -> Run:
        return lambda: int8_quantize_reference(inputs.args[0])

    return KernelCase(
        op="int8_quantize", key="int8_quantize", shape=shape, dtype="bfloat16", mode=Mode.FORWARD,
        num_bytes=3 * numel + 4 * num_groups(numel), flops=5 * numel,
        make_inputs=lambda where: Inputs((Maker(where, torch.bfloat16).normal(numel, grad=False),)),
        exact=reference, same_dtype=reference,  # every step is correctly rounded: the codes are equal
        providers=(
            *own_providers("int8_quantize", "int8_quantize", setup, device),
            Provider(name="reference", setup=reference),
        ),
    )  # fmt: skip


def _dequantize_case(workload: ModelBatch, device: torch.device) -> KernelCase:
    shape, numel = _shape(workload, device)

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.float32)
        codes_P = (maker.integers(numel, below=255) - 127).to(torch.int8)
        return Inputs((codes_P, maker.uniform(num_groups(numel), low=0.001, high=0.1)))

    def setup(inputs: Inputs) -> Run:
        codes_P, scales_G = inputs.args
        out_P = torch.empty(numel, dtype=torch.bfloat16, device=codes_P.device)

        def run() -> Tensors:
            int8_dequantize(codes_P, scales_G, out_P)
            return (out_P,)

        return run

    def reference(inputs: Inputs) -> Run:
        return lambda: (int8_dequantize_reference(*inputs.args),)

    def rounded(inputs: Inputs) -> Run:
        return lambda: (int8_dequantize_reference(*inputs.args).bfloat16(),)

    return KernelCase(
        op="int8_dequantize", key="int8_dequantize", shape=shape, dtype="bfloat16", mode=Mode.FORWARD,
        num_bytes=3 * numel + 4 * num_groups(numel), flops=numel, make_inputs=make_inputs, exact=reference,
        same_dtype=rounded,
        providers=(
            *own_providers("int8_dequantize", "int8_quantize", setup, device),
            Provider(name="reference", setup=rounded),
        ),
    )  # fmt: skip


def _adamw_case(workload: ModelBatch, device: torch.device) -> KernelCase:
    shape, numel = _shape(workload, device)

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.float32)
        grad_P = maker.normal(numel, scale=1e-3, grad=False, dtype=torch.bfloat16)
        return Inputs((maker.normal(numel, scale=0.02, grad=False), grad_P))

    return KernelCase(
        op="adamw_int8", key="adamw_int8", shape=shape, dtype="float32", mode=Mode.FORWARD,
        # parameter read and written, gradient read, two codes and two scales of a group read and written
        num_bytes=(2 * 4 + 2 + 4) * numel + 4 * 4 * num_groups(numel), flops=40 * numel, make_inputs=make_inputs,
        exact=_adamw_exact, same_dtype=_adamw_reference, checked_calls=_CHECKED_STEPS,
        providers=(
            *own_providers("adamw_int8", "adamw_int8", _adamw, device, others=("bitsandbytes", "torch")),
            *(() if device.type == "cuda" else (Provider(name="reference", setup=_adamw_reference),)),
            Provider(name="torchao", setup=_adamw_torchao, missing=needs_package("torchao", device)),
        ),
    )  # fmt: skip


def _rounded_case(workload: ModelBatch, device: torch.device) -> KernelCase:
    """Return the case of the update of bfloat16 weights that have no float32 copy."""
    shape, numel = _shape(workload, device)

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, torch.bfloat16)
        return Inputs((maker.normal(numel, scale=0.02, grad=False), maker.normal(numel, scale=1e-3, grad=False)))

    on_card = device.type == "cuda"
    return KernelCase(
        op="adamw_int8_rounded", key="adamw_int8_rounded", shape=shape, dtype="bfloat16", mode=Mode.FORWARD,
        num_bytes=(2 * 2 + 2 + 4) * numel + 4 * 4 * num_groups(numel), flops=60 * numel, make_inputs=make_inputs,
        exact=_adamw_exact, checked_calls=_CHECKED_STEPS,
        same_dtype=forced("adamw_int8_rounded", "torch", _adamw_rounded) if on_card else _adamw_rounded,
        providers=own_providers("adamw_int8_rounded", "adamw_int8", _adamw_rounded, device),
    )  # fmt: skip


def _moments(like_P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of two moments that are zero."""
    groups = -(-like_P.numel() // QUANT_GROUP_SIZE)
    codes = [
        torch.full((groups * QUANT_GROUP_SIZE,), zero, dtype=torch.uint8, device=like_P.device) for zero in (127, 0)
    ]
    scales = [torch.zeros(groups, device=like_P.device) for _ in codes]
    return codes[0], scales[0], codes[1], scales[1]


def _adamw(inputs: Inputs) -> Run:
    param_P, grad_P = inputs.args[0].clone(), inputs.args[1]
    moments, step = _moments(param_P), 0

    def run() -> Tensors:
        nonlocal step
        step += 1
        adamw_int8_(param_P, grad_P, moments, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, step=step)
        return (param_P,)

    return run


def _adamw_rounded(inputs: Inputs) -> Run:
    weight_P, grad_P = inputs.args[0].clone(), inputs.args[1]
    moments, step = _moments(weight_P), 0
    seed = torch.full((1,), 20, dtype=torch.int64, device=weight_P.device)  # all providers round alike

    def run() -> Tensors:
        nonlocal step
        step += 1
        adamw_int8_rounded_(
            (weight_P,), grad_P, moments, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, step=step, seed=seed
        )
        return (weight_P,)

    return run


def _adamw_reference(inputs: Inputs) -> Run:
    param_P = inputs.args[0].clone()
    groups = -(-param_P.numel() // QUANT_GROUP_SIZE)
    padding = (0, groups * QUANT_GROUP_SIZE - param_P.numel())
    param_GS, grad_GS = (
        torch.nn.functional.pad(tensor, padding).view(groups, -1) for tensor in (param_P, inputs.args[1])
    )
    m_codes, m_scale, v_codes, v_scale = _moments(param_P)
    step = 0

    def run() -> Tensors:
        nonlocal step
        step += 1
        hyper = torch.tensor(
            [_LR, *_BETAS, _EPS, _DECAY, 1 - _BETAS[0] ** step, sqrt(1 - _BETAS[1] ** step), 0.0], device=param_P.device
        )
        parts = (param_GS, grad_GS, m_codes.view(groups, -1), m_scale, v_codes.view(groups, -1), v_scale)
        for slices in zip(*(torch.split(part, _SLICE_GROUPS) for part in parts), strict=True):
            adamw_int8_reference(*[*slices, hyper])
        return (param_GS.view(-1)[: param_P.numel()],)

    return run


def _adamw_exact(inputs: Inputs) -> Run:
    """Return AdamW whose moments are not rounded at all: 8 bits may cost as much as the reference's, twice."""

    def make(param_P: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param_P], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY)

    return _torch_optimizer(inputs, make, torch.float64)


def _adamw_torchao(inputs: Inputs) -> Run:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415  optional

    def make(param_P: torch.nn.Parameter) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = AdamW8bit([param_P], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY)
        return made

    return _torch_optimizer(inputs, make, torch.float32)


def _torch_optimizer(
    inputs: Inputs, make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], dtype: torch.dtype
) -> Run:
    param_P = torch.nn.Parameter(inputs.args[0].to(dtype, copy=True))
    param_P.grad = inputs.args[1].to(dtype)
    optimizer = make(param_P)

    def run() -> Tensors:
        optimizer.step()
        return (param_P.detach(),)

    return run

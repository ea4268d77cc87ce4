"""Cases of the ops that read and write activations once: SwiGLU, GeGLU, both norms, rotary positions.

B batch, T sequence, D width, F feed-forward width, N heads, H head dim, R = H / 2.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.geglu import geglu
from hybridkernels.geglu.reference import geglu_reference
from hybridkernels.layer_norm import layer_norm
from hybridkernels.layer_norm.reference import layer_norm_reference
from hybridkernels.rms_norm import rms_norm
from hybridkernels.rms_norm.reference import rms_norm_reference
from hybridkernels.rotary import rotary
from hybridkernels.rotary.reference import rotary_reference
from hybridkernels.swiglu import swiglu
from hybridkernels.swiglu.reference import swiglu_reference
from hybridtrain.models.layers import RotaryTable
from hybridvalidation.kernel_bench.case import (
    Function,
    Inputs,
    KernelCase,
    Maker,
    Mode,
    ModelBatch,
    Provider,
    liger,
    liger_provider,
    model_batches,
    needs_triton,
    trained,
    widened,
)

_DTYPE = torch.bfloat16
_EPS = 1e-5
_LIGER_ROTARY = "Liger's turns q and k together, in place and in another layout: not the same op"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One op; arithmetic per element of its output, traffic in tensors of that size."""

    name: str
    family: str
    """Of the models that have it."""
    function: Function
    plain: Function
    """The formula as a model without kernels has it."""
    reference: Function
    liger: Function | None
    """None: Liger's is another op."""
    kernel: str = ""
    """Folder of the Triton kernel; empty where the op takes torch's own on CUDA."""
    make: Callable[[Maker, ModelBatch], tuple[Tensor, ...]]
    passes: dict[Mode, int]
    """Tensors of the output's size that are read or written at least; smaller ones are left out."""
    flops: dict[Mode, int]
    """Per element, a function like exp counted once."""


def elementwise_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of these ops."""
    for op in _OPS:
        for workload in model_batches(device, family=op.family, quick=quick):
            for mode in modes:
                yield _case(op, workload, mode, device)


def _case(op: _Op, workload: ModelBatch, mode: Mode, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, _DTYPE)
        args = op.make(maker, workload)
        return Inputs(args, maker.normal(*args[0].shape, grad=False))

    numel = _numel(op, workload)
    return KernelCase(
        op=op.name, key=op.name, shape=workload.name, dtype="bfloat16", mode=mode,
        num_bytes=op.passes[mode] * numel * _DTYPE.itemsize, flops=op.flops[mode] * numel, make_inputs=make_inputs,
        exact=widened(trained(op.reference, mode), torch.float64), same_dtype=trained(op.plain, mode),
        providers=_providers(op, mode, device),
    )  # fmt: skip


def _providers(op: _Op, mode: Mode, device: torch.device) -> tuple[Provider, ...]:
    ours = trained(op.function, mode)
    if op.kernel and device.type == "cuda":
        first = Provider(name="triton", setup=ours, is_ours=True, missing=needs_triton(op.kernel))
    else:
        first = Provider(name="op" if device.type == "cuda" else "cpu", setup=ours, is_ours=True)
    found = [first, Provider(name="eager", setup=trained(op.plain, mode))]
    if op.liger is None:
        found.append(Provider(name="liger", setup=ours, missing=_LIGER_ROTARY))
    else:
        found.append(liger_provider(op.liger, mode, device))
    return tuple(found)


def _numel(op: _Op, workload: ModelBatch) -> int:
    """Return the elements of the first argument, without making it."""
    config = workload.config
    return workload.num_tokens * (config.ffn_width if op.make is _gated_inputs else config.width)


def _gated_inputs(maker: Maker, workload: ModelBatch) -> tuple[Tensor, ...]:
    shape = (workload.batch, workload.seq_len, workload.config.ffn_width)
    return maker.normal(*shape), maker.normal(*shape)


def _norm_inputs(maker: Maker, workload: ModelBatch) -> tuple[Tensor, ...]:
    width = workload.config.width
    return maker.normal(workload.batch, workload.seq_len, width), maker.normal(width)


def _layer_norm_inputs(maker: Maker, workload: ModelBatch) -> tuple[Tensor, ...]:
    return *_norm_inputs(maker, workload), maker.normal(workload.config.width)


def _rotary_inputs(maker: Maker, workload: ModelBatch) -> tuple[Tensor, ...]:
    config = workload.config
    x_BTNH = maker.normal(workload.batch, workload.seq_len, config.num_heads, config.head_dim)
    table = RotaryTable(workload.seq_len, config.head_dim, config.rope_theta).to(x_BTNH.device)
    return x_BTNH, table.cos_TR, table.sin_TR


def _plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _plain_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def _plain_rms_norm(x: Tensor, weight_D: Tensor) -> Tensor:
    """Return what Hugging Face's LlamaRMSNorm does: statistics in fp32, the weight in the dtype of ``x``."""
    wide = x.float()
    return weight_D * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _plain_layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return functional.layer_norm(x, weight_D.shape, weight_D, bias_D, _EPS)


def _plain_rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Return what Hugging Face's apply_rotary_pos_emb does: everything in the dtype of x."""
    cos, sin = (torch.cat([table, table], -1)[:, None].to(x_BTNH.dtype) for table in (cos_TR, sin_TR))
    first, second = x_BTNH.chunk(2, dim=-1)
    return x_BTNH * cos + torch.cat([-second, first], -1) * sin


def _liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return liger("swiglu", "LigerSiLUMulFunction", gate, up)


def _liger_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return liger("geglu", "LigerGELUMulFunction", gate, up)


def _liger_rms_norm(x: Tensor, weight_D: Tensor) -> Tensor:
    return liger("rms_norm", "LigerRMSNormFunction", x, weight_D, _EPS, 0.0, "llama", False)


def _liger_layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return liger("layer_norm", "LigerLayerNormFunction", x, weight_D, bias_D, _EPS)


_F, _B, _FB = Mode.FORWARD, Mode.BACKWARD, Mode.BOTH
_OPS = (
    _Op(
        name="swiglu", family="llama", kernel="swiglu", function=swiglu, plain=_plain_swiglu,
        reference=swiglu_reference, liger=_liger_swiglu, make=_gated_inputs, passes={_F: 3, _B: 5, _FB: 8},
        flops={_F: 5, _B: 11, _FB: 16},
    ),
    _Op(
        name="geglu", family="llama", kernel="geglu", function=geglu, plain=_plain_geglu, reference=geglu_reference,
        liger=_liger_geglu, make=_gated_inputs, passes={_F: 3, _B: 5, _FB: 8}, flops={_F: 9, _B: 18, _FB: 27},
    ),
    _Op(
        name="rms_norm", family="llama", function=lambda x, weight_D: rms_norm(x, weight_D, _EPS),
        plain=_plain_rms_norm, reference=lambda x, weight_D: rms_norm_reference(x, weight_D, _EPS),
        liger=_liger_rms_norm, make=_norm_inputs, passes={_F: 2, _B: 3, _FB: 5}, flops={_F: 4, _B: 10, _FB: 14},
    ),
    _Op(
        name="layer_norm", family="gpt2", function=lambda x, weight_D, bias_D: layer_norm(x, weight_D, bias_D, _EPS),
        plain=_plain_layer_norm,
        reference=lambda x, weight_D, bias_D: layer_norm_reference(x, weight_D, bias_D, _EPS),
        liger=_liger_layer_norm, make=_layer_norm_inputs, passes={_F: 2, _B: 3, _FB: 5},
        flops={_F: 7, _B: 13, _FB: 20},
    ),
    _Op(
        name="rotary", family="llama", function=rotary, plain=_plain_rotary, reference=rotary_reference,
        liger=None,
        make=_rotary_inputs, passes={_F: 2, _B: 2, _FB: 4}, flops={_F: 3, _B: 3, _FB: 6},
    ),
)  # fmt: skip

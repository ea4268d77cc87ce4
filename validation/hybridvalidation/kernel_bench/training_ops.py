"""Cases of the ops of a training step: attention, the loss, gated activations, norms and rotary positions.

B batch, T sequence, M tokens, C of a slice, D width, N query heads, K key/value heads, H head dim, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from hybridkernels.flash_attention import causal_attention, unfused_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridkernels.geglu import geglu
from hybridkernels.geglu.reference import geglu_reference
from hybridkernels.layer_norm import layer_norm
from hybridkernels.layer_norm.reference import layer_norm_reference
from hybridkernels.linear_cross_entropy import linear_cross_entropy
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
    Run,
    Tensors,
    model_batches,
    needs_card,
    needs_package,
    needs_triton,
    own_providers,
    trained,
    widened,
)

_DTYPE = torch.bfloat16
_EPS = 1e-5
_CHUNK_TOKENS = 1024
"""Of the loss, as the stack ``tight`` has it."""
_PASSES = {Mode.FORWARD: (1, 0), Mode.BACKWARD: (0, 1), Mode.BOTH: (1, 1)}
"""Forward and backward passes of a mode."""
_Pair = tuple[int, int]
"""Of a forward and a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One op of the models of a family."""

    name: str
    family: str = ""
    """Empty: every model has it."""
    function: Function
    plain: Function
    """The formula in the case's dtype, as a model without kernels has it."""
    exact: Function
    """The definition, which is given wider inputs."""
    make: Callable[[Maker, ModelBatch, Mode], Tensors]
    """The first tensor has the shape of the output, unless that is a scalar."""
    least: Callable[[ModelBatch], tuple[_Pair, _Pair]]
    """Bytes and operations that are needed at least."""
    has_triton: bool = False
    """Whether it has a kernel of ours; else it takes torch's own on CUDA."""
    choices: Sequence[str] = ()
    """Providers besides Triton's that the op chooses among; empty: it has no choice."""
    is_loss: bool = False
    """Scalar, with its gradients from the forward pass: a backward pass is no case, ``forward`` is an evaluation."""
    uses_tensor_cores: bool = False
    others: Mapping[str, Function] = field(default_factory=dict)
    liger: tuple[Any, ...] | None = None
    """Module and autograd function of Liger, and arguments behind the inputs."""
    no_liger: str = ""
    """Why it is not compared."""


def training_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of these ops."""
    for op in _OPS:
        is_slow = op.is_loss and device.type != "cuda"  # seconds a call on a processor
        for workload in model_batches(device, family=op.family, quick=quick or is_slow):
            yield from (
                _case(op, workload, mode, device) for mode in modes if not (op.is_loss and mode is Mode.BACKWARD)
            )


def _case(op: _Op, workload: ModelBatch, mode: Mode, device: torch.device) -> KernelCase:
    forward, backward = _PASSES[mode]
    num_bytes, flops = (forward * pair[0] + backward * pair[1] for pair in op.least(workload))
    key = f"{op.name}/head{workload.config.head_dim}" if op.name == "causal_attention" else op.name

    def make_inputs(where: torch.device) -> Inputs:
        maker = Maker(where, _DTYPE)
        args = op.make(maker, workload, mode)
        return Inputs(args, None if op.is_loss else maker.normal(*args[0].shape, grad=False))

    # In fp32 products are exact enough for 16 bits; in fp64 they take seconds on cards that are slow in it.
    wide = torch.float32 if op.uses_tensor_cores and device.type != "cpu" else torch.float64
    return KernelCase(
        op=op.name, key=key, shape=workload.name, dtype="bfloat16", mode=mode, num_bytes=num_bytes, flops=flops,
        uses_tensor_cores=op.uses_tensor_cores, make_inputs=make_inputs,
        exact=widened(trained(op.exact, mode), wide), same_dtype=trained(op.plain, mode),
        providers=tuple(_providers(op, key, mode, device)),
    )  # fmt: skip


def _providers(op: _Op, key: str, mode: Mode, device: torch.device) -> Iterator[Provider]:
    ours, on_card = trained(op.function, mode), device.type == "cuda"
    if op.choices:
        yield from own_providers(key, ours, device, others=op.choices)
    elif op.has_triton and on_card:
        yield Provider(name="triton", setup=ours, is_ours=True, missing=needs_triton())
    else:
        yield Provider(name="op" if on_card else "cpu", setup=ours, is_ours=True)
    for name, function in op.others.items():
        missing = needs_card(device) if name.startswith("sdpa") else ""
        yield Provider(name=name, setup=trained(function, mode), missing=missing)
    if op.liger is not None:
        missing = needs_package("liger_kernel", device)
        yield Provider(name="liger", setup=partial(_liger_setup, op.liger, mode), missing=missing)
    elif op.no_liger:
        yield Provider(name="liger", setup=ours, missing=op.no_liger)


def _liger_setup(names: tuple[Any, ...], mode: Mode, inputs: Inputs) -> Run:
    """Set up an autograd function of Liger, on copies: its backward passes write over their inputs."""
    module, name, *constants = names

    def function(*args: Tensor) -> Tensor:
        found = getattr(import_module(f"liger_kernel.ops.{module}"), name).apply(*args, *constants)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in inputs.args)
    return trained(function, mode)(Inputs(args, None if inputs.grad is None else inputs.grad.clone()))


def _per_element(passes: _Pair, flops: _Pair, size: str = "width") -> Callable[[ModelBatch], tuple[_Pair, _Pair]]:
    """Return what an elementwise op needs: tensors of the output's size read or written, operations per element.

    Smaller tensors are left out; a function like exp counts once. ``size`` is the attribute of a row's length.
    """

    def least(workload: ModelBatch) -> tuple[_Pair, _Pair]:
        numel: int = workload.num_tokens * getattr(workload.config, size)
        num_bytes = numel * _DTYPE.itemsize
        return (passes[0] * num_bytes, passes[1] * num_bytes), (flops[0] * numel, flops[1] * numel)

    return least


def _rows(size: str, num_rows: int, num_vectors: int = 0) -> Callable[[Maker, ModelBatch, Mode], Tensors]:
    """Return a maker of so many (B, T, size) tensors and (size,) vectors."""

    def make(maker: Maker, workload: ModelBatch, _: Mode) -> Tensors:
        width = getattr(workload.config, size)
        rows = [maker.normal(workload.batch, workload.seq_len, width) for _ in range(num_rows)]
        return *rows, *(maker.normal(width) for _ in range(num_vectors))

    return make


def _make_rotary(maker: Maker, workload: ModelBatch, _: Mode) -> Tensors:
    config = workload.config
    x_BTNH = maker.normal(workload.batch, workload.seq_len, config.num_heads, config.head_dim)
    table = RotaryTable(workload.seq_len, config.head_dim, config.rope_theta).to(x_BTNH.device)
    return x_BTNH, table.cos_TR, table.sin_TR


def _make_attention(maker: Maker, workload: ModelBatch, _: Mode) -> Tensors:
    config = workload.config
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    return tuple(maker.normal(workload.batch, workload.seq_len, count, config.head_dim) for count in heads)


def _make_loss(maker: Maker, workload: ModelBatch, mode: Mode) -> Tensors:
    config, trains = workload.config, mode is Mode.BOTH
    hidden_MD = maker.normal(workload.num_tokens, config.width, grad=trains)
    weight_VD = maker.normal(config.vocab_size, config.width, scale=config.width**-0.5, grad=trains)
    return hidden_MD, weight_VD, maker.integers(workload.num_tokens, below=config.vocab_size)


def _least_attention(workload: ModelBatch) -> tuple[_Pair, _Pair]:
    """Forward: q, k, v in, out out, 2 products; backward: those, out and its gradient in, 3 gradients out, 5."""
    config, tokens = workload.config, workload.num_tokens
    all_heads, product = config.num_heads + config.num_kv_heads, tokens * workload.seq_len * config.num_heads
    num_bytes = 2 * tokens * all_heads * config.head_dim * _DTYPE.itemsize
    return (num_bytes, 2 * num_bytes), (2 * product * config.head_dim, 5 * product * config.head_dim)  # lower triangle


def _least_loss(workload: ModelBatch) -> tuple[_Pair, _Pair]:
    """Forward: hidden, weight and targets in; backward: the gradients of hidden and weight out."""
    config, tokens = workload.config, workload.num_tokens
    num_bytes = _DTYPE.itemsize * (config.vocab_size + tokens) * config.width
    product = 2 * tokens * config.vocab_size * config.width
    return (num_bytes + 8 * tokens, num_bytes), (product, 2 * product)


def _attention_in_pieces(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Return the definition, one sequence and one key/value head at a time: only one piece's scores exist."""
    group = q_BTNH.shape[2] // k_BTKH.shape[2]
    rows = []
    for row in range(len(q_BTNH)):
        pieces = []
        for head in range(k_BTKH.shape[2]):
            q = q_BTNH[row : row + 1, :, head * group : (head + 1) * group]
            k, v = (tensor[row : row + 1, :, head : head + 1] for tensor in (k_BTKH, v_BTKH))
            pieces.append(checkpoint(causal_attention_reference, q, k, v, use_reentrant=False))
        rows.append(torch.cat(pieces, 2))
    return torch.cat(rows, 0)


def _sdpa(backend: SDPBackend, *tensors_BTNH: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors_BTNH)
    group = q.shape[1] // k.shape[1]
    if backend is SDPBackend.EFFICIENT_ATTENTION and group > 1:  # it knows no groups
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    return out.transpose(1, 2)


def _plain_loss(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    logits_MV = functional.linear(hidden_MD, weight_VD)
    return functional.cross_entropy(logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), targets_M)


def _sliced_loss(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """Return the plain loss slice by slice: the weight's gradient is rounded once a slice, as ours and Liger's is."""
    loss = hidden_MD.new_zeros((), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
    slices = (torch.split(tensor, _CHUNK_TOKENS) for tensor in (hidden_MD, targets_M))
    for hidden_CD, targets_C in zip(*slices, strict=True):
        loss = loss + _plain_loss(hidden_CD, weight_VD, targets_C) * (len(targets_C) / len(targets_M))
    return loss


def _plain_rms_norm(x: Tensor, weight_D: Tensor) -> Tensor:
    """Return what Hugging Face's LlamaRMSNorm does: statistics in fp32, the weight in the dtype of ``x``."""
    wide = x.float()
    return weight_D * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _plain_layer_norm(x: Tensor, *parameters: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], *parameters, _EPS)


def _plain_rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Return what Hugging Face's apply_rotary_pos_emb does: everything in the dtype of x."""
    cos, sin = (torch.cat([table, table], -1)[:, None].to(x_BTNH.dtype) for table in (cos_TR, sin_TR))
    first, second = x_BTNH.chunk(2, dim=-1)
    return x_BTNH * cos + torch.cat([-second, first], -1) * sin


def _gated(
    function: Function, exact: Function, activation: Callable[[Tensor], Tensor], flops: _Pair, liger: str
) -> _Op:
    """Return an activation of the gate times up."""

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    name: str = function.__name__
    return _Op(
        name=name, family="llama", has_triton=True, function=function, plain=plain, exact=exact, others={"eager": plain},
        make=_rows("ffn_width", 2), least=_per_element((3, 5), flops, "ffn_width"), liger=(name, liger),
    )  # fmt: skip


_OPS = (
    _Op(
        name="causal_attention", function=causal_attention, plain=_attention_in_pieces, exact=_attention_in_pieces,
        make=_make_attention, least=_least_attention, choices=("sdpa_flash",),
        uses_tensor_cores=True, others={
            "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
            "sdpa_efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION), "unfused": unfused_attention,
        },
    ),
    _Op(
        name="linear_cross_entropy", function=partial(linear_cross_entropy, chunk_tokens=_CHUNK_TOKENS),
        plain=_sliced_loss, exact=_plain_loss, make=_make_loss, least=_least_loss,
        choices=("torch",), is_loss=True, uses_tensor_cores=True, others={"eager": _plain_loss},
        liger=("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
    ),
    _gated(swiglu, swiglu_reference, functional.silu, (5, 11), "LigerSiLUMulFunction"),
    _gated(geglu, geglu_reference, partial(functional.gelu, approximate="tanh"), (9, 18), "LigerGELUMulFunction"),
    _Op(
        name="rms_norm", family="llama", function=partial(rms_norm, eps=_EPS), plain=_plain_rms_norm,
        exact=partial(rms_norm_reference, eps=_EPS), make=_rows("width", 1, 1), least=_per_element((2, 3), (4, 10)),
        others={"eager": _plain_rms_norm}, liger=("rms_norm", "LigerRMSNormFunction", _EPS, 0.0, "llama", False),
    ),
    _Op(
        name="layer_norm", family="gpt2", function=partial(layer_norm, eps=_EPS), plain=_plain_layer_norm,
        exact=partial(layer_norm_reference, eps=_EPS), make=_rows("width", 1, 2), least=_per_element((2, 3), (7, 13)),
        others={"eager": _plain_layer_norm}, liger=("layer_norm", "LigerLayerNormFunction", _EPS),
    ),
    _Op(
        name="rotary", family="llama", function=rotary, plain=_plain_rotary, exact=rotary_reference, make=_make_rotary,
        least=_per_element((2, 2), (3, 3)), others={"eager": _plain_rotary},
        no_liger="Liger's turns q and k together, in place and in another layout: not the same op",
    ),
)  # fmt: skip

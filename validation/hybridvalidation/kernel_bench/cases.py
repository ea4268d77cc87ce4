"""The cases of every op: those of a training step, from a table, and those of state.

Ops of state have a forward pass only: 8-bit codes, AdamW with such moments, and small ops between steps. In-place ops
give each provider its own copy. Small ones (features of a training state, sums over moments, an RSSM rollout) are timed
by wall clock, launches included, against the CPU reference that they replace.

B batch, T sequence, M tokens, C of a slice, D width, N query heads, K key/value heads, H head dim, V vocabulary;
P values, G = ceil(P / 256) groups; N states, E members, S ticks, Z = K * C classes, A actions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import count
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE, adamw_int8_, adamw_int8_rounded_
from hybridkernels.adamw_int8.op import Moments as OfMoments
from hybridkernels.adamw_int8.reference import Settings, adamw_int8_reference
from hybridkernels.flash_attention import causal_attention, unfused_attention
from hybridkernels.flash_attention.reference import causal_attention_reference
from hybridkernels.geglu import geglu
from hybridkernels.geglu.reference import geglu_reference
from hybridkernels.int8_quantize import int8_dequantize, int8_quantize, num_groups
from hybridkernels.int8_quantize.reference import int8_dequantize_reference, int8_quantize_reference
from hybridkernels.layer_norm import layer_norm
from hybridkernels.layer_norm.reference import layer_norm_reference
from hybridkernels.linear_cross_entropy import linear_cross_entropy
from hybridkernels.rms_norm import rms_norm
from hybridkernels.rms_norm.reference import rms_norm_reference
from hybridkernels.rotary import rotary
from hybridkernels.rotary.reference import rotary_reference
from hybridkernels.rssm_gru import rssm_rollout, unimix
from hybridkernels.rssm_gru.op import LAYERS, WEIGHTS
from hybridkernels.state_encoding import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    Moments,
    encode_state,
    moment_statistics,
)
from hybridkernels.swiglu import swiglu
from hybridkernels.swiglu.reference import swiglu_reference
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.hybrid.forecast import rssm_cell
from hybridtrain.hybrid.forecast.rssm import NUM_MEMBERS
from hybridtrain.hybrid.forecast.ticks import NUM_ACTIONS
from hybridtrain.models.layers import RotaryTable
from hybridtrain.models.model_config import block_params
from hybridvalidation.kernel_bench.case import (
    Clock,
    Function,
    InputMaker,
    Inputs,
    KernelCase,
    Mode,
    ModelBatch,
    Provider,
    Run,
    Setup,
    Tensors,
    forced,
    model_batches,
    needs_card,
    needs_package,
    needs_triton,
    own_providers,
    trained,
    widened,
    writing,
)

OPS = (
    "causal_attention", "linear_cross_entropy", "adamw_int8", "adamw_int8_rounded", "swiglu", "geglu", "rssm_gru",
    "state_encoding", "moment_statistics", "int8_quantize", "int8_dequantize", "rms_norm", "layer_norm", "rotary",
)  # fmt: skip
"""Ops by their share of a step, and by how uncertain their speed is."""
_MODE_ORDER = (Mode.BOTH, Mode.FORWARD, Mode.BACKWARD)
"""Order of modes; both decides the choice of a provider."""
_DTYPE = torch.bfloat16
_EPS = 1e-5
_CHUNK_TOKENS = 1024
"""Tokens per chunk of the loss, as in the stack ``tight``."""
_PASSES = {Mode.FORWARD: (1, 0), Mode.BACKWARD: (0, 1), Mode.BOTH: (1, 1)}
"""Forward and backward passes of a mode."""
_Pair = tuple[int, int]
"""A forward and a backward value."""


_LR, _BETAS, _ADAM_EPS, _DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_CHECKED_STEPS = 3
"""Not the first step, which does not read the 8-bit moments."""
_SLICE_GROUPS = 2**16
"""Groups that the reference processes at a time, as it makes a dozen float32 tensors."""
_NUM_STATES = (1, 512)
"""Batch sizes: one state, as between two steps; a whole replay."""
_ROWS, _TICKS = 8, 16
"""Samples of a forecast, and ticks of a horizon of 400 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One op of the models of a family."""

    name: str
    family: str = ""
    """Families with the op; empty: all."""
    function: Function
    plain: Function
    """The formula in the case's dtype, as in a model without kernels."""
    exact: Function
    """The definition, called with wider inputs."""
    make: Callable[[InputMaker, ModelBatch, Mode], Tensors]
    """Makes the inputs; the first has the output's shape, unless that is a scalar."""
    least: Callable[[ModelBatch], tuple[_Pair, _Pair]]
    """Least bytes and operations."""
    has_triton: bool = False
    """Whether it has our own kernel; otherwise it uses torch's on CUDA."""
    choices: Sequence[str] = ()
    """Providers besides Triton that the op chooses from; empty: no choice."""
    is_loss: bool = False
    """Whether the output is a scalar with gradients from the forward pass: no backward case, ``forward`` is an
    evaluation."""
    uses_tensor_cores: bool = False
    others: Mapping[str, Function] = field(default_factory=dict)
    liger: tuple[Any, ...] | None = None
    """Liger's module and autograd function, and arguments after the inputs."""
    no_liger: str = ""
    """Reason why it is not compared."""


def plan_cases(device: torch.device, *, only: Sequence[str], modes: Sequence[str], quick: bool) -> list[KernelCase]:
    """Return the cases of a device: one of each op first, then the rest in the order of ``OPS``.

    ``only``: ops, ``modes``: modes, empty: all. ``quick``: one shape per op.

    Raises:
        ConfigError: as ``require_names``.
    """
    require_names(only, modes)
    wanted = [mode for mode in _MODE_ORDER if not modes or mode in modes]
    cases = [*training_cases(device, wanted, quick=quick), *state_cases(device, wanted, quick=quick)]
    by_op = [[case for case in cases if case.op == op] for op in OPS if op in (only or OPS)]
    return [case for of_op in by_op for case in of_op[:1]] + [case for of_op in by_op for case in of_op[1:]]


def require_names(only: Sequence[str], modes: Sequence[str]) -> None:
    """Raise an error for unknown ops and modes.

    Raises:
        ConfigError: an unknown op or mode; all are listed.
    """
    faults = [unknown_name("op", name, OPS) for name in only if name not in OPS]
    faults += [unknown_name("mode", name, list(Mode)) for name in modes if name not in list(Mode)]
    if faults:
        raise ConfigError("--only, --modes", faults)


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
        maker = InputMaker(where, _DTYPE)
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
        outputs = getattr(import_module(f"liger_kernel.ops.{module}"), name).apply(*args, *constants)
        out: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return out

    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in inputs.args)
    return trained(function, mode)(Inputs(args, None if inputs.grad is None else inputs.grad.clone()))


def _per_element(passes: _Pair, flops: _Pair, size: str = "width") -> Callable[[ModelBatch], tuple[_Pair, _Pair]]:
    """Return the least of an elementwise op: tensors of the output's size read or written, operations per element.

    Smaller tensors are left out; a function like exp counts once. ``size`` is the attribute of a row's length.
    """

    def least(workload: ModelBatch) -> tuple[_Pair, _Pair]:
        numel: int = workload.num_tokens * getattr(workload.config, size)
        num_bytes = numel * _DTYPE.itemsize
        return (passes[0] * num_bytes, passes[1] * num_bytes), (flops[0] * numel, flops[1] * numel)

    return least


def _rows(size: str, num_rows: int, num_vectors: int = 0) -> Callable[[InputMaker, ModelBatch, Mode], Tensors]:
    """Return a maker of (B, T, size) tensors and (size,) vectors in given numbers."""

    def make(maker: InputMaker, workload: ModelBatch, _: Mode) -> Tensors:
        width = getattr(workload.config, size)
        rows = [maker.normal(workload.batch, workload.seq_len, width) for _ in range(num_rows)]
        return *rows, *(maker.normal(width) for _ in range(num_vectors))

    return make


def _make_rotary(maker: InputMaker, workload: ModelBatch, _: Mode) -> Tensors:
    config = workload.config
    x_BTNH = maker.normal(workload.batch, workload.seq_len, config.num_heads, config.head_dim)
    table = RotaryTable(workload.seq_len, config.head_dim, config.rope_theta).to(x_BTNH.device)
    return x_BTNH, table.cos_TR, table.sin_TR


def _make_attention(maker: InputMaker, workload: ModelBatch, _: Mode) -> Tensors:
    config = workload.config
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    return tuple(maker.normal(workload.batch, workload.seq_len, count, config.head_dim) for count in heads)


def _make_loss(maker: InputMaker, workload: ModelBatch, mode: Mode) -> Tensors:
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
    """Normalize as Hugging Face's LlamaRMSNorm: statistics in fp32, the weight in the dtype of ``x``."""
    wide = x.float()
    return weight_D * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _plain_layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return functional.layer_norm(x, weight_D.shape, weight_D, bias_D, _EPS)


def _plain_rotary(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate as Hugging Face's apply_rotary_pos_emb: everything in the dtype of ``x``."""
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
        name=name, family="llama", has_triton=True, function=function, plain=plain, exact=exact,
        make=_rows("ffn_width", 2), least=_per_element((3, 5), flops, "ffn_width"), others={"eager": plain},
        liger=(name, liger),
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
        no_liger="Liger's rotates q and k together, in place and in another layout: not the same op",
    ),
)  # fmt: skip


def state_cases(device: torch.device, modes: Sequence[Mode], *, quick: bool) -> Iterator[KernelCase]:
    """Yield the cases of these ops; all modes but ``backward`` mean the forward pass."""
    if not {Mode.FORWARD, Mode.BOTH} & set(modes):
        return
    for workload in model_batches(device, quick=quick):
        if device.type == "cuda" and workload.model == "gpt2-small":
            continue  # its blocks are too small to say more than the others
        block = _block(workload, device)
        yield _adamw_case(*block, device)
        yield _rounded_case(*block, device)
        yield _quantize_case(*block, device)
        yield _dequantize_case(*block, device)
    yield _rollout_case(device)
    for num_states in _NUM_STATES[: 1 if quick else None]:
        yield _encode_case(num_states, device)
    yield _moments_case(*_block(model_batches(device)[0], device), device)


def _block(workload: ModelBatch, device: torch.device) -> tuple[str, int]:
    """Return name and count of the parameters of a block; of a matrix of it where there is no card."""
    if device.type == "cuda":
        return f"{workload.model} block", block_params(workload.config)
    return f"{workload.model} width x width", workload.config.width**2


def _codes_case(op: str, shape: str, numel: int, **others: Any) -> KernelCase:
    """Return a case of 2-byte values and 1-byte codes, one of them read and one written."""
    return KernelCase(
        op=op, key=op, shape=shape, dtype="bfloat16", mode=Mode.FORWARD, num_bytes=3 * numel + 4 * num_groups(numel),
        **others,
    )  # fmt: skip


def _quantize_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    def setup(inputs: Inputs) -> Run:
        (values_P,) = inputs.args
        codes_P = torch.empty(numel, dtype=torch.int8, device=values_P.device)
        scales_G = torch.empty(num_groups(numel), device=values_P.device)
        return writing(lambda: int8_quantize(values_P, codes_P, scales_G, stochastic=False), codes_P, scales_G)

    def reference(inputs: Inputs) -> Run:
        return lambda: int8_quantize_reference(inputs.args[0])

    own = own_providers("int8_quantize", setup, device)
    return _codes_case(
        "int8_quantize", shape, numel, flops=5 * numel,
        make_inputs=lambda where: Inputs((InputMaker(where, torch.bfloat16).normal(numel, grad=False),)),
        exact=reference, same_dtype=reference,  # every step is correctly rounded: the codes are equal
        providers=(*own, Provider(name="reference", setup=reference)),
    )  # fmt: skip


def _dequantize_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = InputMaker(where, torch.float32)
        codes_P = (maker.integers(numel, below=255) - 127).to(torch.int8)
        return Inputs((codes_P, maker.uniform(num_groups(numel), low=0.001, high=0.1)))

    def setup(inputs: Inputs) -> Run:
        out_P = torch.empty(numel, dtype=torch.bfloat16, device=inputs.args[0].device)
        return writing(lambda: int8_dequantize(inputs.args[0], inputs.args[1], out_P), out_P)

    def rounded(inputs: Inputs) -> Run:
        return lambda: (int8_dequantize_reference(*inputs.args).bfloat16(),)

    own = own_providers("int8_dequantize", setup, device)
    return _codes_case(
        "int8_dequantize", shape, numel, flops=numel, make_inputs=make_inputs,
        exact=lambda inputs: lambda: (int8_dequantize_reference(*inputs.args),), same_dtype=rounded,
        providers=(*own, Provider(name="reference", setup=rounded)),
    )  # fmt: skip


def _update_case(
    op: str, shape: str, numel: int, device: torch.device, *, setup: Setup, same_dtype: Setup, dtype: torch.dtype,
    flops: int, providers: tuple[Provider, ...], choices: Sequence[str] = ("torch",),
) -> KernelCase:  # fmt: skip
    """Return a case: weight read and written, gradient read, two codes and two scales of a group read and written."""

    def make_inputs(where: torch.device) -> Inputs:
        maker = InputMaker(where, torch.bfloat16)
        grad_P = maker.normal(numel, scale=1e-3, grad=False)
        return Inputs((maker.normal(numel, scale=0.02, grad=False, dtype=dtype), grad_P))

    return KernelCase(
        op=op, key=op, shape=shape, dtype=str(dtype)[6:], mode=Mode.FORWARD,
        num_bytes=(2 * dtype.itemsize + 2 + 4) * numel + 4 * 4 * num_groups(numel), flops=flops * numel,
        make_inputs=make_inputs, exact=_adamw_exact, same_dtype=same_dtype, checked_calls=_CHECKED_STEPS,
        providers=(*own_providers(op, setup, device, others=choices), *providers),
    )  # fmt: skip


def _adamw_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    reference = () if device.type == "cuda" else (Provider(name="reference", setup=_adamw_reference),)
    torchao = Provider(name="torchao", setup=_adamw_torchao, missing=needs_package("torchao", device))
    setup = _in_place(lambda param_P, grad_P, moments, step: adamw_int8_(param_P, grad_P, moments, **_settings(step)))
    return _update_case(
        "adamw_int8", shape, numel, device, setup=setup, same_dtype=_adamw_reference, dtype=torch.float32, flops=40,
        providers=(*reference, torchao), choices=("bitsandbytes", "torch"),
    )  # fmt: skip


def _rounded_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    """Return the case of the update of bfloat16 weights that have no float32 copy."""
    op = "adamw_int8_rounded"

    def update(weight_P: Tensor, grad_P: Tensor, moments: OfMoments, step: int) -> None:
        adamw_int8_rounded_((weight_P,), grad_P, moments, seed=_seed(weight_P.device), **_settings(step))

    setup = _in_place(update)
    same_dtype = forced(op, "torch", setup) if device.type == "cuda" else setup
    return _update_case(
        op, shape, numel, device, setup=setup, same_dtype=same_dtype, dtype=torch.bfloat16, flops=60, providers=()
    )


def _settings(step: int) -> Settings:
    return Settings(lr=_LR, betas=_BETAS, eps=_ADAM_EPS, weight_decay=_DECAY, step=step)


@cache
def _seed(device: torch.device) -> Tensor:
    """Return the seed by which all providers round alike."""
    return torch.full((1,), 20, dtype=torch.int64, device=device)


def _moments(like_P: Tensor) -> OfMoments:
    """Return codes and scales of two moments that are zero."""
    groups, device = num_groups(like_P.numel()), like_P.device
    m_codes, v_codes = (
        torch.full((groups * QUANT_GROUP_SIZE,), zero, dtype=torch.uint8, device=device) for zero in (127, 0)
    )
    return m_codes, torch.zeros(groups, device=device), v_codes, torch.zeros(groups, device=device)


def _in_place(update: Callable[[Tensor, Tensor, OfMoments, int], None]) -> Setup:
    """Return a setup that updates a copy of the weight, one step a call."""

    def setup(inputs: Inputs) -> Run:
        weight_P, grad_P, steps = inputs.args[0].clone(), inputs.args[1], count(1)
        moments = _moments(weight_P)
        return writing(lambda: update(weight_P, grad_P, moments, next(steps)), weight_P)

    return setup


def _adamw_reference(inputs: Inputs) -> Run:
    numel, groups, steps = inputs.args[0].numel(), num_groups(inputs.args[0].numel()), count(1)
    padding = (0, groups * QUANT_GROUP_SIZE - numel)
    param_GS, grad_GS = (torch.nn.functional.pad(tensor, padding).view(groups, -1) for tensor in inputs.args)
    m_codes, m_scale, v_codes, v_scale = _moments(inputs.args[0])

    def run() -> Tensors:
        step = next(steps)
        hyper = torch.tensor(
            [_LR, *_BETAS, _ADAM_EPS, _DECAY, 1 - _BETAS[0] ** step, sqrt(1 - _BETAS[1] ** step), 0.0],
            device=m_scale.device,
        )
        parts = (param_GS, grad_GS, m_codes.view(groups, -1), m_scale, v_codes.view(groups, -1), v_scale)
        for param, grad, *moments in zip(*(torch.split(part, _SLICE_GROUPS) for part in parts), strict=True):
            adamw_int8_reference(param, grad, moments, hyper)
        return (param_GS.view(-1)[:numel],)

    return run


def _adamw_exact(inputs: Inputs) -> Run:
    """Set up AdamW whose moments are not rounded at all: 8 bits may cost as much as the reference's, twice."""
    return _torch_optimizer(inputs, torch.optim.AdamW, torch.float64)


def _adamw_torchao(inputs: Inputs) -> Run:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415  optional

    return _torch_optimizer(inputs, AdamW8bit, torch.float32)


def _torch_optimizer(inputs: Inputs, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> Run:
    param_P = torch.nn.Parameter(inputs.args[0].to(dtype, copy=True))
    param_P.grad = inputs.args[1].to(dtype)
    optimizer = make([param_P], lr=_LR, betas=_BETAS, eps=_ADAM_EPS, weight_decay=_DECAY)
    return writing(optimizer.step, param_P.detach())


def _small_case(op: str, key: str, shape: str, setup: Setup, device: torch.device, **others: Any) -> KernelCase:
    """Return a case whose definition is the op itself on the processor, in float64, unless another is given."""
    on_processor = {"exact": _on_processor(widened(setup, torch.float64)), "same_dtype": _on_processor(setup)}
    own = own_providers(key, setup, device)
    processor = (Provider(name="cpu", setup=_on_processor(setup)),) if device.type == "cuda" else ()
    return KernelCase(
        op=op, key=key, shape=shape, dtype="float32", mode=Mode.FORWARD, clock=Clock.WALL,
        providers=(*own, *processor), **{**on_processor, **others},
    )  # fmt: skip


def _on_processor(setup: Setup) -> Setup:
    """Return a setup that copies its inputs to the processor first and works there."""
    return lambda inputs: setup(Inputs(tuple(arg.cpu() for arg in inputs.args)))


def _encode_case(num_states: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = InputMaker(torch.device("cpu"), torch.float32)
        histories = [maker.uniform(num_states, steps, low=0.5, high=5.0) for steps in (LOSS_STEPS, GRAD_NORM_STEPS)]
        moments = maker.uniform(num_states, NUM_MOMENT_STATISTICS, low=1e-6, high=1e-3)
        scalars = maker.uniform(num_states, NUM_SCALARS, low=0.1, high=0.9)
        phases = torch.eye(NUM_PHASES)[maker.integers(num_states, below=NUM_PHASES)]
        return Inputs(tuple(tensor.to(where) for tensor in (*histories, moments, scalars, phases)))

    history = LOSS_STEPS + GRAD_NORM_STEPS
    width = history + NUM_MOMENT_STATISTICS + NUM_SCALARS + NUM_PHASES + NUM_FEATURES
    return _small_case(
        "state_encoding", "encode_state", "1 state" if num_states == 1 else f"{num_states} states",
        lambda inputs: lambda: (encode_state(*inputs.args),), device, make_inputs=make_inputs,
        num_bytes=4 * num_states * width, flops=num_states * 2 * history * NUM_FEATURES,
    )  # fmt: skip


def _moments_case(shape: str, numel: int, device: torch.device) -> KernelCase:
    def make_inputs(where: torch.device) -> Inputs:
        maker = InputMaker(where, torch.float32)
        m, v, slow = (maker.uniform(numel, low=0.5 * size, high=1.5 * size) for size in (1e-3, 1e-6, 1e-4))
        return Inputs((m, v, slow))  # of one sign: sums that cancel would have no digits to compare

    def setup(inputs: Inputs) -> Run:
        moments = [Moments(*inputs.args)]
        return lambda: (moment_statistics(moments),)

    def exact(inputs: Inputs) -> Run:
        """Set up the definition of the sums in float64."""
        m, v, slow = (arg.double() for arg in inputs.args)
        sums = (m.sum(), m.dot(m), v.sum(), v.dot(v), slow.dot(slow), m.dot(slow))
        ends = [torch.full_like(sums[0], value) for value in (m.numel(), 1)]
        return lambda: (torch.stack([ends[0], *sums, ends[1]]),)

    # Blocks of some thousand values are summed in fp32: a dozen roundings of 2^-24.
    return _small_case(
        "moment_statistics", "moment_statistics", shape, setup, device, make_inputs=make_inputs,
        num_bytes=3 * 4 * numel, flops=10 * numel, exact=exact, floor=1e-6, seen=lambda outputs: outputs[0].unbind(),
    )  # fmt: skip


def _rollout_case(device: torch.device) -> KernelCase:
    num_weights = sum(prod(rssm_cell.LAYERS[name]) for name in LAYERS if name != "seen")
    rows = (NUM_MEMBERS, _ROWS)

    def make_inputs(where: torch.device) -> Inputs:
        maker = InputMaker(torch.device("cpu"), torch.float32)
        weights: list[Tensor] = []
        for fan_in, fan_out in (rssm_cell.LAYERS[name] for name in LAYERS):
            weights.append(maker.normal(NUM_MEMBERS, fan_in, fan_out, scale=fan_in**-0.5, grad=False))
            weights.append(maker.normal(NUM_MEMBERS, 1, fan_out, scale=0.1, grad=False))
        state = (
            maker.normal(*rows, rssm_cell.HIDDEN, grad=False),
            maker.integers(*rows, rssm_cell.NUM_CATEGORICALS, below=rssm_cell.NUM_CLASSES),
            maker.normal(_TICKS, *rows, NUM_ACTIONS, grad=False),
            maker.uniform(_TICKS, *rows, rssm_cell.NUM_CATEGORICALS, low=0.0, high=1.0),
        )
        uniforms = _centred(dict(zip(WEIGHTS, weights, strict=True)), *state)
        return Inputs(tuple(tensor.to(where) for tensor in (*weights, *state[:3], uniforms)))

    def setup(inputs: Inputs) -> Run:
        weights = dict(zip(WEIGHTS, inputs.args, strict=False))
        state = inputs.args[len(WEIGHTS) :]
        return lambda: rssm_rollout(weights, *state)[:3]

    return _small_case(
        "rssm_gru", "rssm_rollout", f"forecast of {_TICKS} ticks, {NUM_MEMBERS} x {_ROWS} rows", setup, device,
        make_inputs=make_inputs, num_bytes=4 * NUM_MEMBERS * num_weights,
        flops=2 * _TICKS * NUM_MEMBERS * _ROWS * num_weights,
    )  # fmt: skip


def _centred(
    weights: Mapping[str, Tensor], hidden: Tensor, classes: Tensor, actions: Tensor, uniforms: Tensor
) -> Tensor:
    """Return random numbers that draw the same classes from the middle of each one's interval.

    A number within rounding of a border would draw another class under another order of sums, and the path after it
    would be another one: no provider would be wrong.
    """
    wide = {name: weight.double() for name, weight in weights.items()}
    hidden, centres = hidden.double(), []
    for action, uniform in zip(actions.double(), uniforms.double(), strict=True):
        rollout = rssm_rollout(wide, hidden, classes, action[None], uniform[None])
        hidden, classes = rollout.hidden_EBH, rollout.classes_EBK
        shares = unimix(rollout.logits_EBZ.view(*classes.shape, -1))
        upper = shares.cumsum(-1).gather(-1, classes[..., None])
        centres.append((upper - shares.gather(-1, classes[..., None]) / 2)[..., 0])
    return torch.stack(centres).float()

# mypy: disable-error-code="no-untyped-call"
"""CUDA-only choices of kernels, and their scratch memory.

Composite ops choose by device: attention, autocast and dropout. While ``cuda_paths`` is open,
they choose for virtual tensors as on CUDA. Each rule names its source in torch 2.13.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_rules import Args, Op, ScratchRule, register_scratch, tensors_in
from hybridtrain.virtual_gpu.account.reductions import Multiprocessors, reduction_rules
from hybridtrain.virtual_gpu.facade.convolutions import workspace_rules
from hybridtrain.virtual_gpu.facade.known_values import Place
from hybridtrain.virtual_gpu.facade.placeholders import where_called
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

_ATEN = torch.ops.aten
_HALVES = frozenset({torch.float16, torch.bfloat16})
_EFFICIENT = frozenset({*_HALVES, torch.float32})
"""Types of memory-efficient attention; bfloat16 from compute capability 8.0 on (cuda/sdp_utils.cpp)."""
_AUTOCAST_KEY: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
"""An unused dispatch key, as CUDA's autocast key applies to real CUDA tensors only."""

LOWER_PRECISION = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Ops that autocast runs in the lower precision: aten/src/ATen/autocast_mode.h."""
FULL_PRECISION = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "rms_norm", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Ops that autocast runs in fp32."""
FULL_PRECISION_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Ops that autocast lets return fp32, without converting inputs."""
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add", "cat", "stack",
)  # fmt: skip
"""Ops that autocast runs in the widest type among their operands."""


@contextmanager
def cuda_paths(ledger: VirtualLedger) -> Iterator["Autocast"]:
    """Make composite ops and autocast treat a virtual card's tensors as CUDA tensors."""
    fallback = torch.library.Library("_", "IMPL")
    paths = torch.library.Library("aten", "IMPL")
    autocast = Autocast(ledger)
    try:
        fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        chooser = _AttentionChoice(ledger)
        paths.impl("scaled_dot_product_attention", chooser.attend, "AutogradMeta")
        paths.impl("dropout", _dropout(ledger), "AutogradMeta")
        assert paths.m is not None
        for name, kernel in _CUDA_KERNELS.items():
            if _overload(name) is not None:
                paths.m.impl(name, "Meta", kernel, False)  # Library.impl refuses to replace a composite
        ledger.scratch_rules[_ATEN._scaled_dot_product_efficient_attention_backward.default] = (
            chooser.efficient_backward
        )
        multiprocessors = Multiprocessors(ledger.card.sms, ledger.card.threads_per_multiprocessor)
        ledger.scratch_rules.update(reduction_rules(multiprocessors))
        ledger.scratch_rules.update(workspace_rules(chooser.capability, multiprocessors))
        for rule, names in autocast.rules():
            for name in names:
                op = _overload(name)
                if op is not None:
                    paths.impl(name, rule(op), "AutocastPrivateUse1")
        with _eight_bit_products(ledger):
            yield autocast
    finally:
        autocast.enable(is_enabled=False)
        paths._destroy()
        fallback._destroy()


def _dropout(ledger: VirtualLedger) -> Callable[..., Tensor]:
    """Return dropout by one kernel that keeps a boolean mask (aten/src/ATen/native/Dropout.cpp)."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002  torch's names
        if train and 0 < p < 1 and input.numel() and ledger.place_of(input) is Place.DEVICE:
            return torch.native_dropout(input, p, train)[0]
        out: Tensor = _ATEN.dropout.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, input, p, train)
        return out

    return dropout


@contextmanager
def _eight_bit_products(ledger: VirtualLedger) -> Iterator[None]:
    """Plan bitsandbytes' LLM.int8 (bitsandbytes/backends/cuda/ops.py): its columns of outliers depend on values.

    None are counted. Scratch: magnitudes and a mask of what is quantized; the product in int32.
    """
    if "bitsandbytes" not in sys.modules:
        yield
        return
    told = "8-bit products are planned without columns of outliers, which bitsandbytes copies in 16 bits"

    def quantize(values: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
        outliers = None if threshold == 0.0 else values.new_empty(0, dtype=torch.int64)
        if outliers is not None:
            ledger.seen.approximated.setdefault(told, where_called())
        scales = values.new_empty(values.numel() // values.shape[-1], dtype=torch.float32)
        return torch.empty_like(values, dtype=torch.int8), scales, outliers

    def multiply(values: Tensor, codes: Tensor, weight: Tensor, *_rest: Any) -> tuple[Tensor, None]:
        return values.new_empty((*codes.shape[:-1], weight.shape[0])), None

    ops = torch.ops.bitsandbytes
    ledger.scratch_rules[ops.int8_vectorwise_quant.default] = lambda args: (
        args[0].numel() * (args[0].element_size() + 1) if args[1:] and args[1] else 0
    )
    for op, first in ((ops.int8_scaled_mm.default, 0), (ops.int8_mixed_scaled_mm.default, 1)):
        ledger.scratch_rules[op] = _int32_product(first)
    kernels = torch.library.Library("bitsandbytes", "IMPL")
    assert kernels.m is not None
    try:
        kernels.m.impl("int8_vectorwise_quant", "Meta", quantize, False)
        kernels.m.impl("int8_mixed_scaled_mm", "Meta", multiply, False)
        yield
    finally:
        kernels._destroy()


def _int32_product(first: int) -> ScratchRule:
    def scratch(args: Sequence[Any]) -> int:
        codes, weight = args[first : first + 2]
        return int(4 * codes.numel() // codes.shape[-1] * weight.shape[0])

    return scratch


def _rms_norm(
    input: Tensor,  # noqa: A002  torch's names
    normalized_shape: Sequence[int],
    _weight: Tensor | None,
    _eps: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the result and a number of each row, fp32 of halves: all that CUDA keeps (layer_norm_kernel.cu)."""
    rows = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    dtype = torch.float32 if input.dtype in _HALVES else input.dtype
    return torch.empty_like(input, memory_format=torch.contiguous_format), input.new_empty(rows, dtype=dtype)


def _channel_sums(count: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return a kernel that makes ``count`` numbers of each channel, fp32 of halves (cuda/Normalization.cuh)."""

    def kernel(input: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, ...]:  # noqa: A002  torch's name
        dtype = torch.float32 if input.dtype in _HALVES else input.dtype
        return tuple(input.new_empty(input.shape[1], dtype=dtype) for _ in range(count))

    return kernel


def _backward_sums(
    gradient: Tensor, _input: Tensor, mean: Tensor, _invstd: Tensor, weight: Tensor | None, *masks: bool
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return two sums of each channel, and the gradients of weight and bias where they are asked for."""
    like = mean if weight is None else weight
    sums = [torch.empty_like(mean) if masks[0] else None for _ in range(2)]
    return *sums, *(gradient.new_empty(mean.shape, dtype=like.dtype) if asked else None for asked in masks[1:])


def _like_first(values: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return torch.empty_like(values)


def _like_second(_gradient: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return torch.empty_like(values)


def _with_mask(values: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the quantized values and the mask of those within range (quantized/FakeQuantPerTensorAffine.cpp)."""
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def _learned_step(_gradient: Tensor, values: Tensor, scale: Tensor, zero: Tensor, *_args: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(values), torch.empty_like(scale), torch.empty_like(zero)


def _reflectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return LAPACK's form of a QR factorization: reflectors and their factors."""
    return torch.empty_like(matrix), matrix.new_empty((*matrix.shape[:-2], min(matrix.shape[-2:])))


_CUDA_KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _channel_sums(2),
    "batch_norm_gather_stats_with_counts": _channel_sums(2),
    "batch_norm_elemt": lambda x, *_args: torch.empty_like(x),
    "batch_norm_backward_reduce": _backward_sums,
    "batch_norm_backward_elemt": lambda _gradient, x, *_args: torch.empty_like(x),
    "_fused_rms_norm": _rms_norm,
    **dict.fromkeys(
        ("mish_backward", "_standard_gamma_grad", "_dirichlet_grad", "_sample_dirichlet", "binomial",
         "_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine", "glu_jvp"),
        _like_first,
    ),
    **dict.fromkeys(
        ("multi_margin_loss_backward", "multilabel_margin_loss_backward", "fractional_max_pool3d_backward"),
        _like_second,
    ),
    **dict.fromkeys(
        ("fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
         "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"),
        _with_mask,
    ),
    **dict.fromkeys(
        ("_fake_quantize_learnable_per_tensor_affine_backward", "_fake_quantize_learnable_per_channel_affine_backward"),
        _learned_step,
    ),
    "geqrf": _reflectors,
    "equal": lambda _one, _other: False,  # of numbers that torch itself makes: is a count 0
    **dict.fromkeys(("_fused_sgd_", "_fused_adagrad_"), lambda *_args, **_kwargs: None),
}  # fmt: skip
"""Ops with one kernel on CUDA, but none or several on the meta device (native_functions.yaml)."""


def _overload(name: str) -> Op | None:
    packet, _, overload = name.partition(".")
    found: Op | None = getattr(getattr(_ATEN, packet, None), overload or "default", None)
    return found


class Autocast:
    """Casts operands as CUDA's autocast does (aten/src/ATen/autocast_mode.cpp), weights once per region."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger
        self._keys = torch._C.DispatchKeySet(_AUTOCAST_KEY)
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def enable(self, *, is_enabled: bool) -> None:
        """Start or stop intercepting ops."""
        torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOCAST_KEY, not is_enabled)
        torch._C._dispatch_tls_set_dispatch_key_included(_AUTOCAST_KEY, is_enabled)

    def clear_cache(self) -> None:
        """Clear cast weights, as at the end of the outermost region."""
        self._cache.clear()

    def rules(self) -> Iterator[tuple[Callable[[Op], Callable[..., Any]], tuple[str, ...]]]:
        """Yield replacement kernels, each with its ops."""
        yield self._converting(lambda _args: torch.get_autocast_dtype("cuda")), LOWER_PRECISION
        yield self._converting(lambda _args: torch.float32), FULL_PRECISION
        yield self._converting(_widest), WIDEST
        yield self._full_result, FULL_PRECISION_RESULT

    def _full_result(self, op: Op) -> Callable[..., Any]:
        """Return a kernel that asks ``op`` for an fp32 result, unless the caller asks for another type."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._keys):
                first = args[0]
                takes = first.dtype in _HALVES and self._is_ours(first)
                if takes and kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args):
                    kwargs["dtype"] = torch.float32
                return op(*args, **kwargs)

        return kernel

    def _converting(self, pick: Callable[[Args], torch.dtype]) -> Callable[[Op], Callable[..., Any]]:
        """Return a maker of kernels that convert their operands first."""

        def rule(op: Op) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(self._keys):
                    dtype = pick(args)
                    named = {name: self._convert(value, dtype) for name, value in kwargs.items()}
                    return op(*(self._convert(value, dtype) for value in args), **named)

            return kernel

        return rule

    def _is_ours(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and self._ledger.place_of(tensor) is Place.DEVICE

    def _convert(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            if value.dtype is dtype or value.dtype is torch.float64 or not self._is_ours(value):
                return value
            is_weight = value.is_leaf and value.requires_grad and not value._is_view()
            if dtype is torch.float32 or value.dtype is not torch.float32 or not is_weight:
                return value.to(dtype)
            if not torch.is_autocast_cache_enabled():
                return value.to(dtype)
            if id(value) not in self._cache:
                self._cache[id(value)] = (value, value.to(dtype))
            return self._cache[id(value)][1]
        if isinstance(value, list | tuple):
            return type(value)(self._convert(item, dtype) for item in value)
        return value


def _widest(args: Args) -> torch.dtype:
    wide = any(tensor.dtype is torch.float32 for tensor in tensors_in(args))
    return torch.float32 if wide else torch.get_autocast_dtype("cuda")


class _Attention(NamedTuple):
    """Operands of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[:3])

    @property
    def is_uniform(self) -> bool:
        """Whether all have four dimensions and one dtype."""
        return self.query.dim() == 4 and self.query.dtype == self.key.dtype == self.value.dtype


class _AttentionChoice:
    """Flash, memory-efficient, plain or cuDNN's attention, in that order (native/transformers/cuda/sdp_utils.cpp)."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger
        major, minor = ledger.card.compute_capability.split(".")
        self.capability = 10 * int(major) + int(minor)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _Attention(*args, **kwargs)
        return self.attend_on(call, is_on_card=self._ledger.place_of(call.query) is Place.DEVICE)

    def attend_on(self, call: "_Attention", *, is_on_card: bool) -> Tensor:
        if is_on_card:
            if self._can_flash(call):
                return _flash(call)
            grouped = call.enable_gqa and call.key.shape[-3] != call.query.shape[-3]
            if not grouped and self._can_be_efficient(call):
                return _efficient(call)
            if not torch.backends.cuda.math_sdp_enabled():  # of others it is ahead
                if grouped or not self._can_be_cudnn(call):
                    raise RuntimeError("No available kernel. Aborting execution.")
                return _cudnn(call)
        out: Tensor = _ATEN._scaled_dot_product_attention_math(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)[
            0
        ]
        return out

    def _can_flash(self, call: _Attention) -> bool:
        query, key, value = call[:3]
        width = query.shape[-1]
        consumer = 86 <= self.capability <= 89
        too_wide = width > 256 or (consumer and call.needs_grad and width > 192 and (width > 224 or call.dropout_p > 0))
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self.capability >= 80
            and call.attn_mask is None
            and call.is_uniform
            and query.dtype in _HALVES
            and width == key.shape[-1] == value.shape[-1]
            and not too_wide
            and not (call.is_causal and query.shape[-2] != key.shape[-2])
            and 0 not in query.shape
            and 0 not in key.shape
        )

    def _can_be_efficient(self, call: _Attention) -> bool:
        query, key, value = call[:3]
        aligned = 16 // query.element_size() if self.capability >= 80 or query.dtype in _HALVES else 1
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and call.is_uniform
            and query.dtype in (_EFFICIENT if self.capability >= 80 else _EFFICIENT - {torch.bfloat16})
            and query.shape[-1] % aligned == value.shape[-1] % aligned == 0
            and query.shape[-3] == key.shape[-3] == value.shape[-3]
        )

    def _can_be_cudnn(self, call: _Attention) -> bool:
        widths = {call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]}
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and self.capability >= 80
            and call.is_uniform
            and call.query.dtype in _HALVES
            and all(width <= 128 and width % 8 == 0 for width in widths)
            and not (call.attn_mask is not None and call.attn_mask.requires_grad and call.needs_grad)
        )

    def efficient_backward(self, args: Sequence[Any]) -> int:
        """Return the scratch of memory-efficient attention's backward pass: row sums, and accumulators in fp32.

        Kernels and their order: mem_eff_attention/kernels/generate_kernels.py; accumulators: ``workspace_size`` of
        mem_eff_attention/kernel_backward.h; splits of the keys: attention_backward.cu, all in native/transformers/cuda.
        Taken for granted: 128 x 128 blocks fit the shared memory of 8.0, 9.0 and 10.x alone; below 8.0 blocks are of
        64 x 64, which take the most scratch.
        """
        query, key, value = args[1:4]
        batch, heads, rows, width = query.shape
        columns, rows_of_sums = key.shape[-2], int(4 * batch * heads * rows)
        is_half, is_large = query.dtype in _HALVES, self.capability in {80, 90, 100, 103}
        has_96 = self.capability >= 80 and not args[9]
        in_registers = width <= 64 or (width <= 128 and is_large) or (width <= 96 and has_96)
        block_rows = 128 if width > 64 and (is_large or in_registers) else 64
        block_columns = 128 if is_half and 64 < width <= 128 and is_large else 64
        splits = -(-columns // block_columns)
        if batch * heads >= 256 and columns <= 2 * block_columns:
            splits = 1
        keys_and_values = 0
        if is_half and not in_registers:
            splits = min(splits, 200 // (batch * heads))
            up = (-(-size // block_rows) * block_rows for size in (width, value.shape[-1]))
            keys_and_values = max(splits, 1) * block_columns * sum(up)
        blocks = -(-rows // block_rows) * -(-width // block_columns)
        queries = blocks * (block_rows * block_columns + 4)
        # In fp32 torch sums the rows by way of a product, which is smaller and gone by then.
        accumulators: int = 4 * batch * heads * -(-(keys_and_values + queries) // 4) * 4
        return rows_of_sums + accumulators


def choose_attention(ledger: VirtualLedger) -> Callable[..., Tensor]:
    """Return the attention that a card would choose, for traced tensors, which have no place."""
    chooser = _AttentionChoice(ledger)
    return lambda *args, **kwargs: chooser.attend_on(_Attention(*args, **kwargs), is_on_card=True)


def _flash(call: _Attention) -> Tensor:
    query, key, value = call[:3]
    width = query.shape[-1]
    scale = width**-0.5 if call.scale is None else call.scale
    if width % 8:
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out: Tensor = _ATEN._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _bias(call: _Attention) -> Tensor | None:
    """Return the mask as what is added to the scores."""
    mask = call.attn_mask
    return torch.full_like(mask, 0.0, dtype=call.query.dtype) if mask is not None and mask.dtype is torch.bool else mask


def _efficient(call: _Attention) -> Tensor:
    (query, key, value), mask = call[:3], _bias(call)
    if mask is not None:
        columns = mask.shape[-1]
        if columns % 8:  # rows must be aligned: pad_bias of native/transformers/attention.cpp
            mask = torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    out: Tensor = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, mask, call.needs_grad, call.dropout_p, call.is_causal, scale=call.scale
    )[0]
    return out


def _cudnn(call: _Attention) -> Tensor:
    out: Tensor = _ATEN._scaled_dot_product_cudnn_attention(
        *call[:3], _bias(call), call.needs_grad, call.dropout_p, call.is_causal, False, scale=call.scale
    )[0]
    return out


def _flash_backward(args: Any) -> int:
    """Return the scratch of flash attention's backward pass (flash_attn/flash_api.cpp, ``mha_bwd``).

    fp32: sums for the gradient of the queries, lengths rounded to 128 and widths to 32 (64 above 128), and a row sum;
    for grouped heads also gradients of keys and values for every query head, in the operands' type.
    """
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    columns, key_heads = key.shape[2], key.shape[1]
    rows_up, width_up = -(-rows // 128) * 128, -(-width // 32) * 32
    if width > 128:
        width_up = -(-width // 64) * 64
    accumulated: int = 4 * batch * rows_up * heads * width_up + 4 * batch * heads * rows_up
    expanded: int = 2 * batch * columns * heads * width * query.element_size() if heads != key_heads else 0
    return accumulated + expanded


register_scratch(_ATEN._scaled_dot_product_flash_attention_backward.default, _flash_backward)

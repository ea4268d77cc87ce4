"""Times of single kernels on a card, by class and size: the data that a model of step time is made of.

Each row is one call at one shape. Calls are queued behind a kernel that spins, so that launches do not count, and are
repeated on the same tensors: operands smaller than the card's L2 cache are found there. Rows of class ``launch`` are
the opposite: the seconds that the program takes to issue a call.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product, zip_longest
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridtrain.units import KIB, MIB
from hybridvalidation.experiments.card_session.record import KernelTime

Call: TypeAlias = Callable[[], object]
Shape: TypeAlias = tuple[int, ...]

_SAMPLE_S = 2e-3
"""Seconds of one sample: as many calls as fit."""
_MOST_CALLS = 50
_SAMPLES = 5
_CYCLES_PER_S = 2.0e9
_MOST_SPIN_S = 20e-3
_TOKENS = 16_384
"""Tokens of the attention and normalization rows."""
_MOST_PRODUCTS = 2**41
"""Multiplications of a matrix product, above which one takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A call to time. ``setup`` allocates, and returns the call."""

    kind: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    setup: Callable[[], Call]
    flops: int = 0
    num_bytes: int = 0


def measure_curves(
    rows: Sequence[Row], device: torch.device, *, end_s: float, on_row: Callable[[KernelTime], None]
) -> str:
    """Time rows in order until ``end_s`` of ``time.monotonic``; return why some were not timed, empty: all were."""
    for place, row in enumerate(rows):
        if time.monotonic() > end_s:
            return f"{len(rows) - place} of {len(rows)} rows were not timed: no time left"
        found = time_row(row, device)
        on_row(found)
        if found.fault and not _answers(device):
            return f"the card stopped answering after {row.kind} {row.op} {row.shape}: {found.fault}"
    return ""


def time_row(row: Row, device: torch.device) -> KernelTime:
    """Return the time of one row; a call that fails is a row with its fault."""
    fault, samples, extra_bytes = "", [0.0], 0
    try:
        extra_bytes, samples = _samples(row, device)
    except Exception as error:  # noqa: BLE001  what a kernel refuses is its figure
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a card that failed: see _answers
            torch.cuda.empty_cache()
    return KernelTime(
        kind=row.kind, op=row.op, shape=row.shape, dtype=str(row.dtype).removeprefix("torch."), flops=row.flops,
        num_bytes=row.num_bytes, seconds=median(samples), spread=max(samples) / max(min(samples), 1e-12),
        extra_bytes=extra_bytes, fault=fault,
    )  # fmt: skip


def _samples(row: Row, device: torch.device) -> tuple[int, list[float]]:
    run = row.setup()
    run()
    return _extra_bytes(run, device), _issue_times(run, device) if row.kind == "launch" else _device_times(run, device)


def _answers(device: torch.device) -> bool:
    """Return whether the card's context still works; an access out of bounds breaks it."""
    try:
        _wait(device)
    except RuntimeError:
        return False
    return True


def _extra_bytes(run: Call, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _issue_times(run: Call, device: torch.device) -> list[float]:
    """Return the seconds that the program takes to issue one call, the card's queue being short."""
    samples, calls = [], 200 if device.type == "cuda" else 2
    for _ in range(_SAMPLES):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        samples.append((time.perf_counter() - begin) / calls)
    return samples


def _device_times(run: Call, device: torch.device) -> list[float]:
    """Return the seconds of one call in each sample."""
    _wait(device)
    begin = time.perf_counter()
    run()
    issue_s = time.perf_counter() - begin
    _wait(device)
    once_s = max(time.perf_counter() - begin, 1e-7)
    calls = max(1, min(_MOST_CALLS, int(_SAMPLE_S / once_s)))
    if device.type != "cuda":
        return [once_s]
    samples = []
    for _ in range(_SAMPLES):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        spin_s = min(_MOST_SPIN_S, 1.5 * calls * issue_s)
        torch.cuda._sleep(int(spin_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(calls):
            run()
        last.record()
        last.synchronize()
        samples.append(float(first.elapsed_time(last)) * 1e-3 / calls)
    return samples


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_rows(device: torch.device) -> list[Row]:
    """Return every row, the classes in turn; on a processor a few small ones, to rehearse."""
    small = device.type != "cuda"
    makers: tuple[Callable[..., Iterator[Row]], ...] = (
        _gemms, _attention, _normalization, _losses, _elementwise, _optimizers, _gathers, _launches, _copies,
        _quantized, _convolutions,
    )  # fmt: skip
    turns: Iterable[tuple[Row | None, ...]] = zip_longest(*(make(device, small=small) for make in makers))
    return [row for turn in turns for row in turn if row is not None]


_WEIGHTS = (
    (768, 768), (768, 3072), (768, 50257), (2048, 2048), (2048, 8192), (2048, 128256), (4096, 1024), (4096, 4096),
    (4096, 14336), (14336, 4096), (8192, 28672),
)  # fmt: skip
"""Inner and outer dimensions of layers: GPT-2, Llama 1B, 8B, 70B."""


def _gemms(device: torch.device, *, small: bool) -> Iterator[Row]:
    weights = ((64, 128),) if small else _WEIGHTS
    for tokens, (inner, outer) in product((64,) if small else (2048, 16_384, 512, 16), weights):
        if tokens * inner * outer <= _MOST_PRODUCTS:
            for layout in ("nt", "nn", "tn"):
                yield _gemm(f"mm_{layout}", (tokens, inner, outer), torch.bfloat16, partial(_mm, device, layout))
    for shape in ((64, 64, 128),) if small else ((2048, 768, 3072), (8192, 4096, 4096), (8192, 4096, 14336)):
        yield _gemm("mm_nt", shape, torch.float16, partial(_mm, device, "nt"))
        yield _gemm("mm_nt", shape, torch.float32, partial(_mm, device, "nt"))
        yield _gemm("mm_nt_tf32", shape, torch.float32, partial(_tf32, device))
        yield _gemm("scaled_mm_fp8_tensorwise", shape, torch.float8_e4m3fn, partial(_scaled, device, by_row=False))
        yield _gemm("scaled_mm_fp8_rowwise", shape, torch.float8_e4m3fn, partial(_scaled, device, by_row=True))
        yield _gemm("int_mm", shape, torch.int8, partial(_int8, device))
    for count, length, width in ((2, 16, 16),) if small else ((192, 1024, 64), (64, 2048, 128)):
        yield Row(
            kind="gemm", op="bmm", shape=(count, length, width, length), dtype=torch.bfloat16,
            flops=2 * count * length * length * width, num_bytes=2 * count * (2 * length * width + length * length),
            setup=partial(_bmm, device, (count, length, width)),
        )  # fmt: skip


def _gemm(op: str, shape: Shape, dtype: torch.dtype, setup: Callable[[Shape, torch.dtype], Call]) -> Row:
    tokens, inner, outer = shape
    result_bytes = {torch.float8_e4m3fn: 2, torch.int8: 4}.get(dtype, dtype.itemsize)
    return Row(
        kind="gemm", op=op, shape=shape, dtype=dtype, flops=2 * tokens * inner * outer,
        num_bytes=dtype.itemsize * (tokens * inner + inner * outer) + result_bytes * tokens * outer,
        setup=partial(setup, shape, dtype),
    )  # fmt: skip


def _mm(device: torch.device, layout: str, shape: Shape, dtype: torch.dtype) -> Call:
    """Return a product as a linear layer makes it: forward (nt), input's gradient (nn), weight's gradient (tn)."""
    tokens, inner, outer = shape
    inputs, weight = _normal(device, (tokens, inner), dtype), _normal(device, (outer, inner), dtype)
    if layout == "nt":
        return lambda: torch.mm(inputs, weight.t())
    grad = _normal(device, (tokens, outer), dtype)
    return (lambda: torch.mm(grad, weight)) if layout == "nn" else (lambda: torch.mm(grad.t(), inputs))


def _tf32(device: torch.device, shape: Shape, dtype: torch.dtype) -> Call:
    plain = _mm(device, "nt", shape, dtype)

    def run() -> object:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return plain()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return run


def _scaled(device: torch.device, shape: Shape, dtype: torch.dtype, *, by_row: bool) -> Call:
    tokens, inner, outer = shape
    left, right = _normal(device, (tokens, inner)).to(dtype), _normal(device, (outer, inner)).to(dtype).t()
    scale_a = torch.ones((tokens, 1) if by_row else (), device=device)
    scale_b = torch.ones((1, outer) if by_row else (), device=device)
    return lambda: torch._scaled_mm(
        left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _int8(device: torch.device, shape: Shape, dtype: torch.dtype) -> Call:
    tokens, inner, outer = shape
    left = torch.randint(-127, 128, (tokens, inner), dtype=dtype, device=device)
    right = torch.randint(-127, 128, (outer, inner), dtype=dtype, device=device).t()
    return lambda: torch._int_mm(left, right)


def _bmm(device: torch.device, shape: Shape) -> Call:
    left, right = (_normal(device, shape) for _ in range(2))
    return lambda: torch.bmm(left, right.transpose(1, 2))


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


def _attention(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield ``scaled_dot_product_attention`` at a constant number of tokens; shape: batch, heads, length, head size."""
    backends, tokens, width = (_BACKENDS, _TOKENS, 2048) if not small else ({"math": SDPBackend.MATH}, 64, 32)
    lengths, sizes = ((1024, 4096, 512, 16_384), (128, 64)) if not small else ((32,), (16,))
    for length, head_dim, (name, backend) in product(lengths, sizes, backends.items()):
        if name == "math" and length > 4096:
            continue
        for causal, backward in product((True,) if head_dim == 128 else (True, False), (False, True)):
            shape = (tokens // length, width // head_dim, length, head_dim)
            yield _attention_row(device, name, backend, shape, causal=causal, backward=backward)
    for head_dim, name, backward in product(() if small else (80, 96, 256), ("flash", "efficient"), (False, True)):
        shape = (_TOKENS // 2048, 2048 // head_dim, 2048, head_dim)
        yield _attention_row(device, name, _BACKENDS[name], shape, causal=True, backward=backward)


def _attention_row(
    device: torch.device, name: str, backend: SDPBackend, shape: Shape, *, causal: bool, backward: bool
) -> Row:
    batch, heads, length, head_dim = shape

    def setup() -> Call:
        query, key, value = (_normal(device, shape).requires_grad_(backward) for _ in range(3))

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        if not backward:
            return forward
        out, grad = forward(), _normal(device, shape)
        return lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)

    products = (5 if backward else 2) * 2 * batch * heads * length * length * head_dim
    return Row(
        kind="attention", op=f"{name}{'_causal' if causal else ''}{'_backward' if backward else ''}", shape=shape,
        dtype=torch.bfloat16, flops=products // 2 if causal else products,
        num_bytes=(8 if backward else 4) * 2 * batch * heads * length * head_dim, setup=setup,
    )  # fmt: skip


def _pass(function: Callable[..., Tensor], make: Callable[[], Sequence[Tensor]], *, backward: bool) -> Call:
    """Return the forward pass alone, or the backward pass alone, of tensors that all need gradients."""
    args = [arg.requires_grad_() for arg in make()]
    if not backward:
        return lambda: function(*args)
    out = function(*args)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, args, grad, retain_graph=True)


def _llama_norm(values: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as transformers writes it."""
    wide = values.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(values.dtype)


def _normalization(device: torch.device, *, small: bool) -> Iterator[Row]:
    ops: dict[str, Callable[..., Tensor]] = {
        "layer_norm": lambda values, weight: F.layer_norm(values, values.shape[-1:], weight),
        "rms_norm": lambda values, weight: F.rms_norm(values, values.shape[-1:], weight),
        "rms_norm_composed": _llama_norm,
        "softmax": lambda values: F.softmax(values, -1),
    }
    for width, dtype, (op, function), backward in product(
        (64,) if small else (768, 4096, 16_384), (torch.bfloat16, torch.float32), ops.items(), (False, True)
    ):
        tokens = 16 if small else _TOKENS * 4096 // max(4096, width)
        shapes = ((tokens, width),) if op == "softmax" else ((tokens, width), (width,))
        make = partial(_tensors, device, shapes, dtype)
        yield Row(
            kind="normalization", op=f"{op}{'_backward' if backward else ''}", shape=(tokens, width), dtype=dtype,
            num_bytes=(3 if backward else 2) * tokens * width * dtype.itemsize,
            setup=partial(_pass, function, make, backward=backward),
        )  # fmt: skip


def _losses(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield losses; shape: tokens, vocabulary."""
    shapes = product((16,) if small else (2048, 8192), (100,) if small else (32_000, 128_256))
    for shape, dtype, op, backward in product(
        shapes, (torch.float32, torch.bfloat16), ("cross_entropy", "log_softmax"), (False, True)
    ):
        yield Row(
            kind="loss", op=f"{op}{'_backward' if backward else ''}", shape=shape, dtype=dtype,
            num_bytes=2 * shape[0] * shape[1] * dtype.itemsize,
            setup=partial(_loss, device, op, shape, dtype, backward=backward),
        )  # fmt: skip


def _loss(device: torch.device, op: str, shape: Shape, dtype: torch.dtype, *, backward: bool) -> Call:
    targets = torch.randint(0, shape[1], shape[:1], device=device)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "cross_entropy": lambda values: F.cross_entropy(values, targets),
        "log_softmax": lambda values: F.log_softmax(values, -1),
    }
    return _pass(functions[op], partial(_tensors, device, (shape,), dtype), backward=backward)


_ELEMENTWISE: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "copy": (2, lambda a, _b, out: out.copy_(a)),
    "add": (3, lambda a, b, out: torch.add(a, b, out=out)),
    "mul": (3, lambda a, b, out: torch.mul(a, b, out=out)),
    "gelu": (2, lambda a, _b, _out: F.gelu(a)),
    "gelu_tanh": (2, lambda a, _b, _out: F.gelu(a, approximate="tanh")),
    "silu": (2, lambda a, _b, _out: F.silu(a)),
    "dropout": (2, lambda a, _b, _out: F.dropout(a, 0.1)),
    "zero": (1, lambda _a, _b, out: out.zero_()),
    "sum": (1, lambda a, _b, _out: a.sum()),
    "norm": (1, lambda a, _b, _out: torch.linalg.vector_norm(a)),
    "to_float32": (3, lambda a, _b, _out: a.to(torch.float32)),
    "transpose": (2, lambda a, _b, _out: a.view(-1, 64).t().contiguous()),
}
"""Number of tensors read and written, and the call."""


def _elementwise(device: torch.device, *, small: bool) -> Iterator[Row]:
    sizes = (64 * KIB,) if small else (16 * MIB, 256 * MIB, MIB, 64 * KIB)
    for size, dtype, (op, (tensors, function)) in product(sizes, (torch.bfloat16, torch.float32), _ELEMENTWISE.items()):
        if op == "to_float32" and dtype is torch.float32:
            continue
        shape = (size // dtype.itemsize,)
        yield Row(
            kind="elementwise", op=op, shape=shape, dtype=dtype, num_bytes=tensors * size,
            setup=partial(_with_tensors, function, partial(_tensors, device, (shape,) * 3, dtype)),
        )  # fmt: skip


def _with_tensors(function: Callable[..., object], make: Callable[[], Sequence[Tensor]]) -> Call:
    return partial(function, *make())


def _optimizers(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield optimizer steps; shape: number of tensors, elements of each."""
    for shape in ((4, 256),) if small else ((148, 842_000), (16, 16 * 2**20), (292, 65_536), (1000, 4096)):
        for op, dtype in (
            *product(("adamw_foreach", "adamw_fused"), (torch.float32, torch.bfloat16)),
            ("clip_grad_norm", torch.float32),
        ):
            yield Row(
                kind="optimizer", op=op, shape=shape, dtype=dtype,
                num_bytes=(3 if op == "clip_grad_norm" else 7) * shape[0] * shape[1] * dtype.itemsize,
                setup=partial(_optimizer, device, op, shape, dtype),
            )  # fmt: skip


def _optimizer(device: torch.device, op: str, shape: Shape, dtype: torch.dtype) -> Call:
    parameters = [nn.Parameter(_normal(device, shape[1:], dtype)) for _ in range(shape[0])]
    for parameter in parameters:
        parameter.grad = _normal(device, shape[1:], dtype)
    if op == "clip_grad_norm":
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
    return torch.optim.AdamW(parameters, lr=1e-5, fused="fused" in op, foreach="foreach" in op).step


def _gathers(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield embeddings; shape: tokens, vocabulary, width."""
    shapes = ((16, 100, 64),) if small else ((8192, 50_257, 768), (16_384, 32_000, 4096), (16_384, 128_256, 2048))
    ops = ("embedding", "embedding_backward", "index_select", "index_add", "scatter_add")
    for shape, dtype, op in product(shapes, (torch.bfloat16, torch.float32), ops):
        yield Row(
            kind="gather", op=op, shape=shape, dtype=dtype, num_bytes=2 * shape[0] * shape[2] * dtype.itemsize,
            setup=partial(_gather, device, op, shape, dtype),
        )  # fmt: skip


def _gather(device: torch.device, op: str, shape: Shape, dtype: torch.dtype) -> Call:
    tokens, vocab, width = shape
    table, rows = _normal(device, (vocab, width), dtype), torch.randint(0, vocab, (tokens,), device=device)
    values = _normal(device, (tokens, width), dtype)
    if op == "embedding_backward":
        return _pass(partial(F.embedding, rows), lambda: [table], backward=True)
    calls: dict[str, Call] = {
        "embedding": lambda: F.embedding(rows, table),
        "index_select": lambda: table.index_select(0, rows),
        "index_add": lambda: table.index_add_(0, rows, values),
        "scatter_add": lambda: table.scatter_add_(0, rows[:, None].expand(-1, width), values),
    }
    return calls[op]


def _launches(device: torch.device, *, small: bool) -> Iterator[Row]:  # noqa: ARG001  a launch has one size
    """Yield calls whose time is Python's and the launch's own."""
    functions: dict[str, Callable[..., object]] = {
        "add_in_place": lambda values, _layer: values.add_(1),
        "add": lambda values, _layer: values + values,
        "view": lambda values, _layer: values.view(64, 16),
        "matmul": lambda values, _layer: values @ values.t(),
        "linear": lambda values, layer: layer(values),
        "linear_sum_backward": lambda values, layer: layer(values).sum().backward(),
        "linear_autocast": lambda values, layer: _under_autocast(layer, values),
        "attention": lambda values, _layer: F.scaled_dot_product_attention(
            values.view(1, 2, 16, 32), values.view(1, 2, 16, 32), values.view(1, 2, 16, 32), is_causal=True
        ),
    }
    for op, function in functions.items():
        yield Row(
            kind="launch", op=op, shape=(16, 64), dtype=torch.bfloat16, setup=partial(_launch, device, op, function)
        )


def _launch(device: torch.device, op: str, function: Callable[..., object]) -> Call:
    layer = nn.Linear(64, 64, device=device, dtype=torch.float32 if "autocast" in op else torch.bfloat16)
    return partial(function, _normal(device, (16, 64), layer.weight.dtype), layer)


def _under_autocast(layer: nn.Module, values: Tensor) -> object:
    with torch.autocast(values.device.type, torch.bfloat16):
        return layer(values)


def _copies(device: torch.device, *, small: bool) -> Iterator[Row]:
    ops = ("to_device", "to_host", "to_device_pageable", "to_host_pageable")
    for size, op in product((64 * KIB,) if small else (16 * MIB, 256 * MIB, MIB, 64 * KIB), ops):
        yield Row(
            kind="copy", op=op, shape=(size,), dtype=torch.uint8, num_bytes=size,
            setup=partial(_copy, device, op, size),
        )  # fmt: skip


def _copy(device: torch.device, op: str, size: int) -> Call:
    pinned = device.type == "cuda" and "pageable" not in op
    host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
    card = torch.ones(size, dtype=torch.uint8, device=device)
    target, source = (card, host) if op.startswith("to_device") else (host, card)
    return lambda: target.copy_(source, non_blocking=True)


def _quantized(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield bitsandbytes' kernels; without it rows that say so."""
    shapes = ((64, 64),) if small else ((4096, 4096), (14_336, 4096), (128_256, 4096))
    for shape, op in product(shapes, ("quantize_nf4", "dequantize_nf4", "int8_vectorwise_quant", "adam8bit")):
        yield Row(
            kind="quantized", op=op, shape=shape, dtype=torch.bfloat16,
            num_bytes=_QUANTIZED_BYTES[op] * shape[0] * shape[1] // 2, setup=partial(_quantizer, device, op, shape),
        )  # fmt: skip


_QUANTIZED_BYTES = {"quantize_nf4": 5, "dequantize_nf4": 5, "int8_vectorwise_quant": 6, "adam8bit": 20}
"""Half bytes read and written for an element: bfloat16 values, codes; of Adam8bit also gradients and both states."""


def _quantizer(device: torch.device, op: str, shape: Shape) -> Call:
    import bitsandbytes  # noqa: PLC0415  optional
    from bitsandbytes import functional as bnb  # noqa: PLC0415

    values = _normal(device, shape)
    if op == "adam8bit":
        parameter = nn.Parameter(values)
        parameter.grad = _normal(device, shape)
        return bitsandbytes.optim.Adam8bit([parameter], lr=1e-5).step  # type: ignore[no-any-return]
    packed, state = bnb.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    halves = values.to(torch.float16)
    calls: dict[str, Call] = {
        "quantize_nf4": lambda: bnb.quantize_4bit(values, quant_type="nf4"),
        "dequantize_nf4": lambda: bnb.dequantize_4bit(packed, state),
        "int8_vectorwise_quant": lambda: bnb.int8_vectorwise_quant(halves),
    }
    return calls[op]


_CONVOLUTIONS = (
    (64, 64, 64, 56, 3, 1), (64, 256, 128, 56, 1, 1), (64, 512, 512, 7, 3, 1), (64, 3, 64, 224, 7, 2),
    (64, 1024, 2048, 14, 1, 2), (8, 320, 320, 64, 3, 1), (8, 1280, 1280, 16, 3, 1), (4, 128, 128, 512, 3, 1),
)  # fmt: skip


def _convolutions(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield convolutions of ResNet-50 and a U-Net; shape: batch, in, out, size, kernel, stride."""
    for shape, dtype, memory_format, backward in product(
        ((1, 4, 4, 8, 3, 1),) if small else _CONVOLUTIONS, (torch.float32, torch.bfloat16),
        (torch.contiguous_format, torch.channels_last), (False, True),
    ):  # fmt: skip
        batch, inputs, outputs, size, kernel, stride = shape
        out = -(-size // stride)
        make = partial(_tensors, device, ((batch, inputs, size, size), (outputs, inputs, kernel, kernel)), dtype)
        yield Row(
            kind="convolution",
            op=f"conv2d{'_channels_last' if memory_format is torch.channels_last else ''}"
            f"{'_backward' if backward else ''}",
            shape=shape, dtype=dtype,
            flops=(2 if backward else 1) * 2 * batch * out * out * outputs * inputs * kernel * kernel,
            num_bytes=dtype.itemsize * batch * (inputs * size * size + outputs * out * out),
            setup=partial(
                _pass, partial(F.conv2d, stride=stride, padding=kernel // 2), partial(make, memory_format),
                backward=backward,
            ),
        )  # fmt: skip


def _tensors(
    device: torch.device, shapes: Sequence[Shape], dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:  # fmt: skip
    return [_normal(device, shape, dtype).to(memory_format=memory_format) for shape in shapes]


def _normal(device: torch.device, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)

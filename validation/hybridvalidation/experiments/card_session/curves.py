"""Times of single kernels on a card, by class and size: the data that a model of step time is made of.

Each row is one call at one shape. Calls are queued behind a kernel that spins, so that launches do not count, and are
repeated on the same tensors: operands smaller than the card's L2 cache are found there. Rows of class ``launch`` are the
opposite: the seconds that the program takes to issue a call.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridtrain.units import KIB, MIB

_SAMPLE_S = 2e-3
"""Seconds of one sample: as many calls as fit."""
_MOST_CALLS = 50
_SAMPLES = 5
_CYCLES_PER_S = 2.0e9
_MOST_SPIN_S = 20e-3
_TOKENS = 16_384
"""Tokens of the attention and normalization rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Time of one call of an op at one shape."""

    kind: str
    """Class of kernel: ``gemm``, ``attention``, ``normalization``, ..."""
    op: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    """Median of the samples."""
    spread: float
    """Largest sample over the smallest one."""
    flops: int = 0
    """Least arithmetic (arithmetic, not counted)."""
    num_bytes: int = 0
    """Least traffic: operands read once, results written once."""
    extra_bytes: int = 0
    """Peak of allocated memory above what was held before the call."""
    fault: str = ""
    """Why the op did not run; empty: it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A call to time. ``setup`` allocates, and returns the call."""

    kind: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    setup: Callable[[], Callable[[], object]]
    flops: int = 0
    num_bytes: int = 0

    @property
    def name(self) -> str:
        """Name, for a log."""
        return f"{self.kind} {self.op} {self.shape} {self.dtype}"


def measure_curves(device: torch.device, *, limit_s: float, say: Callable[[str], None]) -> list[KernelTime]:
    """Time all rows, in an order in which the most telling come first, until ``limit_s``."""
    end, times = time.monotonic() + limit_s, list[KernelTime]()
    rows = list(all_rows(device))
    for place, row in enumerate(rows):
        if time.monotonic() > end:
            say(f"{len(rows) - place} of {len(rows)} rows were not timed: no time left")
            break
        times.append(time_row(row, device))
    return times


def time_row(row: Row, device: torch.device) -> KernelTime:
    """Return the time of one row; a call that fails is a row with its fault."""
    made: dict[str, Any] = {
        "kind": row.kind, "op": row.op, "shape": row.shape, "dtype": str(row.dtype).removeprefix("torch."),
        "flops": row.flops, "num_bytes": row.num_bytes,
    }  # fmt: skip
    try:
        run = row.setup()
        run()
        extra_bytes = _extra_bytes(run, device)
        samples = _issue_times(run, device) if row.kind == "launch" else _device_times(run, device)
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
        return KernelTime(**made, seconds=0.0, spread=0.0, fault=" ".join(f"{error}".split())[:160])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return KernelTime(
        **made, seconds=median(samples), spread=max(samples) / max(min(samples), 1e-12), extra_bytes=extra_bytes
    )  # fmt: skip


def _extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _issue_times(run: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds that the program takes to issue one call, the card's queue being short."""
    samples = []
    for _ in range(_SAMPLES):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(200):
            run()
        samples.append((time.perf_counter() - begin) / 200)
    return samples


def _device_times(run: Callable[[], object], device: torch.device) -> list[float]:
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


def all_rows(device: torch.device) -> Iterator[Row]:
    """Yield every row; on a processor a few small ones, to rehearse."""
    small = device.type != "cuda"
    yield from _gemms(device, small=small)
    yield from _attention(device, small=small)
    yield from _normalization(device, small=small)
    yield from _losses(device, small=small)
    yield from _elementwise(device, small=small)
    yield from _optimizers(device, small=small)
    yield from _gathers(device, small=small)
    yield from _launches(device)
    yield from _copies(device, small=small)
    yield from _quantized(device, small=small)
    yield from _convolutions(device, small=small)


_WEIGHTS = (
    (768, 768), (768, 2304), (768, 3072), (768, 50257), (2048, 2048), (2048, 8192), (2048, 128256),
    (4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (5120, 5120), (8192, 28672),
)  # fmt: skip
"""Inner and outer dimensions of layers: GPT-2, Llama 1B, 8B, 13B, 70B."""


def _gemms(device: torch.device, *, small: bool) -> Iterator[Row]:
    weights = ((64, 128),) if small else _WEIGHTS
    for tokens in (64,) if small else (2048, 16_384, 512, 8192, 1, 16, 128):
        for inner, outer in weights:
            if tokens * inner * outer > 16_384 * 4096 * 32_768:
                continue
            for layout in ("nt", "nn", "tn"):
                yield _gemm(device, tokens, inner, outer, layout, torch.bfloat16)
    sizes = ((64, 64, 128),) if small else ((2048, 768, 3072), (8192, 4096, 4096), (8192, 4096, 14336))
    for tokens, inner, outer in sizes:
        for dtype in (torch.float16, torch.float32):
            yield _gemm(device, tokens, inner, outer, "nt", dtype)
        yield _tf32(device, tokens, inner, outer)
        yield _scaled(device, tokens, inner, outer, "fp8_tensorwise")
        yield _scaled(device, tokens, inner, outer, "fp8_rowwise")
        yield _int8(device, tokens, inner, outer)
    for count, length, width in ((2, 16, 16),) if small else ((192, 1024, 64), (64, 2048, 128)):
        yield Row(
            kind="gemm", op="bmm", shape=(count, length, width, length), dtype=torch.bfloat16,
            flops=2 * count * length * length * width, num_bytes=2 * count * (2 * length * width + length * length),
            setup=_bmm(device, count, length, width),
        )  # fmt: skip


def _bmm(device: torch.device, count: int, length: int, width: int) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        left, right = (_normal(device, (count, length, width)) for _ in range(2))
        return lambda: torch.bmm(left, right.transpose(1, 2))

    return setup


def _gemm(device: torch.device, tokens: int, inner: int, outer: int, layout: str, dtype: torch.dtype) -> Row:
    """Return a product as a linear layer makes it: forward (nt), input's gradient (nn), weight's gradient (tn)."""

    def setup() -> Callable[[], object]:
        inputs, weight = _normal(device, (tokens, inner), dtype), _normal(device, (outer, inner), dtype)
        if layout == "nt":
            return lambda: torch.mm(inputs, weight.t())
        grad = _normal(device, (tokens, outer), dtype)
        return (lambda: torch.mm(grad, weight)) if layout == "nn" else (lambda: torch.mm(grad.t(), inputs))

    size = dtype.itemsize
    return Row(
        kind="gemm", op=f"mm_{layout}", shape=(tokens, inner, outer), dtype=dtype, flops=2 * tokens * inner * outer,
        num_bytes=size * (tokens * inner + inner * outer + tokens * outer), setup=setup,
    )  # fmt: skip


def _tf32(device: torch.device, tokens: int, inner: int, outer: int) -> Row:
    def setup() -> Callable[[], object]:
        inputs, weight = (_normal(device, shape, torch.float32) for shape in ((tokens, inner), (outer, inner)))

        def run() -> object:
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return torch.mm(inputs, weight.t())
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        return run

    return Row(
        kind="gemm", op="mm_nt_tf32", shape=(tokens, inner, outer), dtype=torch.float32,
        flops=2 * tokens * inner * outer, num_bytes=4 * (tokens * inner + inner * outer + tokens * outer), setup=setup,
    )  # fmt: skip


def _scaled(device: torch.device, tokens: int, inner: int, outer: int, scales: str) -> Row:
    def setup() -> Callable[[], object]:
        left = _normal(device, (tokens, inner)).to(torch.float8_e4m3fn)
        right = _normal(device, (outer, inner)).to(torch.float8_e4m3fn).t()
        row = scales == "fp8_rowwise"
        scale_a = torch.ones((tokens, 1) if row else (), device=device)
        scale_b = torch.ones((1, outer) if row else (), device=device)
        return lambda: torch._scaled_mm(
            left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Row(
        kind="gemm", op=f"scaled_mm_{scales}", shape=(tokens, inner, outer), dtype=torch.float8_e4m3fn,
        flops=2 * tokens * inner * outer, num_bytes=tokens * inner + inner * outer + 2 * tokens * outer, setup=setup,
    )  # fmt: skip


def _int8(device: torch.device, tokens: int, inner: int, outer: int) -> Row:
    def setup() -> Callable[[], object]:
        left = torch.randint(-127, 128, (tokens, inner), dtype=torch.int8, device=device)
        right = torch.randint(-127, 128, (outer, inner), dtype=torch.int8, device=device).t()
        return lambda: torch._int_mm(left, right)

    return Row(
        kind="gemm", op="int_mm", shape=(tokens, inner, outer), dtype=torch.int8, flops=2 * tokens * inner * outer,
        num_bytes=tokens * inner + inner * outer + 4 * tokens * outer, setup=setup,
    )  # fmt: skip


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


def _attention(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield ``scaled_dot_product_attention`` at a constant number of tokens; shape: batch, heads, length, head size."""
    backends = {"math": SDPBackend.MATH} if small else _BACKENDS
    tokens, lengths, sizes = (64, (32,), (16,)) if small else (_TOKENS, (1024, 4096, 512, 2048, 8192, 16_384), (128, 64))
    for name, backend in backends.items():
        for length in lengths:
            for head_dim in sizes:
                if name == "math" and length > 4096:
                    continue
                for causal in (True, False):
                    for backward in (False, True):
                        shape = (tokens // length, 2048 // head_dim if not small else 2, length, head_dim)
                        yield _attention_row(device, f"{name}", backend, shape, causal=causal, backward=backward)
    for head_dim in () if small else (80, 96, 256):
        for name in ("flash", "efficient"):
            for backward in (False, True):
                shape = (_TOKENS // 2048, 2048 // head_dim, 2048, head_dim)
                yield _attention_row(device, name, _BACKENDS[name], shape, causal=True, backward=backward)


def _attention_row(
    device: torch.device, name: str, backend: SDPBackend, shape: tuple[int, int, int, int], *, causal: bool,
    backward: bool,
) -> Row:  # fmt: skip
    batch, heads, length, head_dim = shape

    def setup() -> Callable[[], object]:
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


def _both(function: Callable[..., Tensor], args: Sequence[Tensor], *, backward: bool) -> Callable[[], object]:
    """Return the forward pass alone, or the backward pass alone."""
    leaves = [arg.requires_grad_() for arg in args if arg.is_floating_point()]
    if not backward:
        with torch.no_grad():
            function(*args)
        return lambda: function(*args)
    out = function(*args)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


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
        "softmax": lambda values, weight: F.softmax(values, -1),
    }
    for width in (64,) if small else (768, 2048, 4096, 8192, 16_384):
        tokens = 16 if small else _TOKENS * 4096 // max(4096, width)
        for op, function in ops.items():
            for dtype in (torch.bfloat16, torch.float32):
                for backward in (False, True):
                    yield Row(
                        kind="normalization", op=f"{op}{'_backward' if backward else ''}", shape=(tokens, width),
                        dtype=dtype, num_bytes=(3 if backward else 2) * tokens * width * dtype.itemsize,
                        setup=_norm_setup(device, tokens, width, dtype, function, op, backward=backward),
                    )  # fmt: skip


def _norm_setup(
    device: torch.device, tokens: int, width: int, dtype: torch.dtype, function: Callable[..., Tensor], op: str, *,
    backward: bool,
) -> Callable[[], Callable[[], object]]:  # fmt: skip
    def setup() -> Callable[[], object]:
        values, weight = _normal(device, (tokens, width), dtype), torch.ones(width, dtype=dtype, device=device)
        if op == "softmax":
            return _both(lambda v: function(v, weight), (values,), backward=backward)
        return _both(function, (values, weight), backward=backward)

    return setup


def _losses(device: torch.device, *, small: bool) -> Iterator[Row]:
    for vocab in (100,) if small else (32_000, 50_257, 128_256, 151_936):
        for tokens in (16,) if small else (2048, 8192):
            for dtype in (torch.float32, torch.bfloat16):
                for op in ("cross_entropy", "log_softmax", "softmax_wide"):
                    for backward in (False, True):
                        yield Row(
                            kind="loss", op=f"{op}{'_backward' if backward else ''}", shape=(tokens, vocab),
                            dtype=dtype, num_bytes=2 * tokens * vocab * dtype.itemsize,
                            setup=_loss_setup(device, tokens, vocab, dtype, op, backward=backward),
                        )  # fmt: skip


def _loss_setup(
    device: torch.device, tokens: int, vocab: int, dtype: torch.dtype, op: str, *, backward: bool
) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        logits = _normal(device, (tokens, vocab), dtype)
        targets = torch.randint(0, vocab, (tokens,), device=device)
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "cross_entropy": lambda values: F.cross_entropy(values, targets),
            "log_softmax": lambda values: F.log_softmax(values, -1),
            "softmax_wide": lambda values: F.softmax(values, -1),
        }
        return _both(functions[op], (logits,), backward=backward)

    return setup


def _elementwise(device: torch.device, *, small: bool) -> Iterator[Row]:
    ops: dict[str, tuple[int, Callable[..., object]]] = {  # tensors read and written
        "copy": (2, lambda a, b, out: out.copy_(a)),
        "add": (3, lambda a, b, out: torch.add(a, b, out=out)),
        "mul": (3, lambda a, b, out: torch.mul(a, b, out=out)),
        "gelu": (2, lambda a, b, out: F.gelu(a)),
        "gelu_tanh": (2, lambda a, b, out: F.gelu(a, approximate="tanh")),
        "silu": (2, lambda a, b, out: F.silu(a)),
        "dropout": (2, lambda a, b, out: F.dropout(a, 0.1)),
        "zero": (1, lambda a, b, out: out.zero_()),
        "sum": (1, lambda a, b, out: a.sum()),
        "norm": (1, lambda a, b, out: torch.linalg.vector_norm(a)),
        "to_float32": (3, lambda a, b, out: a.to(torch.float32)),
        "transpose": (2, lambda a, b, out: a.view(-1, 64).t().contiguous()),
    }
    sizes = (64 * KIB,) if small else (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
    for size in sizes:
        for dtype in (torch.bfloat16, torch.float32):
            for op, (tensors, function) in ops.items():
                if op == "to_float32" and dtype is torch.float32:
                    continue
                yield Row(
                    kind="elementwise", op=op, shape=(size // dtype.itemsize,), dtype=dtype, num_bytes=tensors * size,
                    setup=_elementwise_setup(device, size // dtype.itemsize, dtype, function),
                )  # fmt: skip


def _elementwise_setup(
    device: torch.device, count: int, dtype: torch.dtype, function: Callable[..., object]
) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        left, right = (_normal(device, (count,), dtype) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: function(left, right, out)

    return setup


def _optimizers(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield optimizer steps; shape: number of tensors, elements of each."""
    counts = ((4, 256),) if small else ((148, 842_000), (16, 16 * 2**20), (292, 65_536), (1000, 4096))
    for count, size in counts:
        for dtype in (torch.float32, torch.bfloat16):
            for op, options in (("adamw_foreach", {"foreach": True}), ("adamw_fused", {"fused": True})):
                yield Row(
                    kind="optimizer", op=op, shape=(count, size), dtype=dtype,
                    num_bytes=7 * count * size * dtype.itemsize,
                    setup=_optimizer_setup(device, count, size, dtype, options),
                )  # fmt: skip
        yield Row(
            kind="optimizer", op="clip_grad_norm", shape=(count, size), dtype=torch.float32,
            num_bytes=3 * count * size * 4, setup=_clip_setup(device, count, size),
        )  # fmt: skip


def _parameters(device: torch.device, count: int, size: int, dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = [nn.Parameter(_normal(device, (size,), dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = _normal(device, (size,), dtype)
    return parameters


def _optimizer_setup(
    device: torch.device, count: int, size: int, dtype: torch.dtype, options: dict[str, bool]
) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        optimizer = torch.optim.AdamW(_parameters(device, count, size, dtype), lr=1e-5, **options)
        return optimizer.step

    return setup


def _clip_setup(device: torch.device, count: int, size: int) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        parameters = _parameters(device, count, size, torch.float32)
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)

    return setup


def _gathers(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield embeddings; shape: tokens, vocabulary, width."""
    shapes = ((16, 100, 64),) if small else ((8192, 50_257, 768), (16_384, 32_000, 4096), (16_384, 128_256, 2048))
    for tokens, vocab, width in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            for op in ("embedding", "embedding_backward", "index_select", "index_add", "scatter_add"):
                yield Row(
                    kind="gather", op=op, shape=(tokens, vocab, width), dtype=dtype,
                    num_bytes=2 * tokens * width * dtype.itemsize,
                    setup=_gather_setup(device, op, (tokens, vocab, width), dtype),
                )  # fmt: skip


def _gather_setup(
    device: torch.device, op: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[], Callable[[], object]]:
    tokens, vocab, width = shape

    def setup() -> Callable[[], object]:
        table, rows = _normal(device, (vocab, width), dtype), torch.randint(0, vocab, (tokens,), device=device)
        values = _normal(device, (tokens, width), dtype)
        wide_rows = rows[:, None].expand(-1, width)
        if op == "embedding_backward":
            out = F.embedding(rows, table.requires_grad_())
            return lambda: torch.autograd.grad(out, table, values, retain_graph=True)
        calls: dict[str, Callable[[], object]] = {
            "embedding": lambda: F.embedding(rows, table),
            "index_select": lambda: table.index_select(0, rows),
            "index_add": lambda: table.index_add_(0, rows, values),
            "scatter_add": lambda: table.scatter_add_(0, wide_rows, values),
        }
        return calls[op]

    return setup


def _launches(device: torch.device) -> Iterator[Row]:
    """Yield calls whose time is Python's and the launch's own."""

    def row(op: str, setup: Callable[[], Callable[[], object]]) -> Row:
        return Row(kind="launch", op=op, shape=(16, 64), dtype=torch.bfloat16, setup=setup)

    def tensor() -> Tensor:
        return _normal(device, (16, 64))

    def inplace() -> Callable[[], object]:
        values = tensor()
        return lambda: values.add_(1)

    def outplace() -> Callable[[], object]:
        values = tensor()
        return lambda: values + values

    def view() -> Callable[[], object]:
        values = tensor()
        return lambda: values.view(64, 16)

    def matmul() -> Callable[[], object]:
        values = tensor()
        return lambda: values @ values.t()

    def module(*, grad: bool, autocast: bool = False) -> Callable[[], Callable[[], object]]:
        def setup() -> Callable[[], object]:
            layer = nn.Linear(64, 64, device=device, dtype=torch.float32 if autocast else torch.bfloat16)
            values = tensor().to(layer.weight.dtype)

            def forward() -> Tensor:
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    return layer(values)  # type: ignore[no-any-return]

            def forward_backward() -> None:
                forward().sum().backward()

            return forward_backward if grad else forward

        return setup

    def attention() -> Callable[[], object]:
        values = _normal(device, (1, 2, 16, 64))
        return lambda: F.scaled_dot_product_attention(values, values, values, is_causal=True)

    yield row("add_in_place", inplace)
    yield row("add", outplace)
    yield row("view", view)
    yield row("matmul", matmul)
    yield row("linear", module(grad=False))
    yield row("linear_autocast", module(grad=False, autocast=True))
    yield row("linear_sum_backward", module(grad=True))
    yield row("attention", attention)


def _copies(device: torch.device, *, small: bool) -> Iterator[Row]:
    for size in (64 * KIB,) if small else (64 * KIB, MIB, 16 * MIB, 256 * MIB):
        for op in ("to_device", "to_host", "to_device_pageable", "to_host_pageable"):
            yield Row(
                kind="copy", op=op, shape=(size,), dtype=torch.uint8, num_bytes=size,
                setup=_copy_setup(device, op, size),
            )  # fmt: skip


def _copy_setup(device: torch.device, op: str, size: int) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        pinned = device.type == "cuda" and "pageable" not in op
        host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        card = torch.ones(size, dtype=torch.uint8, device=device)
        if op.startswith("to_device"):
            return lambda: card.copy_(host, non_blocking=True)
        return lambda: host.copy_(card, non_blocking=True)

    return setup


def _quantized(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield bitsandbytes' kernels, where it is installed."""
    for rows, width in ((64, 64),) if small else ((4096, 4096), (14_336, 4096), (128_256, 4096)):
        for op in ("quantize_nf4", "dequantize_nf4", "int8_vectorwise_quant", "adam8bit"):
            yield Row(
                kind="quantized", op=op, shape=(rows, width), dtype=torch.bfloat16,
                num_bytes=rows * width * 5 // 2, setup=_quantized_setup(device, op, rows, width),
            )  # fmt: skip


def _quantized_setup(device: torch.device, op: str, rows: int, width: int) -> Callable[[], Callable[[], object]]:
    def setup() -> Callable[[], object]:
        import bitsandbytes  # noqa: PLC0415  optional
        from bitsandbytes import functional as bnb  # noqa: PLC0415

        values = _normal(device, (rows, width))
        if op == "adam8bit":
            parameter = nn.Parameter(values)
            parameter.grad = _normal(device, (rows, width))
            return bitsandbytes.optim.Adam8bit([parameter], lr=1e-5).step  # type: ignore[no-any-return]
        packed, state = bnb.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
        calls: dict[str, Callable[[], object]] = {
            "quantize_nf4": lambda: bnb.quantize_4bit(values, quant_type="nf4"),
            "dequantize_nf4": lambda: bnb.dequantize_4bit(packed, state),
            "int8_vectorwise_quant": lambda: bnb.int8_vectorwise_quant(values.to(torch.float16)),
        }
        return calls[op]

    return setup


def _convolutions(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Yield convolutions of ResNet-50 and a U-Net; shape: batch, in, out, size, kernel, stride."""
    shapes = ((1, 4, 4, 8, 3, 1),) if small else (
        (64, 3, 64, 224, 7, 2), (64, 64, 64, 56, 1, 1), (64, 64, 64, 56, 3, 1), (64, 256, 128, 56, 1, 1),
        (64, 128, 128, 28, 3, 1), (64, 256, 256, 14, 3, 1), (64, 512, 512, 7, 3, 1), (64, 1024, 2048, 14, 1, 2),
        (8, 320, 320, 64, 3, 1), (8, 1280, 1280, 16, 3, 1), (4, 128, 128, 512, 3, 1),
    )  # fmt: skip
    for shape in shapes:
        batch, inputs, outputs, size, kernel, stride = shape
        out = -(-size // stride)
        for dtype in (torch.float32, torch.bfloat16):
            for memory_format in (torch.contiguous_format, torch.channels_last):
                for backward in (False, True):
                    yield Row(
                        kind="convolution",
                        op=f"conv2d{'_channels_last' if memory_format is torch.channels_last else ''}"
                        f"{'_backward' if backward else ''}",
                        shape=shape, dtype=dtype,
                        flops=(2 if backward else 1) * 2 * batch * out * out * outputs * inputs * kernel * kernel,
                        num_bytes=dtype.itemsize * batch * (inputs * size * size + outputs * out * out),
                        setup=_convolution_setup(device, shape, dtype, memory_format, backward=backward),
                    )  # fmt: skip


def _convolution_setup(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format, *,
    backward: bool,
) -> Callable[[], Callable[[], object]]:  # fmt: skip
    batch, inputs, outputs, size, kernel, stride = shape

    def setup() -> Callable[[], object]:
        values = _normal(device, (batch, inputs, size, size), dtype).to(memory_format=memory_format)
        weight = _normal(device, (outputs, inputs, kernel, kernel), dtype).to(memory_format=memory_format)
        return _both(
            lambda v, w: F.conv2d(v, w, stride=stride, padding=kernel // 2), (values, weight), backward=backward
        )

    return setup


def _normal(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def main() -> None:
    """Time the rows on this machine for the seconds of the first argument, and print them as JSON lines."""
    import json  # noqa: PLC0415
    from dataclasses import asdict  # noqa: PLC0415

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for row in measure_curves(device, limit_s=float(sys.argv[1]), say=lambda line: print(line, file=sys.stderr)):
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()

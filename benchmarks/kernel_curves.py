"""Curves of kernels by class, fitted on published times of single kernels (kernel_times/).

benchmarks/time_model.py predicts sources left out, and writes hybridtrain/virtual_gpu/cards/kernel_curves.toml.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, prod
from pathlib import Path
from statistics import fmean, median

from kernel_times import KernelTime, bounding_card, load_sources, load_times
from scipy.optimize import minimize

from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.account.op_record import OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Card, find_card
from hybridtrain.virtual_gpu.cards.kernels import Curves, Kernel, KernelTimes, class_of

PACKAGE = Path(__file__).resolve().parent.parent / "hybridtrain" / "virtual_gpu" / "cards"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "fp64": "float64"}
"""Of kernels that are fitted or predicted; TF32 and int8 are rates that no plan of ours has."""
FLASH = {
    "FlashAttention-1": "attention_old", "FlashAttention-2": "attention", "FlashAttention-3": "attention_new",
    "FlashAttention": "attention_new", "cuDNN": "attention_new",
}  # fmt: skip
"""Curve by software of attention."""
TRAFFIC: Mapping[tuple[str, str], tuple[float, float]] = {
    ("fill", ""): (1, 0), ("reduce_read", ""): (1, 0), ("scale", ""): (2, 0), ("triad", ""): (3, 0),
    ("add", ""): (3, 0),
    ("mul_scalar", ""): (2, 0), ("relu", ""): (2, 0), ("gelu", ""): (2, 0), ("gelu_tanh", ""): (2, 0),
    ("sigmoid", ""): (2, 0), ("tanh", ""): (2, 0), ("swish_2_kernels", ""): (5, 0), ("gelu_new_8_kernels", ""): (18, 0),
    ("silu_mul", "eager"): (5, 0), ("silu_mul", "Liger"): (3, 0), ("relu_squared", "eager"): (4, 10),
    ("relu_squared", "Liger"): (2, 3), ("rope", "Liger"): (2, 2), ("layer_norm", ""): (2, 3),
    ("rms_norm", "Liger"): (2, 3), ("rms_norm", "cuDNN"): (2, 3), ("rms_norm", "fused (torch.nn.RMSNorm)"): (2, 3),
    ("softmax", "eager"): (2, 3), ("log_softmax", "eager"): (2, 3), ("cross_entropy", "eager"): (2, 5),
    ("sum", ""): (1, 0),
    ("max", ""): (1, 0), ("argmax", ""): (1, 0), ("cumsum", ""): (2, 0), ("quantize_rowwise", ""): (1.5, 0),
    ("dequantize_nf4", ""): (1.27, 0), ("adamw", "fused"): (7, 0), ("adamw", "llm.c kernel 2"): (7, 0),
    ("adam", "fused"): (7, 0),
}  # fmt: skip
"""Tensors of the shape that are read or written forward and backward, by op and software (empty: any). Kernels that are
not here are several with unknown traffic, or none of a decoder's step, and are neither fitted nor predicted."""
_BY_CLASS = {
    "normalization": "norm",
    "softmax": "softmax",
    "loss": "cross_entropy",
    "reduction": "aten.sum",
    "quantize": "nf4",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A published time and the ops that it is of, forward and backward."""

    time: KernelTime
    card: Card
    ops: tuple[OpRecord, ...]
    role: str

    @property
    def kind(self) -> str:
        """Name of the curve that it is fitted by: of the last op's."""
        op, kernel = self.ops[-1], class_of(self.ops[-1])
        if kernel is Kernel.GEMM:
            return {"float32": "gemm_float32", "float8_e4m3fn": "gemm_float8"}.get(op.dtype, "gemm")
        if kernel is Kernel.ATTENTION:
            return FLASH[self.time.software]
        is_back = kernel is Kernel.NORMALIZATION and "backward" in op.name
        return "normalization_backward" if is_back else "memory" if kernel is Kernel.ELEMENTWISE else kernel.value

    @property
    def bytes_moved(self) -> int:
        """Of its ops."""
        return sum(op.bytes_moved for op in self.ops)

    def error(self, curves: Curves) -> float:
        """Return the logarithm of estimated over published seconds."""
        if self.kind.startswith("attention"):
            curves = replace(curves, attention=getattr(curves, self.kind))
        times = KernelTimes(self.card, curves)
        return log(sum(max(times.seconds(op)[:2]) for op in self.ops) / self.time.seconds)


def ops_of(time: KernelTime) -> tuple[OpRecord, ...]:
    """Return the ops of a time; none where no curve is for them."""
    passes = ("forward", "backward") if time.passes == "both" else (time.passes,)
    if time.dtype not in DTYPES and time.kind != "optimizer":
        return ()
    name, shape, size = (
        f"{_BY_CLASS.get(time.kind, time.kind)}.{time.op}",
        None,
        {"fp32": 4, "fp64": 8}.get(time.dtype, 2),
    )
    work = dict.fromkeys(passes, (0, time.least_bytes))
    if time.kind == "gemm":
        if "dequantize" in time.op or "grouped" in time.op:
            return ()
        *batch, rows, columns, inner = time.shape
        shape, work = (prod(batch) * rows, columns, inner), {"forward": (round(time.flops), time.least_bytes)}
    elif time.kind == "attention":
        if time.software not in FLASH or time.dtype == "fp8":
            return ()
        batch, heads, _, length, width = time.shape
        shape = (batch * heads, length, width)
        work = {one: (round(replace(time, passes=one).flops), time.least_bytes) for one in passes}
    elif time.kind == "gather":
        if time.passes != "forward":
            return ()
        name, work = "embedding", {"forward": (0, 2 * prod(time.shape[1:]) * size)}
    else:
        tensors = TRAFFIC.get((time.op, time.software)) or TRAFFIC.get((time.op, ""))
        is_odd = time.kind == "normalization" and (len(time.shape) > 2 or not 64 <= time.shape[-1] <= 2**17)
        is_odd |= time.op == "cross_entropy" and time.dtype != "fp32"
        is_odd |= time.source == "gpu-benches" and "1024" not in time.note  # blocks that leave the card empty
        if tensors is None or is_odd:
            return ()
        work = {one: (0, round(tensors[one == "backward"] * prod(time.shape) * size)) for one in passes}
    stage = Stage.UPDATE if time.kind == "optimizer" else Stage.FORWARD
    return tuple(
        OpRecord(
            name=name + "_backward" * (one == "backward"), event=0, stage=stage, unit="", is_matmul=False, flops=flops,
            bytes_moved=int(moved), dtype=DTYPES.get(time.dtype, ""), shape=shape,
        )
        for one, (flops, moved) in work.items() if moved
    )  # fmt: skip


SLOWER_MEMORY = {"pytorch-119842": 2400.0, "pytorch-134373": 2400.0}
"""GB/s of an H100 with HBM2e, by source: sources.toml notes that it is not the listed card."""


def load() -> list[Timed]:
    """Return all times that a curve is for."""
    sources = load_sources()
    found = []
    for time in load_times():
        card = bounding_card(time.card, sources)
        ops = ops_of(time)
        if card is not None and time.source in SLOWER_MEMORY:
            card = replace(card, memory_gbps=SLOWER_MEMORY[time.source])
        if card is not None and ops:
            found.append(Timed(time, card, ops, sources["sources"][time.source]["role"]))
    return found


def newer(curves: Curves) -> Curves:
    """Return curves with attention made for Hopper and later."""
    return replace(curves, attention=curves.attention_new)


SPREAD = 1.2533
"""A normal distribution's standard deviation over its mean absolute deviation."""
FLOOR = 20e-6
"""Shorter ones are timed with what the program needs to issue them, in most sources."""


def is_long(timed: Timed) -> bool:
    """Return whether a time tells of the card's rates: neither launches nor the second-level cache."""
    is_small = not timed.ops[0].flops and timed.bytes_moved <= 2 * timed.card.l2_mib * MIB
    return timed.time.seconds > FLOOR and not is_small


Pooled = dict[str, float]
"""Logarithm by scope: ``all``, a generation, a card."""


def pool(values: Iterable[tuple[Card, float]]) -> Pooled:
    """Return means of all, of generations and of cards, each drawn to the one above by one more of its members."""
    by_card: defaultdict[str, list[float]] = defaultdict(list)
    generation: dict[str, str] = {}
    for card, value in values:
        by_card[card.name].append(value)
        generation[card.name] = card.generation
    means = {name: median(found) for name, found in by_card.items()}
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name, parent in generation.items():
        members[parent].append(name)
    whole = fmean(fmean(means[name] for name in names) for names in members.values())
    pooled = {"all": whole}
    for parent, names in members.items():
        pooled[parent] = (whole + sum(means[name] for name in names)) / (1 + len(names))
        for name in names:
            number = len(by_card[name])
            pooled[name] = (pooled[parent] + number * means[name]) / (1 + number)
    return pooled


def look_up(pooled: Pooled, card: Card) -> float:
    """Return the most particular value."""
    return next(pooled[scope] for scope in (card.name, card.generation, "all") if scope in pooled)


BASE = Curves(
    gemm=1.0, gemm_float32=1.0, gemm_float8=1.0, inner_half=100.0, waves_half=0.3, attention=1.0, attention_new=1.0,
    attention_old=1.0, backward=0.8, length_half=0.0, head_half=1.0, memory=1.0, normalization=1.0,
    normalization_backward=1.0, loss=1.0, reduction=1.0, gather=1.0, quantize=1.0, optimizer=1.0, cached=2.1, bus=0.80,
    launch_seconds=4e-6, kernel_seconds=2e-6, spread=dict.fromkeys(Kernel, 0.0),
)  # fmt: skip
"""Peak rates; cached, bus and kernel_seconds are assumed and shipped."""


@dataclass(slots=True)
class Fit:
    """Fitted curves of all scopes."""

    shared: dict[str, float]
    """Figures that all cards have in common."""
    pooled: dict[str, Pooled]
    """Logarithms of shares that differ by card."""
    float8: float = 1.0
    """Share that products of 8 bits reach, over that of 16 bits."""

    def curves(self, card: Card) -> Curves:
        """Return a card's curves."""
        shares = {name: exp(look_up(found, card)) for name, found in self.pooled.items()}
        return replace(BASE, **self.shared, **shares, gemm_float8=self.float8 * shares.get("gemm", 1.0))


ATTENTION = ("attention", "attention_new", "attention_old")
LIKE_AMPERE = ("8.6", "8.6 GeForce", "8.9", "8.9 GeForce", "12.0", "12.0 GeForce")
CLASSES = ("normalization", "normalization_backward", "loss", "reduction", "gather", "quantize", "optimizer")


def least(lost: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Return positive figures for which the loss is least, sought from ``start`` on a logarithmic scale."""

    def of_logs(logs: Sequence[float]) -> float:
        return lost([exp(min(max(value, -5.0), 8.0)) for value in logs])

    found = minimize(of_logs, [log(value) for value in start], method="Nelder-Mead", options={"maxiter": 80}).x
    return [exp(min(max(value, -5.0), 8.0)) for value in found]


def scattered(rows: Sequence[Timed], base: Curves) -> list[float]:
    """Return by how much each time is off from its card's share."""
    errors = [(timed.card, timed.error(base)) for timed in rows]
    pooled = pool(errors)
    return [abs(error - look_up(pooled, card)) for card, error in errors]


def fit(rows: Sequence[Timed]) -> Fit:
    """Return curves fitted on long times: first the bends that all cards share, then each card's share."""
    by_kind: defaultdict[str, list[Timed]] = defaultdict(list)
    for timed in rows:
        if is_long(timed):
            by_kind[timed.kind].append(timed)
    fitted = Fit({}, {})

    def shares(kind: str) -> Pooled:
        return pool((timed.card, timed.error(fitted.curves(timed.card))) for timed in by_kind[kind])

    def lost_by_products(values: Sequence[float]) -> float:
        lost = 0.0
        for kind in ("gemm", "gemm_float32"):
            of_source: defaultdict[str, list[float]] = defaultdict(list)
            far = scattered(by_kind[kind], replace(BASE, inner_half=values[0], waves_half=values[1]))
            for timed, off in zip(by_kind[kind], far, strict=True):
                of_source[timed.time.source].append(min(off, 0.5))
            lost += fmean(map(fmean, of_source.values()))
        return lost

    def lost_by_attention(values: Sequence[float]) -> float:
        base = replace(BASE, length_half=values[0], head_half=values[1], backward=min(values[2], 1.0))
        return fmean(off for kind in ATTENTION for off in scattered(by_kind[kind], base))

    fitted.shared |= dict(zip(("inner_half", "waves_half"), least(lost_by_products, [100.0, 0.3]), strict=True))
    fitted.pooled |= {kind: shares(kind) for kind in ("gemm", "gemm_float32", "memory")}
    bends = least(lost_by_attention, [200.0, 10.0, 0.8])
    fitted.shared |= dict(zip(("length_half", "head_half", "backward"), [*bends[:2], min(bends[2], 1.0)], strict=True))
    fitted.pooled |= {kind: shares(kind) for kind in ATTENTION}
    _lend_attention(fitted.pooled)
    eight = [t.error(replace(c := fitted.curves(t.card), gemm_float8=c.gemm)) for t in by_kind["gemm_float8"]]
    fitted.float8 = exp(median(eight))
    for kind in CLASSES:
        fitted.shared[kind] = exp(shares(kind)["all"])
    return fitted


def _lend_attention(pooled: dict[str, Pooled]) -> None:
    """Give generations without times those of the instructions that the same kernel uses there."""
    for kind in ATTENTION:
        if "8.0" in pooled[kind]:
            pooled[kind] |= dict.fromkeys(LIKE_AMPERE, pooled[kind]["8.0"])
    b200, h100 = (find_card(name).tflops_bf16 for name in ("b200", "h100-sxm"))
    old = pooled["attention"]["9.0"] + log(h100 / b200)  # the same TFLOP/s: these instructions have not become faster
    pooled["attention"] |= dict.fromkeys(("10.0", "10.3"), old)


def spreads(rows: Sequence[Timed], fitted: Fit) -> dict[str, dict[str, float]]:
    """Return the spread of each class for a card with times, one of a known generation and any other.

    A card, then a generation, is predicted by the others. Classes that all cards share have one spread.
    """
    found: dict[str, dict[str, float]] = {"card": {}, "generation": {}, "all": {}}
    by_kind: defaultdict[str, list[Timed]] = defaultdict(list)
    for timed in rows:
        if is_long(timed):
            by_kind[timed.kind].append(timed)
    for kind, timed_of in by_kind.items():
        errors = [(timed.card, timed.error(fitted.curves(timed.card))) for timed in timed_of]
        if kind not in fitted.pooled:
            found["all"][kind] = SPREAD * fmean(abs(error) for _, error in errors)
            continue
        values = [(card, error + look_up(fitted.pooled[kind], card)) for card, error in errors]
        found["card"][kind] = SPREAD * fmean(abs(error) for _, error in errors)
        for scope, same in (("generation", lambda card: card.name), ("all", lambda card: card.generation)):
            left = []
            for name in {same(card) for card, _ in values}:
                others = [(card, value) for card, value in values if same(card) != name]
                if others:
                    pooled = pool(others)
                    left += [abs(value - look_up(pooled, card)) for card, value in values if same(card) == name]
            found[scope][kind] = max(SPREAD * fmean(left), found["card"][kind]) if left else found["card"][kind]
    return found

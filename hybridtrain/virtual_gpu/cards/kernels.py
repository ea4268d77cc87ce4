"""Time of single kernels, by class: what share of a card's peak rates each reaches.

A product of M x K and K x N takes ``gemm * K / (K + inner_half) * W / (W + waves_half)`` of the peak, W being its tiles
of 128 x 128 for each multiprocessor: a tile's pipeline fills and drains once per K, and the last wave of tiles is not
full (NVIDIA, "Matrix Multiplication Background User's Guide"). One narrower than a tensor core's 16 rows or columns is
read, not multiplied, in time: neither term holds for it. Without tensor cores the inner dimension does not matter.

Attention takes ``attention * T / (T + length_half) * H / (H + head_half * P)``, T being the keys of a query on average,
H the size of a head, P the peak of a multiprocessor in TFLOP/s: exponentials, one a score, have not become faster with
the tensor cores. Backward reaches ``backward`` of that.

All other classes move bytes, at ``memory`` of the card's bandwidth times a share of their class. No kernel is shorter
than ``kernel_seconds``.

An op whose operands are few finds them where the op before left them, in the second-level cache: up to a quarter of it,
``cached`` times the rate of device memory.

kernel_curves.toml has the figures, fitted on published times of single kernels (benchmarks/kernel_times): of all cards,
of a generation by its compute capability, of a card. A spread is the standard deviation of the logarithm of a kernel's
time over its estimate.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from hybridtrain.config.decode import decode
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.account.op_record import OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.cards.catalogue import figure_faults, raise_faults, tables


class Kernel(StrEnum):
    """Classes of kernels with a curve of their own; all but the first two are bound by memory."""

    GEMM = "gemm"
    ATTENTION = "attention"
    NORMALIZATION = "normalization"
    LOSS = "loss"
    """Softmax and cross entropy."""
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    GATHER = "gather"
    QUANTIZE = "quantize"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What one card's kernels reach.

    Shares may be above 1: a vendor's rate holds at the boost clock on the box, and GeForce cards run faster.
    """

    gemm: float
    """Of the peak arithmetic rate, by large products of 16 bits."""
    gemm_float32: float
    """Likewise of 32 bits, without TF32."""
    gemm_float8: float
    """Likewise of 8 bits; of int8 it is assumed."""
    inner_half: float
    """Inner dimension of a product at which half of that is reached."""
    waves_half: float
    """Tiles for each multiprocessor at which half of that is reached."""
    attention: float
    """Of the peak arithmetic rate, by long sequences and wide heads, forward, in FlashAttention 2 (torch's)."""
    attention_new: float
    """Likewise in kernels made for Hopper and later: FlashAttention 3, cuDNN."""
    attention_old: float
    """Likewise in FlashAttention 1."""
    backward: float
    """Of ``attention``."""
    length_half: float
    """Keys of a query at which half of that is reached."""
    head_half: float
    """Size of a head at which half of that is reached, for each TFLOP/s of a multiprocessor."""
    memory: float
    """Of the peak memory bandwidth, by an elementwise kernel."""
    normalization: float
    """Of ``memory``, as those below."""
    normalization_backward: float
    loss: float
    reduction: float
    gather: float
    quantize: float
    optimizer: float
    cached: float
    """How many times faster than device memory small operands are read and written."""
    bus: float
    """Of the theoretical bus rate, by copies of pinned memory."""
    launch_seconds: float
    """Time to issue a kernel."""
    kernel_seconds: float
    """Shortest time that a kernel or a copy takes."""
    spread: dict[str, float]
    """By class of kernel."""

    def __post_init__(self) -> None:
        shares = [name for name, kind in self.__annotations__.items() if kind is float]
        zero = {"inner_half", "waves_half", "length_half", "head_half", "launch_seconds", "kernel_seconds"}
        raise_faults(figure_faults(self, above_0=[name for name in shares if name not in zero], at_least_0=zero))


def curves_of(card: Card) -> Curves:
    """Return what a card's kernels reach: by its own figures, where it has none its generation's, else of all cards."""
    return curves_in("all", card.generation, card.name)


@cache
def curves_in(*scopes: str) -> Curves:
    """Return the figures of tables of kernel_curves.toml, a later one before an earlier one."""
    known = [tables("kernel_curves.toml").get(scope, {}) for scope in scopes]
    joined = {name: value for table in known for name, value in table.items()}
    spread = {name: value for table in known for name, value in table.get("spread", {}).items()}
    return decode(Curves, joined | {"spread": spread}, source=f"kernel_curves.toml: {', '.join(scopes)}")


_GATHERS = ("embedding", "gather", "scatter", "index")
_LOSSES = ("softmax", "nll_loss", "logsumexp", "cross_entropy")
_REDUCTIONS = ("aten.sum", "aten.mean", "aten.amax", "aten.max", "foreach_norm", "vector_norm", "aten.cumsum")
_QUANTIZES = ("nf4", "quantize", "int8")


_NAMED = {
    Kernel.REDUCTION: _REDUCTIONS, Kernel.LOSS: _LOSSES, Kernel.GATHER: _GATHERS, Kernel.QUANTIZE: _QUANTIZES,
    Kernel.NORMALIZATION: ("norm",),
}  # fmt: skip


def class_of(op: OpRecord) -> Kernel:
    """Return the class of an op: by its arithmetic, its stage, else its name."""
    if op.flops:
        return Kernel.ATTENTION if "attention" in op.name else Kernel.GEMM
    if op.stage is Stage.UPDATE:
        return Kernel.OPTIMIZER
    found = (kind for kind, parts in _NAMED.items() if any(part in op.name for part in parts))
    return next(found, Kernel.ELEMENTWISE)


_TILE = 128 * 128
_NARROW = 16
_CACHED_SHARE = 4
_BACKWARD = "backward"


class KernelTimes:
    """Seconds of kernels on one card."""

    def __init__(self, card: Card, curves: Curves) -> None:
        self.curves = curves
        self._flops, self._sms = card.flops_per_second, max(card.sms, 1)
        self._is_slow_attention = not card.has_bfloat16_tensor_cores
        self._bandwidth = card.memory_bytes_per_second * curves.memory
        self._cached_bytes = card.l2_mib * MIB // _CACHED_SHARE
        self._known: dict[tuple[object, ...], tuple[float, float, str]] = {}

    def seconds(self, op: OpRecord, taken: float = 0.0) -> tuple[float, float, str]:
        """Return the seconds of an op's arithmetic and of its traffic, of which the longer one counts, and its class.

        Args:
            op: The op.
            taken: Of the bandwidth, by copies that run meanwhile, in bytes/s.
        """
        key = (op.name, op.bytes_moved, op.shape, op.dtype, op.flops, op.stage is Stage.UPDATE, taken)
        found = self._known.get(key)
        if found is None:
            compute = self._arithmetic(op) if op.flops else 0.0
            found = self._known[key] = compute, self._traffic(op, taken), class_of(op).value
        return found

    def memory_rate(self, num_bytes: int, taken: float = 0.0) -> float:
        """Return bytes/s of an elementwise op of so many bytes."""
        if num_bytes <= self._cached_bytes:
            return self._bandwidth * self.curves.cached
        return max(self._bandwidth - taken, self._bandwidth / 2)

    def _traffic(self, op: OpRecord, taken: float) -> float:
        kernel = class_of(op)
        is_back = kernel is Kernel.NORMALIZATION and _BACKWARD in op.name
        name = "normalization_backward" if is_back else kernel.value
        plain = kernel in {Kernel.ELEMENTWISE, Kernel.GEMM, Kernel.ATTENTION}
        share = 1.0 if plain else float(getattr(self.curves, name))
        seconds = op.bytes_moved / (self.memory_rate(op.bytes_moved, taken) * share)
        return max(seconds, self.curves.kernel_seconds)

    def _arithmetic(self, op: OpRecord) -> float:
        curves = self.curves
        if "attention" in op.name:
            peak = self._flops["float32"] if self._is_slow_attention else self._peak(op)
            is_back = _BACKWARD in op.name
            share = curves.attention * (curves.backward if is_back else 1.0)
            if op.shape is not None:
                heads, length, width = op.shape
                keys = op.flops / (heads * length * width * (10 if is_back else 4))
                share *= (
                    keys / (keys + curves.length_half) * width / (width + curves.head_half * peak / self._sms / 1e12)
                )
            return op.flops / (peak * share)
        by_dtype = {
            "float32": curves.gemm_float32, "float8_e4m3fn": curves.gemm_float8, "int8": curves.gemm_float8
        }  # fmt: skip
        share = by_dtype.get(op.dtype, curves.gemm)
        if op.shape is not None and min(op.shape[:2]) >= _NARROW:
            rows, columns, inner = op.shape
            waves = rows * columns / _TILE / self._sms
            share *= waves / (waves + curves.waves_half)
            share *= inner / (inner + curves.inner_half) if op.dtype != "float32" else 1.0
        return op.flops / (self._peak(op) * share)

    def _peak(self, op: OpRecord) -> float:
        return self._flops.get(op.dtype, self._flops["float32"])

"""Published times of single kernels, from which a time model by kernel class can be fitted.

kernel_times/times.csv has the times, kernel_times/sources.toml their sources and the role of each, given before any
fit. ``python benchmarks/kernel_times.py`` prints the counts.
"""

import csv
import tomllib
from collections import Counter
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from hybridtrain.units import GB, MIB
from hybridtrain.virtual_gpu.cards.card import Card, find_card

HERE = Path(__file__).resolve().parent / "kernel_times"
ROLES = ("fit", "left out")
PASSES = ("forward", "backward", "both")
SIZES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "bytes": 1, "arguments": 0,
}  # fmt: skip
"""Bytes of an element."""
BANDWIDTH_SHARE = 1.2
"""Of a card's bandwidth: what no kernel exceeds whose operands do not fit the second-level cache."""
BOOST = 1.15
"""GeForce cards run above the clock of their vendor's rates: up to 1.13 times is published (5090, 4096 to 10240)."""
_TENSORS = {
    "fill": 1, "reduce_read": 1, "add": 3, "triad": 3, "silu_mul": 3, "cross_entropy": 1, "sum": 1, "max": 1,
    "argmax": 1, "adam": 7, "adamw": 7,
}  # fmt: skip
"""Tensors of the shape that an op must read or write at least; others two, copies and quantization one."""
_PASS_FLOPS = {"forward": 4.0, "backward": 10.0, "both": 14.0}
"""Of attention, for each score and each number of a head: two products, and five in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A published time of one kernel, or of one op of few kernels."""

    source: str
    card: str
    """Key of the catalogue, or of ``unknown_cards`` in sources.toml."""
    kind: str
    """Kernel class: column ``class``."""
    op: str
    shape: tuple[int, ...]
    """By class: sources.toml, ``shapes``."""
    dtype: str
    passes: str
    seconds: float
    software: str
    note: str

    @property
    def flops(self) -> float:
        """Floating-point operations; 0: none that bounds the time."""
        if self.kind == "gemm":
            return 2.0 * prod(self.shape)
        if self.kind == "attention":
            batch, heads, _, length, width = self.shape
            return _PASS_FLOPS[self.passes] * batch * heads * length**2 * width * (0.5 if self.op == "causal" else 1)
        return 0.0

    @property
    def least_bytes(self) -> int:
        """Bytes of the operands that must be read or written once; of an op with backward those of its forward."""
        return SIZES[self.dtype] * self._least_numbers

    @property
    def _least_numbers(self) -> int:
        match self.kind:
            case "gemm":
                *batch, rows, columns, inner = self.shape
                return prod(batch) * (rows * inner + inner * columns + rows * columns)
            case "attention":
                batches, heads, kv_heads, length, width = self.shape
                return 2 * batches * (heads + kv_heads) * length * width
            case "gather":
                vocabulary, tokens, width = self.shape
                return width * (tokens + min(tokens, vocabulary))
            case "launch" | "host":
                return 0
        return _TENSORS.get(self.op, 1 if self.kind in {"copy", "quantize"} else 2) * prod(self.shape)

    def least_seconds(self, card: Card) -> float:
        """Return the seconds that ``card`` needs at its peak rates, or nearly so: no published time may be below."""
        if self.kind == "copy":
            return self.least_bytes / (card.pcie_gbps * GB)
        memory = self.least_bytes / (BANDWIDTH_SHARE * card.memory_bytes_per_second)
        in_cache = self.least_bytes <= card.l2_mib * MIB
        return max(self.flops / _peak(card, self.dtype) if self.flops else 0.0, 0.0 if in_cache else memory)


def _peak(card: Card, dtype: str) -> float:
    """Return the peak rate in 1/s of products of an element type."""
    rates = card.flops_per_second
    tensor_cores = max(rates["bfloat16"], rates["float16"])
    by_dtype = {
        "fp32": rates["float32"], "bf16": rates["bfloat16"], "fp16": rates["float16"],
        "tf32": max(tensor_cores / 2, rates["float32"]), "fp8": 2 * tensor_cores, "int8": 2 * tensor_cores,
    }  # fmt: skip
    return by_dtype[dtype] * (BOOST if "GeForce" in card.name else 1.0)


def load_sources(folder: Path = HERE) -> dict[str, Any]:
    """Return sources.toml: ``shapes``, ``unknown_cards`` and ``sources``.

    Raises:
        ValueError: A source without role, place, date or way of timing.
    """
    path = folder / "sources.toml"
    read: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, source in read["sources"].items():
        for key in ("role", "repository", "date", "timing", "cache", "launches"):
            if not source.get(key):
                raise ValueError(f"{path}: sources.{name}: {key} is missing; give it")
        if source["role"] not in ROLES:
            raise ValueError(f"{path}: sources.{name}: role '{source['role']}' must be one of {', '.join(ROLES)}")
        if not (source.get("commit") or source.get("thread")):
            raise ValueError(f"{path}: sources.{name}: give the commit, or the number of the thread")
    return read


def load_times(folder: Path = HERE) -> list[KernelTime]:
    """Return the times of times.csv, seconds above 0.

    Raises:
        ValueError: A line that is no time, told by its number.
    """
    path = folder / "times.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return [_read(row, f"{path}: line {number}") for number, row in enumerate(csv.DictReader(file), start=2)]


def _read(row: dict[str, str], where: str) -> KernelTime:
    try:
        shape, seconds = tuple(int(size) for size in row["shape"].split("x")), float(row["seconds"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}; shape must be whole numbers joined by x, seconds a number") from error
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError(f"{where}: seconds {row['seconds']} must be above 0")
    if row["dtype"] not in SIZES or row["pass"] not in PASSES:
        raise ValueError(f"{where}: dtype '{row['dtype']}', pass '{row['pass']}': neither {set(SIZES)} nor {PASSES}")
    return KernelTime(
        source=row["source"], card=row["card"], kind=row["class"], op=row["op"], shape=shape, dtype=row["dtype"],
        passes=row["pass"], seconds=seconds, software=row["software"], note=row["note"],
    )  # fmt: skip


def bounding_card(name: str, sources: dict[str, Any]) -> Card | None:
    """Return the card that bounds times on ``name``: itself, or of an unknown one a card as fast; None: none does."""
    unknown = sources["unknown_cards"]
    if name not in unknown:
        return find_card(name)
    return find_card(unknown[name]["at_most"]) if unknown[name]["at_most"] else None


def main() -> None:
    """Print counts by class, card and source."""
    sources, times = load_sources(), load_times()
    for told, counts in (
        ("class", Counter(time.kind for time in times)),
        ("card", Counter(time.card for time in times)),
        ("source", Counter(f"{time.source} ({sources['sources'][time.source]['role']})" for time in times)),
    ):
        print(f"{told}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))


if __name__ == "__main__":
    main()

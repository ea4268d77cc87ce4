"""The part of ``tables/evidence.md`` about single kernels, from records alone."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from tabulate import tabulate

from hybridtrain.virtual_gpu.cards.card import Card, card_catalogue
from hybridvalidation.experiments.card_session.plan import card_under_cap
from hybridvalidation.experiments.card_session.record import Ceilings, KernelTime

_HEADERS = ("class", "type", "calls", "least", "median", "most", "the call with most")
_HOW = (
    "Single kernels, by class. Least, median and most: share of the card's peak that calls reach, the larger of "
    "arithmetic and traffic, which both count the least that the call needs. Peaks are {}. Of float32 it is TF32's "
    "where the call may use it. Above 100 %: the operands are in the card's cache. Class `launch`: microseconds in "
    "which the program issues a call, not a share."
)


def curve_table(times: Sequence[KernelTime], ceilings: Ceilings, style: str) -> str:
    """Return one row per class of kernels and element type."""
    card, groups = card_under_cap(ceilings, ceilings.memory_bytes), defaultdict[tuple[str, str], list[KernelTime]](list)
    for time in times:
        if not time.fault:
            groups[time.kind, time.dtype].append(time)
    rows = []
    for (kind, dtype), found in sorted(groups.items()):
        unit = "us" if kind == "launch" else "%"
        reached = [(1e6 * time.seconds if unit == "us" else 100 * _share(time, card), time) for time in found]
        most, best = max(reached, key=lambda pair: pair[0])
        shares = [share for share, _ in reached]
        figures = (f"{value:.1f} {unit}" for value in (min(shares), median(shares), most))
        rows.append([kind, dtype, str(len(found)), *figures, f"{best.op} {' x '.join(map(str, best.shape))}"])
    return tabulate(rows, headers=_HEADERS, tablefmt=style, disable_numparse=True)


def _share(time: KernelTime, card: Card) -> float:
    """Return the least time by the card's peaks over the measured one."""
    rate = card.flops_per_second.get(time.dtype, 0.0) or {"int8": card.tops_int8 * 1e12}.get(time.dtype, 0.0)
    if time.dtype == "float32" and (time.kind == "convolution" or "tf32" in time.op) and card.has_bfloat16_tensor_cores:
        rate = card.flops_per_second["bfloat16"] / 2  # TF32 (vendor whitepapers); cuDNN uses it by default
    bandwidth = card.bus_bytes_per_second if time.kind == "copy" else card.memory_bytes_per_second
    return max(time.num_bytes / bandwidth, time.flops / rate if rate else 0.0) / time.seconds


def curves_explained(times: Sequence[KernelTime], ceilings: Ceilings) -> str:
    """Return what the table's columns mean, and the calls that did not run by reason."""
    faults = defaultdict[str, list[str]](list)
    for time in times:
        if time.fault:
            faults[time.fault].append(time.op)
    lines = [
        f"- {len(ops)} calls did not run ({', '.join(dict.fromkeys(ops))}): {fault}" for fault, ops in faults.items()
    ]
    return "\n".join([_HOW.format(_peak_source(ceilings)), *(["", *lines] if lines else [])])


def _peak_source(ceilings: Ceilings) -> str:
    is_known = any(card.name == ceilings.name for card in card_catalogue().values())
    return "the data sheet's" if is_known else "those of the first part over the shares that large calls reach"

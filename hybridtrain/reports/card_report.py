"""Parts of the reports of ``dry-run`` and ``virtual``: peaks, holders, an out-of-memory."""

from collections.abc import Callable, Mapping

from tabulate import tabulate

from hybridtrain.config.encode import encode
from hybridtrain.planning.figures import refused_request
from hybridtrain.units import format_bytes, to_gib
from hybridtrain.virtual_gpu.allocator.allocator_config import round_size, segment_size
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridtrain.virtual_gpu.facade.card_run import CardRun

_HOLDERS_SHOWN = 5
_FITS = {FitVerdict.FITS: "yes", FitVerdict.BARELY: "barely", FitVerdict.NO: "NO"}


def card_mapping(run: CardRun, phase_of: Callable[[int], str] = lambda _step: "full") -> dict[str, object]:
    """Return the planned figures of a run by name, in bytes; ``phase_of`` names the phase of a step, from 1."""
    return {
        "peak_allocated_bytes": run.peak.allocated_bytes,
        "peak_active_bytes": max(step.active_bytes for step in run.steps),
        "peak_reserved_bytes": run.peak_reserved_bytes,
        "device_used_bytes": run.device_used_bytes,
        "verdict": run.verdict.value,
        "margin_bytes": run.card.margin_bytes,
        "card_note": run.card.note,
        "fits_card": run.fits_card,
        "by_class": {name.value: size for name, size in run.by_class().items()},
        "steps": [
            {
                "step": step.step, "phase": phase_of(step.step), "allocated_bytes": step.allocated_bytes,
                "reserved_bytes": step.reserved_bytes,
            }
            for step in run.steps
        ],
        "oom": None if run.oom is None else encode(refused_request(run.oom)),
        "evidence": {"memory": "planned", "time": "estimated"},
    }  # fmt: skip


def fits_cell(verdict: FitVerdict) -> str:
    """Return whether a plan fits as a cell of a column 'fits'."""
    return _FITS[verdict]


def bytes_table(title: str, sizes: Mapping[str, int]) -> str:
    """Return a table of bytes by name, in GiB."""
    rows = [[name, f"{to_gib(size):.3f}"] for name, size in sizes.items()]
    return tabulate(rows, headers=[title, "GiB"], tablefmt="simple", disable_numparse=True)


def class_table(run: CardRun) -> str:
    """Return the table of allocated bytes by tensor class at the peak."""
    return bytes_table("at the peak", {name.replace("_", " "): size for name, size in run.by_class().items()})


def memory_line(run: CardRun) -> str:
    """Return the peaks that torch and nvidia-smi would show."""
    return (
        f"allocated {to_gib(run.peak.allocated_bytes):.2f}, reserved {to_gib(run.peak_reserved_bytes):.2f}, "
        f"device {to_gib(run.device_used_bytes):.2f} of {to_gib(run.card.memory_bytes):.2f} GiB (planned)"
    )


def refusal_line(run: CardRun, *, before_steps: str) -> str:
    """Return where the card refused a request; ``before_steps`` is the place of one before the first step."""
    assert run.oom is not None, "a run that does not fit was refused something"
    oom = run.oom
    place = f"at step {oom.step}, {oom.stage} {oom.unit}".strip() if oom.step else before_steps
    segment = segment_size(round_size(oom.requested_bytes))
    return (
        f"DOES NOT FIT: out of memory {place}: {format_bytes(oom.requested_bytes)} requested "
        f"(a segment of {format_bytes(segment)}), {format_bytes(oom.allocated_bytes)} allocated and "
        f"{format_bytes(oom.reserved_bytes)} reserved of {format_bytes(oom.capacity_bytes)}"
    )


def holders_text(run: CardRun) -> str:
    """Return who held the memory when the card refused a request; empty where it refused none."""
    if run.oom is None:
        return ""
    oom = refused_request(run.oom)
    classes = ", ".join(f"{name} {format_bytes(size)}" for name, size in oom.by_class.items() if size)
    holders = [f"  {name}: {format_bytes(size)}" for name, size in list(oom.by_unit.items())[:_HOLDERS_SHOWN]]
    return "\n".join([f"live by class: {classes}", "largest holders:", *holders])

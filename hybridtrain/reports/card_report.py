"""Parts of the reports of ``dry-run`` and ``virtual``: peaks, holders, an out-of-memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from tabulate import tabulate

from hybridtrain.config.encode import encode
from hybridtrain.planning.figures import refused_request
from hybridtrain.units import format_bytes, to_gib
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator_config import round_size, segment_size
from hybridtrain.virtual_gpu.allocator.replay import HeldMemory
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridtrain.virtual_gpu.facade.card_run import CardRun

_SIZES_SHOWN = 5
_HOLDERS_SHOWN = 3
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
    return bytes_table("at the peak", _names_of(run.by_class()))


def verdict_line(
    run: CardRun, what: str, verdict: FitVerdict, *, cards: str = "", before_steps: str, needed_bytes: int | None,
    full_at_step: int | None = None,
) -> str:  # fmt: skip
    """Return the answer in one line: whether ``what`` fits, and where it does not, when memory ran out.

    Args:
        run: The run; of several cards the one that holds the most.
        what: The name of the script or the model.
        verdict: Of the card's memory.
        cards: What to call the card; default: its name.
        before_steps: The place of a refused request before the first step.
        needed_bytes: What the whole run needs, where memory ran out; None: not known.
        full_at_step: The step at which growing memory will fill the card; None: none.
    """
    cards = cards or run.card.name
    memory = format_bytes(run.card.memory_bytes)
    if run.oom is not None:
        needs = "" if needed_bytes is None else f"needs {format_bytes(needed_bytes)} of {memory} and "
        place = f"at step {run.oom.step}, {place_of(run.oom)}" if run.oom.step else before_steps
        return f"DOES NOT FIT: {what} {needs}runs out of memory on {cards}, {place} (planned)"
    margin = f"; {run.card.told(verdict).partition(', ')[2]}" if verdict is FitVerdict.BARELY else ""
    used = format_bytes(run.device_used_bytes)
    until = "" if full_at_step is None else f" UNTIL ABOUT STEP {full_at_step:,}"
    return f"{verdict.value.upper()}{until}: {what} takes {used} of {memory} on {cards} (planned){margin}"


def peak_figures(run: CardRun) -> Iterator[tuple[str, str]]:
    """Yield name and value of the figures of memory: the peak or the refused request, and who holds it."""
    if run.oom is None:
        highest = max(run.steps, key=lambda step: step.allocated_bytes, default=None)
        place = "" if highest is None else f"; in step {highest.step}, {place_of(highest)}"
        peak, reserved = format_bytes(run.peak.allocated_bytes), format_bytes(run.peak_reserved_bytes)
        yield "peak", f"{peak} allocated, {reserved} reserved{place}"
        yield "by class", sizes_text(_names_of(run.by_class()))
        return
    refused = refused_request(run.oom)
    segment = format_bytes(segment_size(round_size(refused.requested_bytes)))
    held, kept = format_bytes(refused.allocated_bytes), format_bytes(refused.reserved_bytes)
    request = f"{format_bytes(refused.requested_bytes)} (a segment of {segment})"
    yield "request", f"{request}; {held} allocated and {kept} reserved of {format_bytes(run.oom.capacity_bytes)}"
    yield "by class", sizes_text(_names_of(refused.by_class))
    yield "largest", sizes_text(dict(list(_names_of(refused.by_unit).items())[:_HOLDERS_SHOWN]))


def figure_lines(figures: Iterable[tuple[str, str]]) -> list[str]:
    """Return names and values as indented lines, without those that have no value."""
    return [f"  {name:<11} {value}" for name, value in figures if value]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return the largest of some sizes, and the sum of the others, in one line."""
    found = sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1])
    shown = [f"{name} {format_bytes(size)}" for name, size in found[:_SIZES_SHOWN]]
    if len(found) > _SIZES_SHOWN:
        shown.append(f"others {format_bytes(sum(size for _, size in found[_SIZES_SHOWN:]))}")
    return ", ".join(shown)


def place_of(moment: HeldMemory) -> str:
    """Return stage and module of a moment of a step."""
    return f"{moment.stage} {moment.unit}".strip()


def _names_of(sizes: Mapping[TensorClass, int] | Mapping[str, int]) -> dict[str, int]:
    """Return bytes by class, or by ``class/unit``, with the class in words."""
    words: dict[str, str] = {name: name.replace("_", " ") for name in TensorClass}
    found = {}
    for name, size in sizes.items():
        kind, slash, unit = name.partition("/")
        found[f"{words.get(kind, kind)}{slash}{unit}"] = size
    return found

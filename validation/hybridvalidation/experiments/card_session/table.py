"""``tables/evidence.md``: measured against planned figures of CUDA cards, from records alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridtrain.units import MIB, format_count, to_gib
from hybridvalidation.experiments.card_session.curve_table import curve_table, curves_explained
from hybridvalidation.experiments.card_session.record import (
    CardMeasurements,
    Ceilings,
    CopyOverlap,
    EvidenceRecord,
)
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Outcome

_HEADERS = (
    "part", "model", "cap GiB", "stack", "tokens/step", "tokens/s", "planned", "allocated GiB", "planned",
    "reserved GiB", "planned", "device GiB", "planned", "host GiB", "copies hidden",
)  # fmt: skip
_HOW = (
    "Measured on the card under a hard cap of torch's allocator. Columns `planned`: the earlier dry run of the same "
    "steps, and by how many percent it exceeds the measurement. Tokens/s: median step without the first. Device: "
    "allocator and CUDA context of this process. Planned device bytes contain the context as measured in the first "
    "part; planned tokens/s are estimates. Copies hidden: share of the bus copies' time, in one profiled step, with a "
    "kernel running."
)

_SCRIPT_HEADERS = (
    "script", "steps", "step s", "planned", "allocated GiB", "planned", "reserved GiB", "planned", "device GiB",
    "planned",
)  # fmt: skip
_HOW_SCRIPTS = (
    "Scripts of others' libraries, on the whole card. Columns `planned`: what `hybridtrain virtual` answers about the "
    "same script, and by how many percent it exceeds the measurement; its step times are estimates. Step: the median "
    "from the end of one optimizer step to that of the next, without the first two, in which the allocator's events "
    "are recorded."
)


def newest_evidence(records: Sequence[EvidenceRecord]) -> list[EvidenceRecord]:
    """Return the newest record of each part and card, in the order of first appearance; runs before skipped ones."""
    newest: dict[str, EvidenceRecord] = {}
    for record in records:
        held = newest.get(record.key)
        if held is None or held.outcome is Outcome.SKIPPED or record.outcome is not Outcome.SKIPPED:
            newest[record.key] = record
    return list(newest.values())


def evidence_text(records: Sequence[EvidenceRecord], style: str) -> str:
    """Return the tables of what was measured."""
    return "\n\n".join(found for found, _ in _tables(records, style))


def _tables(records: Sequence[EvidenceRecord], style: str) -> Iterator[tuple[str, str]]:
    """Yield each table that has rows, with what its columns mean."""
    ceilings = next((record.ceilings for record in records if record.ceilings is not None), None)
    for record in records:
        if record.curves and ceilings is not None:
            yield curve_table(record.curves, ceilings, style), curves_explained(record.curves, ceilings)
    if any(record.script is not None for record in records):
        yield script_table(records, style), _HOW_SCRIPTS
    if any(_is_trained(record) for record in records):
        yield evidence_table(records, style), _HOW


def evidence_table(records: Sequence[EvidenceRecord], style: str) -> str:
    """Return one row per part that was trained."""
    rows = [_row(record) for record in records if _is_trained(record)]
    return tabulate(rows, headers=_HEADERS, tablefmt=style, disable_numparse=True)


def write_evidence(records: Sequence[EvidenceRecord], results: Path) -> list[Path]:
    """Write ``tables/evidence.md`` below ``results``; nothing without records."""
    if not records:
        return []
    newest = newest_evidence(records)
    parts = ["# Evidence from CUDA cards"]
    for card in dict.fromkeys(record.card for record in newest):
        parts += _card_parts([record for record in newest if record.card == card])
    parts.append(made_by(("", record) for record in newest))
    return [write_page(results, "evidence", "\n\n".join(parts))]


def _card_parts(records: Sequence[EvidenceRecord]) -> list[str]:
    environment, parts = records[-1].environment, [f"## {records[0].card}"]
    parts += [_ceilings_text(record.ceilings) for record in records if record.ceilings is not None]
    parts += [text for pair in _tables(records, MARKDOWN) for text in pair]
    parts += [
        f"`{record.part}`, one step: {_overlap_text(overlap)}."
        for record in records
        if (overlap := _overlap(record)) is not None
    ]
    remarks = [
        f"- `{record.part}`: {_outcome(record)}, {' '.join(told.split()) or 'no message'}"
        for record in records
        if (told := "; ".join(_remarks(record))) or record.outcome is not Outcome.OK
    ]
    parts += ["\n".join(remarks)] if remarks else []
    made = f"torch {environment.torch}, CUDA {environment.cuda}, {environment.num_cpus} processors, {environment.cpu}."
    return [*parts, made]


def script_table(records: Sequence[EvidenceRecord], style: str) -> str:
    """Return one row per script, planned beside measured."""
    rows = [_script_row(record) for record in records if record.script is not None]
    return tabulate(rows, headers=_SCRIPT_HEADERS, tablefmt=style, disable_numparse=True)


def _script_row(record: EvidenceRecord) -> list[str]:
    script = record.script
    assert script is not None, "only scripts have a row"
    planned, measured = script.planned, script.measured
    step_s, planned_s = (None if figures is None else figures.step_time_s for figures in (measured, planned))
    pairs = [
        _pair(0 if planned is None else getattr(planned, name), 0 if measured is None else getattr(measured, name))
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
    ]
    return [
        record.part.removeprefix("script/"), "-" if measured is None else str(len(measured.step_seconds) + 1),
        _outcome(record) if step_s is None else f"{step_s:.3f}",
        "-" if planned_s is None else f"{planned_s:.3f}{_error(planned_s, step_s)}",
        *(cell for pair in pairs for cell in pair),
    ]  # fmt: skip


def _row(record: EvidenceRecord) -> list[str]:
    training, overlap = record.training, _overlap(record)
    assert training is not None, "only trained parts have a row"
    predicted, measured, rate = training.predicted, training.measured, training.tokens_per_s
    found = measured if measured is not None and measured.steps else CardMeasurements()
    share = None if overlap is None else overlap.hidden_share
    return [
        record.part, f"{training.model} ({format_count(training.num_params)})", f"{to_gib(training.cap_bytes):.1f}",
        training.stack, f"{training.accum_steps} x {training.micro_batch_size} x {training.seq_len}",
        _outcome(record) if rate is None else f"{rate:,.0f}",
        f"{predicted.tokens_per_s:,.0f}{_error(predicted.tokens_per_s, rate)}",
        *_pair(predicted.peak_allocated_bytes, found.peak_allocated_bytes),
        *_pair(predicted.peak_reserved_bytes, found.peak_reserved_bytes),
        *_pair(predicted.device_used_bytes, found.device_used_bytes),
        f"{to_gib(found.host_bytes):.1f}" if found.steps else "-", "-" if share is None else f"{100 * share:.1f} %",
    ]  # fmt: skip


def _pair(predicted: int, measured: int) -> tuple[str, str]:
    plan = f"{to_gib(predicted):.3f}{_error(predicted, measured)}" if predicted else "-"
    return f"{to_gib(measured):.3f}" if measured else "-", plan


def _error(predicted: float, measured: float | None) -> str:
    """Return the error of a prediction in percent of the measurement; empty without one."""
    return f" ({100 * (predicted - measured) / measured:+.1f} %)" if measured else ""


def _remarks(record: EvidenceRecord) -> list[str]:
    script = record.script
    if script is None:
        return [record.message] if record.message else []
    caveats = () if script.planned is None else script.planned.caveats
    found = [record.message, f"no plan: {script.plan_fault}" if script.plan_fault else "", *caveats]
    return [text for text in found if text]


def _outcome(record: EvidenceRecord) -> str:
    return record.outcome.value.replace("_", " ")


def _is_trained(record: EvidenceRecord) -> bool:
    return record.training is not None and record.outcome is not Outcome.SKIPPED


def _overlap(record: EvidenceRecord) -> CopyOverlap | None:
    measured = None if record.training is None else record.training.measured
    return None if measured is None else measured.overlap


def _overlap_text(overlap: CopyOverlap) -> str:
    return (
        f"{overlap.window_s:.2f} s; kernels {overlap.kernel_s:.2f} s ({overlap.num_kernels:,}), copies in "
        f"{overlap.copy_in_s:.2f} s and out {overlap.copy_out_s:.2f} s ({overlap.num_copies:,}), either "
        f"{overlap.copy_s:.2f} s, of which {overlap.hidden_s:.2f} s beside kernels; from or to memory that was not "
        f"pinned {overlap.pageable_s:.2f} s"
    )


def _ceilings_text(found: Ceilings) -> str:
    rows = [
        ("driver, memory", f"{found.driver or 'unknown'}, {to_gib(found.memory_bytes):.1f} GiB"),
        ("bfloat16 matmul, 8192 cubed", f"{found.matmul_tflops:.0f} TFLOP/s"),
        ("copy on the device, read and written", f"{found.device_copy_gbps:.0f} GB/s"),
        ("pinned copies alone", f"in {found.in_gbps:.1f} GB/s, out {found.out_gbps:.1f} GB/s"),
        ("pinned copies together", f"in {found.both_in_gbps:.1f} GB/s, out {found.both_out_gbps:.1f} GB/s"),
        ("host tier", f"{'pinned' if found.is_pinned else 'NOT pinned'}, locked at {found.pin_gbps:.1f} GB/s"),
        (
            "CUDA context",
            f"{found.context_bytes / MIB:.0f} MiB, with libraries {found.context_with_libraries_bytes / MIB:.0f} MiB",
        ),
        (
            "cuBLAS workspaces",
            (
                f"forward {found.forward_workspace_bytes / MIB:.2f} MiB, "
                f"backward {found.backward_workspace_bytes / MIB:.2f} MiB"
            ),
        ),
    ]
    return tabulate(rows, headers=("ceiling", "measured"), tablefmt=MARKDOWN, disable_numparse=True)

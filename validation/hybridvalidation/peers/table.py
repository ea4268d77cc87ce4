"""Rows of peers for readers."""

from collections.abc import Iterable, Mapping

from tabulate import tabulate

from hybridtrain.units import format_seconds, to_gib
from hybridvalidation.peers.figures import PeerFigures, Row
from hybridvalidation.records.outcome import Evidence, Outcome

_HEADERS = (
    "engine", "recipe", "peak GiB", "reserved GiB", "host GiB", "fits", "step", "tokens/s", "bound by", "evidence",
    "remark",
)  # fmt: skip


def peer_table(rows: Iterable[Row], style: str) -> str:
    """Return a line for each row and kind of evidence; at least one for each row."""
    lines = [line for row in rows for line in _lines(row)]
    return tabulate(lines, headers=_HEADERS, tablefmt=style, disable_numparse=True)


def versions_lines(rows: Iterable[Row]) -> list[str]:
    """Return with which versions of its recipes' packages each engine was run, a line each."""
    engines: dict[str, set[str]] = {}
    for row in rows:
        told = {f"{package} {version}" for package, version in _versions(row).items()}
        engines[row.run.engine] = engines.get(row.run.engine, set()) | told
    return [f"{engine}: {', '.join(sorted(told))}." for engine, told in engines.items() if told]


def row_mapping(scenario: str, row: Row) -> dict[str, object]:
    """Return a row as ``peers --json`` prints it; bytes and seconds."""
    found: dict[str, object] = {"scenario": scenario, "id": row.run.id, "engine": row.run.engine}
    for kind in (Evidence.PLANNED, Evidence.MEASURED):
        figures = row.figures(kind)
        found[kind.value] = None if figures is None else _figures_mapping(row, figures)
    executed = row.figures(Evidence.EXECUTED)
    found["executed"] = None if executed is None else {"losses": list(executed.losses)}
    found["versions"] = dict(_versions(row))
    why = {kind.value: row.why(kind) for kind in (Evidence.PLANNED, Evidence.EXECUTED) if row.figures(kind) is None}
    return found | {"remark": row.run.remark, "why": why}


def _figures_mapping(row: Row, figures: PeerFigures) -> dict[str, object]:
    return {
        "params": figures.num_params, "peak_allocated_bytes": figures.peak_allocated_bytes,
        "peak_reserved_bytes": figures.peak_reserved_bytes, "host_peak_bytes": figures.host_peak_bytes,
        "fits": figures.fits, "shortage": figures.shortage, "step_time_s": figures.step_time_s or None,
        "tokens_per_s": row.tokens_per_step / figures.step_time_s if figures.step_time_s else None,
        "bound": figures.bound, "without_gradient": figures.without_gradient,
    }  # fmt: skip


def _lines(row: Row) -> list[list[str]]:
    measured = [] if row.figures(Evidence.MEASURED) is None else [_line(row, Evidence.MEASURED)]
    return [_line(row, Evidence.PLANNED), *measured]


def _line(row: Row, kind: Evidence) -> list[str]:
    figures = row.figures(kind)
    names = [row.run.engine, row.run.id]
    if figures is None:
        return [*names, *["-"] * 7, _evidence(row, kind), _joined(row.why(kind), row.run.remark)]
    is_timed = figures.step_time_s > 0
    lost = f"{figures.without_gradient} trainable parameters got no gradient" if figures.without_gradient else ""
    return [
        *names, f"{to_gib(figures.peak_allocated_bytes):.2f}", f"{to_gib(figures.peak_reserved_bytes):.2f}",
        f"{to_gib(figures.host_peak_bytes):.2f}" if kind is Evidence.PLANNED else "-",
        "yes" if figures.fits else "NO", format_seconds(figures.step_time_s) if is_timed else "-",
        f"{row.tokens_per_step / figures.step_time_s:,.0f}" if is_timed else "-", figures.bound or "-",
        _evidence(row, kind), _joined(figures.shortage, lost, row.run.remark),
    ]  # fmt: skip


def _evidence(row: Row, kind: Evidence) -> str:
    """Return how the figures of a line were got, and whether the recipe was seen to train."""
    if kind is Evidence.MEASURED:
        return "measured"
    planned = "planned, times estimated" if row.figures(kind) is not None else ""
    executed, record = row.figures(Evidence.EXECUTED), row.records.get(Evidence.EXECUTED)
    trained = "" if executed is None else f"executed small, loss {executed.losses[0]:.2f} to {executed.losses[-1]:.2f}"
    failed = f"execution failed: {record.message}" if record and record.outcome is not Outcome.OK else ""
    return _joined(planned, trained, failed) or "-"


def _versions(row: Row) -> Mapping[str, str]:
    record = row.records.get(Evidence.PLANNED) or row.records.get(Evidence.EXECUTED)
    return {} if record is None else record.packages


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)

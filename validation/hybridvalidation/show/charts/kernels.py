"""Kernels: what every provider of an op took, and what flash attention saves by length."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.units import MIB
from hybridvalidation.kernel_bench.attention_lengths import AttentionPoint, read_attention
from hybridvalidation.kernel_bench.record import KernelRecord, newest_kernels, read_kernels
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import Drawing, Trace, bar_axes, figure_of, log_axis
from hybridvalidation.show.kinds import PageChart

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")


def _draw(_files: ScenarioFiles, results: Path) -> Mapping[str, Sequence[Drawing]]:
    records = results / "records"
    return {"kernels": _providers(newest_kernels(read_kernels(records))), "attention": _lengths(records)}


def _providers(records: Sequence[KernelRecord]) -> list[Drawing]:
    records = [record for record in records if record.timed()]
    if not records:
        return []
    views: dict[str, Sequence[Trace]] = {}
    layouts: dict[str, Mapping[str, object]] = {}
    for op in dict.fromkeys(record.op for record in records):
        of_op = [record for record in records if record.op == op]
        names = list(dict.fromkeys(result.provider for record in of_op for result, _ in record.timed()))
        views[op] = [_times(of_op, name, _COLORS[number % len(_COLORS)]) for number, name in enumerate(names)]
        layouts[op] = bar_axes("", len(of_op) * len(names)) | {
            "barmode": "group", "xaxis": log_axis("us a call, log scale", _all(of_op)),
        }  # fmt: skip
    cards = ", ".join(dict.fromkeys(f"{record.card} ({record.evidence})" for record in records))
    return [
        Drawing(
            name="times", title="Time of every provider", choice="op", views=views, layouts=layouts,
            evidence=f"medians of one call; {cards}",
            says=f"{len(records)} cases of {len(views)} ops, each timed with every provider that is there.",
        )
    ]  # fmt: skip


def _all(records: Sequence[KernelRecord]) -> list[float]:
    return [times.q50_s * 1e6 for record in records for _, times in record.timed()]


def _times(records: Sequence[KernelRecord], name: str, color: str) -> Trace:
    pairs = [
        (f"{record.shape}, {record.mode}", figure_of(times.q50_s * 1e6, 1))
        for record in records
        for result, times in record.timed()
        if result.provider == name
    ]
    return {
        "type": "bar", "orientation": "h", "name": name, "y": [case for case, _ in pairs],
        "x": [microseconds for _, microseconds in pairs], "marker": {"color": color},
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:,.1f}} us<extra></extra>",
    }  # fmt: skip


def _lengths(records: Path) -> list[Drawing]:
    found = read_attention(records)
    if not found:
        return []
    record = found[-1]
    sizes = [cost.peak_bytes / MIB for point in record.points for cost in (point.unfused, point.flash)]
    views = {
        model: [
            _line("unfused", [point for point in record.points if point.model == model], "#d55e00"),
            _line("flash", [point for point in record.points if point.model == model], "#0072b2"),
        ]
        for model in dict.fromkeys(point.model for point in record.points)
    }
    return [
        Drawing(
            name="lengths", title="What one layer's attention holds, by length", choice="model", views=views,
            evidence="planned, by a dry run; both axes logarithmic",
            says="; ".join(
                f"{point.model} at {point.seq_len:,} tokens: flash holds {point.saving_pct:.2f} % less"
                for point in record.points
            ),
            layout={
                "height": 440, "xaxis": log_axis("tokens", [point.seq_len for point in record.points]),
                "yaxis": log_axis("MiB at the peak", sizes),
            },
        )
    ]  # fmt: skip


def _line(name: str, points: Sequence[AttentionPoint], color: str) -> Trace:
    costs = [point.unfused if name == "unfused" else point.flash for point in points]
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": [point.seq_len for point in points],
        "y": [figure_of(cost.peak_bytes / MIB, 4) for cost in costs], "line": {"color": color},
        "hovertemplate": f"%{{x:,}} tokens, {name}: %{{y:,.2f}} MiB<extra></extra>",
    }  # fmt: skip


CHART = PageChart(order=50, draw=_draw)

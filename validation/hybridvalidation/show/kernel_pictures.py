"""Pictures of kernels: times of every op's providers, and flash attention's saving by length."""

from collections.abc import Mapping, Sequence

from hybridtrain.units import MIB
from hybridvalidation.kernel_bench.attention_lengths import read_attention
from hybridvalidation.kernel_bench.record import newest_kernels, read_kernels
from hybridvalidation.pictures.picture import COLORS, Axis, Picture, Series, View, bars_by
from hybridvalidation.show.results import Results


def kernel_pictures(results: Results) -> Mapping[str, Sequence[Picture]]:
    """Return the times of every op's providers, by the page's name."""
    records = [record for record in newest_kernels(read_kernels(results.records)) if record.timed()]
    if not records:
        return {}
    views = {}
    for op in dict.fromkeys(record.op for record in records):
        timed = [
            (result.provider, f"{record.shape}, {record.mode}", times.q50_s * 1e6)
            for record in records
            if record.op == op
            for result, times in record.timed()
        ]
        views[op] = View(
            series=bars_by(timed, unit="us", digits=1), x=Axis(title="us per call, log scale", is_log=True),
            y=Axis(names=list(dict.fromkeys(case for _, case, _ in timed))), is_grouped=True,
        )  # fmt: skip
    cards = ", ".join(dict.fromkeys(f"{record.card} ({record.evidence})" for record in records))
    picture = Picture(
        name="times", title="Time of every provider", choice="op", views=views,
        evidence=f"medians of one call; {cards}",
        description=f"{len(records)} cases of {len(views)} ops, each timed with every provider that is there.",
    )  # fmt: skip
    return {"kernels": [picture]}


def attention_pictures(results: Results) -> Mapping[str, Sequence[Picture]]:
    """Return the peaks of one layer's attention by length, by the page's name."""
    found = read_attention(results.records)
    if not found:
        return {}
    points = found[-1].points
    views = {
        model: View(
            series=[
                Series(
                    name=name, mark="line", unit="MiB", color=color, x=[point.seq_len for point in of_model],
                    y=[getattr(point, name).peak_bytes / MIB for point in of_model],
                )
                for name, color in (("unfused", COLORS[1]), ("flash", COLORS[0]))
            ],
            x=Axis(title="tokens", is_log=True), y=Axis(title="MiB at the peak", is_log=True),
        )
        for model in dict.fromkeys(point.model for point in points)
        if (of_model := [point for point in points if point.model == model])
    }  # fmt: skip
    picture = Picture(
        name="lengths", title="What one layer's attention holds, by length", choice="model", views=views,
        evidence="planned, by a dry run; both axes logarithmic",
        description="; ".join(
            f"{point.model} at {point.seq_len:,} tokens: flash holds {point.saving_pct:.2f} % less" for point in points
        ),
    )  # fmt: skip
    return {"attention": [picture]}

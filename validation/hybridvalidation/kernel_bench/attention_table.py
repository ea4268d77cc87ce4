"""Attention by length as a table, with verdicts on what was stated of flash attention."""

from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.models.model_config import PRESETS
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.card import card_catalogue
from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.kernel_bench.attention_plan import AttentionPoint, AttentionRecord
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target
from hybridvalidation.show.tables import MARKDOWN, verdict_table

SAVING, COST = "flash-attention-saving", "flash-attention-cost"
"""Targets that are judged here, where the folder of scenarios states them."""
STATED_SAVING_PCT = 99.0
"""Looked for in the lengths where it states none."""
_HEADERS = (
    "model", "tokens", "unfused peak", "flash peak", "saved %", "unfused kept", "flash kept", "saved %", "time %",
)  # fmt: skip
_HOW = (
    "One layer, one sequence, {dtype}, forward and backward. Planned, by a dry run of the functions that the models "
    "call: peak is what attention holds beside its inputs, its output and their gradients at the moment when most is "
    "held, kept is what waits between forward and backward (once a layer). The flash kernel's peak is the scratch of "
    "its backward pass. Time: estimated for {card}, the flash kernel's over the unfused ops', minus 100 %; below zero "
    "it is faster."
)


def attention_table(record: AttentionRecord, style: str) -> str:
    """Return one row per model and length."""
    return tabulate([_row(point) for point in record.points], headers=_HEADERS, tablefmt=style, disable_numparse=True)


def judge_attention(record: AttentionRecord, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return the verdicts at the length that each model is made for."""
    verdicts = []
    for model in dict.fromkeys(point.model for point in record.points):
        points = [point for point in record.points if point.model == model]
        point = next(point for point in points if point.seq_len == PRESETS[model].max_seq_len)
        stack = f"{model} at {point.seq_len} tokens"
        stated = (targets[SAVING].value if SAVING in targets else None) or STATED_SAVING_PCT
        holding = next((each.seq_len for each in points if each.saving_pct >= stated), None)
        remark = (
            f"{stated:g} % from {holding:,} tokens on; of what waits between forward and backward "
            f"{point.kept_saving_pct:.2f} %"
            if holding is not None
            else f"{stated:g} % at no length up to {points[-1].seq_len:,}"
        )
        saving = Metric(point.saving_pct, Evidence.PLANNED, "%", remark=remark)
        cost = Metric(point.time_overhead_pct, Evidence.ESTIMATED, "%")
        verdicts += [
            judge_metric(targets[name], stack, metric)
            for name, metric in ((SAVING, saving), (COST, cost))
            if name in targets
        ]
    return verdicts


def attention_text(record: AttentionRecord, targets: Mapping[str, Target], style: str) -> str:
    """Return table, verdicts and how they were got."""
    how = _HOW.format(dtype=record.dtype, card=card_catalogue()[record.card].name)
    return f"{attention_table(record, style)}\n\n{how}\n\n{verdict_table(judge_attention(record, targets), style)}"


def write_attention(records: list[AttentionRecord], targets: Mapping[str, Target], results: Path) -> list[Path]:
    """Write ``tables/attention.md`` from the newest record; nothing without one."""
    if not records:
        return []
    path = results / "tables" / "attention.md"
    title = "# Attention: what flash attention saves, by length"
    replace_file(path, f"{title}\n\n{attention_text(records[-1], targets, MARKDOWN)}\n".encode())
    return [path]


def _row(point: AttentionPoint) -> list[str]:
    return [
        point.model,
        f"{point.seq_len:,}",
        format_bytes(point.unfused.peak_bytes),
        format_bytes(point.flash.peak_bytes),
        f"{point.saving_pct:.2f}",
        format_bytes(point.unfused.kept_bytes),
        format_bytes(point.flash.kept_bytes),
        f"{point.kept_saving_pct:.2f}",
        f"{point.time_overhead_pct:+.0f}",
    ]

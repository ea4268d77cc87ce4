"""``bench attention``: planned memory and time of one layer by sequence length, unfused and with the flash kernel.

A dry run of the two functions that the models call. Counted is attention's memory besides inputs, output and their
gradients, which every implementation needs.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from hybridtrain.models.layers import ATTENTION
from hybridtrain.models.model_config import PRESETS
from hybridtrain.plan.memory_plan import Attention
from hybridtrain.reports.tables import MARKDOWN, table, write_page
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import StorageLedger, find_peak
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import Card, card_catalogue
from hybridtrain.virtual_gpu.cards.roofline import estimate_step
from hybridvalidation.judge.case import Metric
from hybridvalidation.judge.tables import verdict_table
from hybridvalidation.judge.verdict import Verdict, judge_metric
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.scenario import Target

CARD = "rtx-4090"
DTYPE = torch.bfloat16
_FILE = "attention.jsonl"
_MODELS = ("gpt2-small", "llama-7b")
"""Models with head dims 64 and 128."""
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTH_STEP = 64
"""Step of the search for the length from which a stated saving holds."""
SAVING, COST = "flash-attention-saving", "flash-attention-cost"
"""Targets judged here, if the scenario folder states them."""
STATED_SAVING_PCT = 99.0
"""Saving to search for if no target states one."""
_HEADERS = (
    "model", "tokens", "peak saved %", "unfused peak", "flash peak", "time %", "kept saved %", "unfused kept",
    "flash kept",
)  # fmt: skip
_BYTES = ("peak_bytes", "kept_bytes")
_HOW = (
    "One layer, one sequence, {dtype}, forward and backward. Planned, by a dry run of the functions that the models "
    "call. Peak: attention's bytes besides inputs, output and their gradients. Kept: bytes saved between forward and "
    "backward, once per layer. The flash kernel's peak is the scratch of its backward pass. "
    "Time: estimated for {card}, the flash kernel's over the unfused ops', minus 100 %; below zero it is faster."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """One implementation, one layer, one sequence, forward and backward."""

    peak_bytes: int
    """Peak bytes besides inputs, output and their gradients."""
    kept_bytes: int
    """Bytes saved between forward and backward besides inputs and output, once per layer."""
    seconds: float
    """Estimated seconds on the record's card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoint:
    """Both implementations at one length."""

    model: str
    seq_len: int
    unfused: AttentionCost
    flash: AttentionCost

    @property
    def saving_pct(self) -> float:
        """Reduction of the peak by the flash kernel, in percent."""
        return 100 * (1 - self.flash.peak_bytes / self.unfused.peak_bytes)

    @property
    def kept_saving_pct(self) -> float:
        """Reduction of the bytes kept for the backward pass, in percent."""
        return 100 * (1 - self.flash.kept_bytes / self.unfused.kept_bytes)

    @property
    def time_overhead_pct(self) -> float:
        """Overhead of the flash kernel's time, in percent; below zero it is faster."""
        return 100 * (self.flash.seconds / self.unfused.seconds - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecord(Record):
    """One dry run over models and lengths."""

    card: str
    dtype: str
    points: tuple[AttentionPoint, ...]
    evidence: Evidence = Evidence.PLANNED

    def faults(self) -> list[str]:
        """Return faults of the content."""
        return [f"points: no such model '{name}'" for name in {point.model for point in self.points} - set(PRESETS)]


def plan_attention(targets: Mapping[str, Target]) -> AttentionRecord:
    """Plan every model at every length, and at the shortest length from which the stated saving holds."""
    card, stated = card_catalogue()[CARD], _stated_saving_pct(targets)
    started, begin = datetime.now(UTC), time.perf_counter()
    points = [point for model in _MODELS for point in _points(model, card, stated)]
    return AttentionRecord(
        key=f"{', '.join(_MODELS)}, {CARD}", card=CARD, dtype=str(DTYPE)[6:], points=tuple(points),
        started_at=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begin, 3),
        environment=read_environment(), program=program_digest(),
    )  # fmt: skip


def _stated_saving_pct(targets: Mapping[str, Target]) -> float:
    return (targets[SAVING].value if SAVING in targets else None) or STATED_SAVING_PCT


def _points(model: str, card: Card, stated_saving_pct: float) -> Iterator[AttentionPoint]:
    @cache
    def at(seq_len: int) -> AttentionPoint:
        unfused, flash = (attention_cost(model, kind, seq_len, card) for kind in (Attention.UNFUSED, Attention.FLASH))
        return AttentionPoint(model=model, seq_len=seq_len, unfused=unfused, flash=flash)

    # The saving grows with the length: the shortest multiple of the step from which it holds lies in front of ``good``.
    good = next((seq_len for seq_len in _LENGTHS if at(seq_len).saving_pct >= stated_saving_pct), 0)
    lengths = range(_LENGTH_STEP, good, _LENGTH_STEP)
    border = bisect_left(lengths, stated_saving_pct, key=lambda seq_len: at(seq_len).saving_pct)
    yield from map(at, sorted({*_LENGTHS, *lengths[border : border + 1]}))


def attention_cost(model: str, attention: Attention, seq_len: int, card: Card) -> AttentionCost:
    """Return the memory and time of one layer of a preset for one sequence."""
    config = PRESETS[model]
    shapes = [(1, seq_len, heads, config.head_dim) for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    ledger = StorageLedger()
    with ledger:
        inputs = [torch.empty(shape, dtype=DTYPE, device="meta", requires_grad=True) for shape in shapes]
        grad = torch.empty(shapes[0], dtype=DTYPE, device="meta")
        before = ledger.live_bytes
        ledger.begin_step()
        with ledger.region(Stage.FORWARD, ""):
            out = ATTENTION[attention](*inputs)
        kept = ledger.live_bytes - before - out.nbytes
        with ledger.region(Stage.BACKWARD, ""):
            grads = torch.autograd.grad(out, inputs, grad)
        for tensor in (out, *grads):
            ledger.label(tensor, TensorClass.GRAD, "")
    trace = ledger.trace()
    at_peak = find_peak(trace, trace.step_range(0)).by_class
    seconds = estimate_step(trace.step_ops(0), card, upload_bytes=0).seconds
    return AttentionCost(
        peak_bytes=at_peak[TensorClass.ACTIVATION] + at_peak[TensorClass.WORKSPACE], kept_bytes=kept, seconds=seconds
    )


def append_attention(records: Path, record: AttentionRecord) -> Path:
    """Add a record to the folder's ``attention.jsonl``; raises ``RecordError`` when its last line was cut short."""
    return append_record(records, _FILE, record)


def read_attention(records: Path) -> list[AttentionRecord]:
    """Return all records, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / _FILE, AttentionRecord)


def judge_attention(record: AttentionRecord, targets: Mapping[str, Target]) -> list[Verdict]:
    """Return the verdicts at each model's own length."""
    verdicts, stated = [], _stated_saving_pct(targets)
    for model in dict.fromkeys(point.model for point in record.points):
        points = [point for point in record.points if point.model == model]
        point = next(point for point in points if point.seq_len == PRESETS[model].max_seq_len)
        stack = f"{model} at {point.seq_len} tokens"
        holding = next((other.seq_len for other in points if other.saving_pct >= stated), None)
        remark = (
            f"{stated:g} % from {holding:,} tokens on; of the bytes kept between forward and backward "
            f"{point.kept_saving_pct:.2f} %"
            if holding is not None
            else f"{stated:g} % at no length up to {points[-1].seq_len:,}"
        )
        saving = Metric(point.saving_pct, Evidence.PLANNED, "%", remark=remark)
        alone = "no recorded run tests the estimate for a single op: it shows whether it is slower, not how much faster"
        cost = Metric(point.time_overhead_pct, Evidence.ESTIMATED, "%", remark=alone, is_untested=True)
        verdicts += [
            judge_metric(targets[name], stack, metric, record=f"attention {record.key}")
            for name, metric in ((SAVING, saving), (COST, cost))
            if name in targets
        ]
    return verdicts


def attention_text(record: AttentionRecord, targets: Mapping[str, Target], style: str) -> str:
    """Return a row per model and length, verdicts and the method."""
    rows = []
    for point in record.points:
        peaks, kept = ([format_bytes(getattr(cost, name)) for cost in (point.unfused, point.flash)] for name in _BYTES)
        saving, kept_saving = f"{point.saving_pct:.2f}", f"{point.kept_saving_pct:.2f}"
        time_cell = f"{point.time_overhead_pct:+.0f}"
        rows.append([point.model, f"{point.seq_len:,}", saving, *peaks, time_cell, kept_saving, *kept])
    shown = table(_HEADERS, rows, style, keys=2)
    how = _HOW.format(dtype=record.dtype, card=card_catalogue()[record.card].name)
    return f"{shown}\n\n{how}\n\n{verdict_table(judge_attention(record, targets), style)}"


def write_attention(records: list[AttentionRecord], targets: Mapping[str, Target], results: Path) -> list[Path]:
    """Write ``tables/attention.md`` from the newest record; nothing without one."""
    if not records:
        return []
    title, record = "# Attention: what flash attention saves, by length", records[-1]
    parts = [title, attention_text(record, targets, MARKDOWN), made_by([("", record)])]
    return [write_page(results, "attention", "\n\n".join(parts))]

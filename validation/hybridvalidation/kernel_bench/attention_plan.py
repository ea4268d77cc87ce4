"""What one layer's attention holds and takes at growing lengths, unfused and with the flash kernel: planned, not run.

The same two functions that the models call, on tensors without memory, under the ledger that counts a training step.
Counted is what attention needs beside its inputs, its output and their gradients, which every implementation has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hybridtrain.models.layers import ATTENTION
from hybridtrain.models.model_config import PRESETS
from hybridtrain.plan.memory_plan import Attention
from hybridtrain.virtual_gpu.card import Card, card_catalogue
from hybridtrain.virtual_gpu.ledger import StorageLedger, find_peak
from hybridtrain.virtual_gpu.observer import Stage
from hybridtrain.virtual_gpu.roofline import estimate_step
from hybridtrain.virtual_gpu.tensor_class import TensorClass
from hybridvalidation.records.environment import Environment
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.store import append_line, read_lines

SCHEMA = 1
CARD = "rtx-4090"
DTYPE = torch.bfloat16
_FILE = "attention.jsonl"
_MODELS = ("gpt2-small", "llama-7b")
"""With heads of 64 and of 128."""
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTH_STEP = 64
"""Lengths between two of those, where a stated saving begins to hold, are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """One implementation, one layer, one sequence, forward and backward."""

    peak_bytes: int
    """Beside inputs, output and their gradients, at the moment when most is held."""
    kept_bytes: int
    """What waits between forward and backward beside inputs and output, once a layer."""
    seconds: float
    """Estimated, by the rates of the record's card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoint:
    """Both implementations at one length."""

    model: str
    seq_len: int
    unfused: AttentionCost
    flash: AttentionCost

    @property
    def saving_pct(self) -> float:
        """How much less the flash kernel holds at its peak, in percent."""
        return 100 * (1 - self.flash.peak_bytes / self.unfused.peak_bytes)

    @property
    def kept_saving_pct(self) -> float:
        """How much less waits for the backward pass, in percent."""
        return 100 * (1 - self.flash.kept_bytes / self.unfused.kept_bytes)

    @property
    def time_overhead_pct(self) -> float:
        """How much longer the flash kernel takes, in percent; below zero it is faster."""
        return 100 * (self.flash.seconds / self.unfused.seconds - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecord:
    """One dry run over models and lengths."""

    card: str
    dtype: str
    points: tuple[AttentionPoint, ...]
    environment: Environment
    evidence: Evidence = Evidence.PLANNED
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        faults = [] if self.schema == SCHEMA else [f"schema: {self.schema} must be {SCHEMA}"]
        faults += [f"points: no such model '{name}'" for name in {each.model for each in self.points} - set(PRESETS)]
        if faults:
            raise ValueError("\n".join(faults))


def plan_attention(environment: Environment, stated_saving_pct: float) -> AttentionRecord:
    """Return every model at every length, and at the shortest from which the stated saving holds."""
    card = card_catalogue()[CARD]
    points = [point for model in _MODELS for point in _points(model, card, stated_saving_pct)]
    return AttentionRecord(card=CARD, dtype=str(DTYPE)[6:], points=tuple(points), environment=environment)


def _points(model: str, card: Card, stated_saving_pct: float) -> Iterator[AttentionPoint]:
    @cache
    def at(seq_len: int) -> AttentionPoint:
        unfused, flash = (attention_cost(model, kind, seq_len, card) for kind in (Attention.UNFUSED, Attention.FLASH))
        return AttentionPoint(model=model, seq_len=seq_len, unfused=unfused, flash=flash)

    border = _shortest(lambda seq_len: at(seq_len).saving_pct >= stated_saving_pct)
    lengths = {*_LENGTHS} if border is None else {*_LENGTHS, border}
    yield from map(at, sorted(lengths))


def _shortest(holds: Callable[[int], bool]) -> int | None:
    """Return the shortest multiple of the step at which it holds; the saving grows with the length."""
    good = next(filter(holds, _LENGTHS), None)
    if good is None:
        return None
    bad = max((seq_len for seq_len in _LENGTHS if seq_len < good), default=0)
    while good - bad > _LENGTH_STEP:
        middle = (good + bad) // 2 // _LENGTH_STEP * _LENGTH_STEP
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def attention_cost(model: str, attention: Attention, seq_len: int, card: Card) -> AttentionCost:
    """Return what one layer of a preset takes for one sequence."""
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
    append_line(records / _FILE, record)
    return records / _FILE


def read_attention(records: Path) -> list[AttentionRecord]:
    """Return all records, oldest first; raises ``RecordError`` for a line that is no record."""
    return read_lines(records / _FILE, AttentionRecord)

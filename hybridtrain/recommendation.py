"""The fastest stack that fits a card and a machine, found by dry runs; gentler numbers first.

What is searched: how exact numbers are, times where things live. A candidate's bytes and seconds come from dry runs of
a few blocks and micro-batches, extended in straight lines: every block and every micro-batch does the same. The winner
is then run dry as it is, and takes less when it does not fit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import floor
from typing import Literal

from hybridtrain.dry_runs import DryRun, dry_run
from hybridtrain.errors import OutOfMemoryError
from hybridtrain.models.model_config import ModelConfig, Workload, block_params
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optimizations.activation_offload import ActivationOffload
from hybridtrain.optimizations.bf16_optimizer import Bf16Optimizer
from hybridtrain.optimizations.chunked_loss import ChunkedLoss
from hybridtrain.optimizations.fused_update import FusedUpdate
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.optimizations.gradient_checkpointing import GradientCheckpointing
from hybridtrain.optimizations.int8_optimizer import Int8Optimizer
from hybridtrain.optimizations.int8_weights import Int8Weights
from hybridtrain.optimizations.mixed_precision import MixedPrecision
from hybridtrain.optimizations.optimizer_offload import OptimizerOffload
from hybridtrain.optimizations.weight_streaming import WeightStreaming
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import GIB, format_bytes
from hybridtrain.virtual_gpu.card import Card, Host

_VISIT_TOKENS = 16384
"""Largest micro-batch tried: beyond it no copy is hidden that was not hidden before (peers' choice on fast cards)."""
_WORTH_TRYING = 1.02
"""A harsher level must be this much faster than the one before, or even harsher ones are not tried."""
_MOST_CONFIRMATIONS = 4
"""Whole dry runs of a winner, to keep as many blocks as fit."""
_MARGIN = 0.97
"""Share of the card that an extended figure may fill; reserved bytes are no straight line."""
_WORTH_HARSHER = 1.05
"""A harsher level must be this much faster to be chosen."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How exact weights and optimizer state are: one level of the search."""

    name: str
    says: str
    optimizations: tuple[Optimization, ...]
    weight_bytes: float
    """Per parameter, as streamed."""
    state_bytes: float
    """Master and moments, per parameter."""
    accumulator: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type in which gradients wait."""
    optimizer: str = "adamw"
    """``kind``."""

    @property
    def grad_bytes(self) -> int:
        """Per parameter."""
        return 4 if self.accumulator == "float32" else 2


LEVELS = (
    Numerics(
        "exact", "exact fp32 master weights, fp32 moments", (MixedPrecision(master="split16"),), 2, 10, "float32"
    ),
    Numerics(
        "int8-state", "exact fp32 master weights, 8-bit moments",
        (MixedPrecision(master="split16"), Int8Optimizer()), 2, 4.05, "float32",
    ),
    Numerics(
        "bf16", "bf16 weights with stochastic rounding, bf16 moments",
        (MixedPrecision(master="absent"), Bf16Optimizer()), 2, 4,
    ),
    Numerics(
        "bf16-int8-state", "bf16 weights with stochastic rounding, 8-bit moments",
        (MixedPrecision(master="absent"), Int8Optimizer()), 2, 2.05,
    ),
    Numerics(
        "bf16-factored", "bf16 weights with stochastic rounding, factored state",
        (MixedPrecision(master="absent"),), 2, 0.02, optimizer="adafactor",
    ),
    Numerics(
        "int8-factored", "8-bit weights with stochastic rounding, factored state",
        (MixedPrecision(master="absent"), Int8Weights()), 1.02, 0.02, optimizer="adafactor",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where things live, and in which order micro-batches pass: one shape of the search."""

    name: str
    streams: bool = False
    offloads_state: bool = False
    fuses: bool = False
    """Vertical, gradients never stored, boundaries on the host."""

    def optimizations(
        self, level: Numerics, num_micro_batches: int, keep_last: int, resident_layers: int = 0
    ) -> tuple[Optimization, ...]:
        """Return the whole stack for a number of micro-batches."""
        stack: list[Optimization] = [
            *level.optimizations,
            GradientCheckpointing(recompute_every=1, kept_blocks=keep_last),
            ChunkedLoss(loss_chunk_tokens=2048),
            GradAccumulation(
                grad_accum_steps=num_micro_batches,
                schedule="vertical" if self.fuses else "horizontal",
                accumulator=level.accumulator,
            ),
        ]
        if self.streams:
            stack.append(WeightStreaming(resident_layers=resident_layers))
        if self.offloads_state:
            stack.append(OptimizerOffload(offload_grads=not self.fuses))
        if self.fuses:
            stack += [FusedUpdate(), ActivationOffload()]
        return tuple(stack)


ARRANGEMENTS = (
    Arrangement("all on the card"),
    Arrangement("optimizer state on the host", offloads_state=True),
    Arrangement("weights and state on the host", streams=True, offloads_state=True),
    Arrangement("weights on the host, update fused", streams=True, offloads_state=True, fuses=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One stack that fits, with its estimate."""

    level: Numerics
    arrangement: Arrangement
    micro_batch_size: int
    num_micro_batches: int
    keep_last: int
    resident_layers: int = 0
    kept_bytes: float = 0.0
    """Of the card, that one more kept block takes."""
    tokens_per_s: float = 0.0
    """Estimated, extended from two short dry runs."""

    def optimizations(self) -> tuple[Optimization, ...]:
        """Return the stack."""
        return self.arrangement.optimizations(self.level, self.num_micro_batches, self.keep_last, self.resident_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer."""

    chosen: Candidate
    run: DryRun
    """The chosen stack's dry run, whole."""
    candidates: tuple[Candidate, ...]
    """The best of each level that was tried."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be trained, on what."""

    model: ModelConfig
    card: Card
    host: Host
    seq_len: int
    num_sequences: int
    """Per optimizer step."""

    def run(self, candidate: Candidate) -> DryRun:
        """Return a candidate's dry run."""
        workload = Workload(micro_batch_size=candidate.micro_batch_size, seq_len=self.seq_len)
        config = TrainerConfig(optimizer=OPTIMIZERS[candidate.level.optimizer]())
        plan = compose(candidate.optimizations())
        return dry_run(self.model, plan, self.card, workload, host=self.host, config=config)


def recommend(question: Question, on_try: Callable[[str], None]) -> Recommendation:
    """Return the fastest stack that fits; a gentler level wins unless a harsher one is 5 % faster.

    Raises:
        OutOfMemoryError: nothing fits; the message says what is missing.
    """
    best_of_level: list[Candidate] = []
    for level in LEVELS:
        found = [
            candidate
            for arrangement in ARRANGEMENTS
            if _may_fit(question, level, arrangement)
            and (candidate := _fit(question, level, arrangement, on_try)) is not None
        ]
        if found:
            best_of_level.append(max(found, key=lambda candidate: candidate.tokens_per_s))
        if len(best_of_level) > 1 and best_of_level[-1].tokens_per_s < _WORTH_TRYING * best_of_level[-2].tokens_per_s:
            break
    while best_of_level:
        chosen = best_of_level[0]
        for candidate in best_of_level[1:]:
            if candidate.tokens_per_s > _WORTH_HARSHER * chosen.tokens_per_s:
                chosen = candidate
        on_try(f"{chosen.level.name}, {chosen.arrangement.name}: whole step")
        confirmed = _confirm(question, chosen)
        if confirmed is not None:
            candidate, run = confirmed
            return Recommendation(chosen=candidate, run=run, candidates=tuple(best_of_level))
        best_of_level.remove(chosen)
    raise OutOfMemoryError(_nothing_fits(question))


def _confirm(question: Question, chosen: Candidate) -> tuple[Candidate, DryRun] | None:
    """Return the candidate as it fits when run whole: as many kept blocks as there is room for, then resident ones."""
    found = _most_kept(question, chosen)
    if found is None or not chosen.arrangement.streams:
        return found
    candidate, run = found
    room = _MARGIN * question.card.allocator_capacity_bytes - run.peak_reserved_bytes
    resident = _blocks_within(room, question.model, candidate.level)
    while resident > 0:
        trial = replace(candidate, resident_layers=resident)
        trial_run = question.run(trial)
        if trial_run.fits:
            faster = trial_run.tokens_per_s > run.tokens_per_s
            return (replace(trial, tokens_per_s=trial_run.tokens_per_s), trial_run) if faster else found
        resident -= 1 + resident // 4
    return found


def _blocks_within(room: float, model: ModelConfig, level: Numerics) -> int:
    """Return how many blocks' weights go into some bytes."""
    return min(model.num_blocks, floor(room / (level.weight_bytes * block_params(model))))


def _most_kept(question: Question, chosen: Candidate) -> tuple[Candidate, DryRun] | None:
    keep_last, best = chosen.keep_last, None
    for _ in range(_MOST_CONFIRMATIONS):
        run = question.run(replace(chosen, keep_last=keep_last))
        if run.fits:
            best = replace(chosen, keep_last=keep_last, tokens_per_s=run.tokens_per_s), run
        elif not keep_last or not run.fits_host:
            return best
        room = _MARGIN * question.card.allocator_capacity_bytes - run.peak_reserved_bytes
        more = floor(room / chosen.kept_bytes) if chosen.kept_bytes else 0
        if run.fits and (more < 1 or keep_last == question.model.num_blocks):
            return best
        if not run.fits and best is not None:
            return best
        keep_last = max(0, min(question.model.num_blocks, keep_last + (more if run.fits else min(more, -1))))
    return best


def _bytes_at_head(run: DryRun) -> int:
    """Return what is live when the last step reaches the head: all that the forward pass keeps."""
    first = run.trace.steps[-1].op
    event = next(op.event for op in run.trace.ops[first:] if op.unit == "head")
    return list(run.trace.live_bytes())[event - 1]


def _may_fit(question: Question, level: Numerics, arrangement: Arrangement) -> bool:
    """Rule out by arithmetic what cannot fit: bytes per parameter against card and host."""
    grad_bytes = 0 if arrangement.fuses else level.grad_bytes
    on_card = on_host = 0.0
    for size, is_away in (
        (level.weight_bytes, arrangement.streams),
        (level.state_bytes, arrangement.offloads_state),
        (grad_bytes, arrangement.offloads_state),
    ):
        on_host += size if is_away else 0
        on_card += 0 if is_away else size
    params = question.model.num_params
    return on_host * params < question.host.tensor_bytes and on_card * params < question.card.allocator_capacity_bytes


def _fit(
    question: Question, level: Numerics, arrangement: Arrangement, on_try: Callable[[str], None]
) -> Candidate | None:
    """Return the fastest micro-batch with the least recomputation that fits.

    A smaller micro-batch leaves room to keep more blocks and hides fewer copies: sizes go down while that pays.
    """
    best: Candidate | None = None
    tokens = question.num_sequences * question.seq_len
    for size in _sizes(question):
        on_try(f"{level.name}, {arrangement.name}: {size} x {question.seq_len}")
        line = _Line(question, level, arrangement, size)
        keep_last = line.most_kept()
        if keep_last is None:
            continue
        tokens_per_s = tokens / line.seconds(keep_last)
        if best is not None and tokens_per_s <= best.tokens_per_s:
            break
        best = Candidate(
            level=level, arrangement=arrangement, micro_batch_size=size,
            num_micro_batches=question.num_sequences // size, keep_last=keep_last, kept_bytes=line.kept_bytes,
            tokens_per_s=tokens_per_s,
        )  # fmt: skip
    return best


class _Line:
    """Bytes and seconds of one arrangement, extended from shallow models and few micro-batches."""

    def __init__(self, question: Question, level: Numerics, arrangement: Arrangement, size: int) -> None:
        self._question = question
        self._keeps = not arrangement.fuses
        self._depth = question.model.num_blocks
        self._count = question.num_sequences // size
        shallow, deep = min(4, self._depth), min(6, self._depth)
        few = min(2, self._count)
        more = min(3, self._count)

        def probe(depth: int, count: int, keep_last: int) -> DryRun:
            model = replace(question.model, num_blocks=depth)
            candidate = Candidate(
                level=level, arrangement=arrangement, micro_batch_size=size, num_micro_batches=count,
                keep_last=keep_last,
            )  # fmt: skip
            return replace(question, model=model).run(candidate)

        self._base = probe(shallow, few, 0)
        self._deep = probe(deep, few, 0) if deep > shallow else self._base
        self._many = probe(shallow, more, 0) if more > few else self._base
        self._deep_many = probe(deep, more, 0) if deep > shallow and more > few else self._many
        self._kept = probe(shallow, few, 2) if self._keeps and shallow > 2 else self._base
        self._steps = (deep - shallow, more - few)
        self._extra = (self._depth - shallow, self._count - few)
        self._few = few
        self.kept_bytes = (_bytes_at_head(self._kept) - _bytes_at_head(self._base)) / 2

    def most_kept(self) -> int | None:
        """Return how many blocks may keep their activations; None when it does not fit at all."""
        question = self._question
        device = self._extended(lambda run: float(run.peak_reserved_bytes))
        host = self._extended(lambda run: float(run.host_peak_bytes))
        capacity = _MARGIN * question.card.allocator_capacity_bytes
        if device > capacity or host > question.host.tensor_bytes:
            return None
        return min(self._depth, int((capacity - device) / self.kept_bytes)) if self.kept_bytes else 0

    def seconds(self, keep_last: int) -> float:
        """Return the seconds of a whole step."""
        saved = (self._base.time.seconds - self._kept.time.seconds) / 2 * self._count / self._few
        return self._extended(lambda run: run.time.seconds) - keep_last * saved

    def _extended(self, figure: Callable[[DryRun], float]) -> float:
        base, deep, many, both = (figure(run) for run in (self._base, self._deep, self._many, self._deep_many))
        depth = self._extra[0] / self._steps[0] if self._steps[0] else 0.0
        count = self._extra[1] / self._steps[1] if self._steps[1] else 0.0
        return base + depth * (deep - base) + count * (many - base) + depth * count * (both - deep - many + base)


def _sizes(question: Question) -> Iterator[int]:
    """Yield micro-batch sizes from the largest down: powers of two that divide the step's sequences."""
    largest = max(1, _VISIT_TOKENS // question.seq_len)
    size = 1 << (largest.bit_length() - 1)
    while size:
        if question.num_sequences % size == 0:
            yield size
        size //= 2


def _nothing_fits(question: Question) -> str:
    harshest = LEVELS[-1]
    needed = harshest.weight_bytes * question.model.num_params
    host = replace(question.host, memory_gib=None)
    short = Question(question.model, question.card, host, question.seq_len, question.num_sequences)
    smallest = Candidate(
        level=harshest, arrangement=ARRANGEMENTS[-1], micro_batch_size=1, num_micro_batches=1, keep_last=0
    )
    run = short.run(smallest)
    return (
        f"nothing fits: the smallest stack tried takes {format_bytes(run.device_used_bytes)} of "
        f"{format_bytes(question.card.memory_bytes)} on the card and {format_bytes(run.host_peak_bytes)} of "
        f"{format_bytes(question.host.tensor_bytes)} of host memory (weights alone {needed / GIB:.1f} GiB); "
        "take a smaller --seq, a larger card, or more host memory."
    )

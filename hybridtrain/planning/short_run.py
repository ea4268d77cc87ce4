"""A training option, estimated from short runs: forward and backward passes of three blocks, and the update of two.

The middle block stands for every recomputed one that is left out, the last one for every kept one, the last micro-batch
for those that follow. What a block waits for is counted to it, so that a bus that cannot keep up is in its share. Bytes
of what is left out are arithmetic's. All figures are ``estimated``; a whole dry run says how far off they are.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hybridtrain.data.batches import TokenBatch
from hybridtrain.engine.step_visit import upload_batch
from hybridtrain.kernel_rules import rules_of
from hybridtrain.memory.group import VirtualGroup
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig, Workload, block_params
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optim.adafactor import Adafactor
from hybridtrain.plan.compose import compose
from hybridtrain.plan.placement import Placement
from hybridtrain.planning.candidates import Arrangement, Candidate, FitRequest, Numerics
from hybridtrain.planning.dry_runs import DryRun, on_links, record_steps
from hybridtrain.planning.plan_bytes import PlanBytes, bytes_of
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.lean_meta import bypass_meta_wrappers
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.allocator.replay import replay_trace
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck, TimedOp, estimate_step

_BLOCKS = 3
"""Two recomputed ones, and one that keeps its activations."""
_MICRO_BATCHES = {False: 2, True: 4}
"""At most run, by whether a block is visited by all of them at once."""
_SUMMED_MICRO_BATCHES = 3
"""Of several cards, which sum their gradients in the last."""
_NO_TOKENS = Workload(micro_batch_size=1, seq_len=8)
_FEW_WORDS = 64
_UPDATED_BLOCKS = 2
"""The one updated last is measured: weights of the other are written back beside it."""
_MANY_PARAMS = 2**29
"""Of a block that is updated with a narrower feed-forward part: a parameter takes as long, within 1.1 % at 50B."""


class _Shares(NamedTuple):
    """Seconds of one micro-batch: everything but blocks, and one block of each kind."""

    rest: float
    recomputed: float
    kept: float


class _Passes:
    """Forward and backward passes of a few micro-batches through a few blocks, one of them kept; without an update."""

    def __init__(self, request: FitRequest, candidate: Candidate) -> None:
        self.candidate, self.fuses = candidate, candidate.arrangement.fuses
        self.model = _of_few_blocks(request.model)
        plan = compose(candidate.optimizations())
        size, length, count = candidate.micro_batch_size, request.seq_len, candidate.num_micro_batches
        empty = np.zeros((size, length), dtype=np.int64)
        batch = TokenBatch(token_ids_BT=empty, target_ids_BT=empty)
        transfer, ledger = VirtualTransfer(), StorageLedger()
        ledger.scratch_rules = rules_of(request.card)
        with bypass_meta_wrappers(), ledger:
            config = TrainerConfig(optimizer=OPTIMIZERS[candidate.level.optimizer]())
            trainer = Trainer(self.model, plan, config, transfer, ledger, group=_group_of(request))
            ledger.begin_step()
            with ledger.region(Stage.LOAD, ""):
                batches = [upload_batch(batch, transfer) for _ in range(count)]
            grads = trainer.executor.grads
            trainer.executor.forward_backward(
                batches, seed=0, on_block_done=(lambda unit: grads.take(unit.name)) if self.fuses else None
            )
        self.trace, self.upload_bytes = ledger.trace(), 2 * count * empty.nbytes
        self.host_bytes = transfer.host_bytes + transfer.tiers.peak_bytes(Placement.HOST)
        self._reserved: dict[int, int] = {}

    def device_bytes(self, card: Card) -> int:
        """Return the peak bytes of a card, CUDA context included."""
        workspace = card.cublas_workspace_bytes
        if workspace not in self._reserved:
            self._reserved[workspace] = replay_trace(self.trace, workspace_bytes=workspace).steps[-1].reserved_bytes
        return self._reserved[workspace] + card.context_bytes


class _PassTimes:
    """Seconds of such passes on a card."""

    def __init__(self, passes: _Passes, request: FitRequest) -> None:
        trace, card = passes.trace, request.card
        time = estimate_step(
            on_links(trace.step_ops(0), card, request.world, is_pipeline=False), card,
            upload_bytes=passes.upload_bytes, first=trace.steps[0].op, host=request.rank_host,
        )  # fmt: skip
        self._fuses, self._depth = passes.fuses, passes.model.num_blocks
        self.by_bound, self.spread = time.seconds_by_bound, time.spread
        self.shares = tuple(self._shared(part) for part in self._by_unit(time.ops))

    def _by_unit(self, ops: Sequence[TimedOp]) -> list[defaultdict[str, float]]:
        """Return the seconds of each unit, by micro-batch where they pass one by one."""
        parts: list[defaultdict[str, float]] = [defaultdict(float)]
        clock, has_returned = 0.0, False
        for timed in (timed for timed in ops if timed.op.lane is Lane.COMPUTE):
            op, end = timed.op, timed.start_s + timed.duration_s
            if op.stage is Stage.FORWARD and op.unit == "embedding" and has_returned and not self._fuses:
                parts.append(defaultdict(float))
            has_returned = op.stage is Stage.BACKWARD
            parts[-1][op.unit] += end - clock
            clock = end
        return parts

    def _shared(self, seconds: defaultdict[str, float]) -> _Shares:
        middle, last = f"block.{max(0, self._depth - 2)}", f"block.{self._depth - 1}"
        rest = sum(value for unit, value in seconds.items() if not unit.startswith("block."))
        return _Shares(rest, seconds[middle], seconds[middle if self._fuses else last])


class _Update(NamedTuple):
    seconds_per_param: float
    bound: Bottleneck


class ShortRuns:
    """Short runs, each made once: of one model or several, at any length. Cards, hosts and links share them."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _Passes] = {}
        self._pass_times: dict[Hashable, _PassTimes] = {}
        self._updates: dict[Hashable, LedgerTrace] = {}
        self._update_times: dict[Hashable, _Update] = {}

    def of(self, request: FitRequest, candidate: Candidate) -> "ShortRun":
        """Return the short run of a candidate, whatever number of blocks it keeps."""
        level, arrangement = candidate.level, candidate.arrangement
        most = _MICRO_BATCHES[arrangement.fuses] if candidate.world == 1 else _SUMMED_MICRO_BATCHES
        few = min(candidate.num_micro_batches, most)
        key = (
            _of_few_blocks(request.model), request.seq_len, candidate.world, few, arrangement,
            candidate.micro_batch_size, level.accumulator, level.weight_bytes, level.trains_adapters, request.matmul,
            request.card.has_bfloat16_tensor_cores,  # decides on the kernels
        )  # fmt: skip
        if key not in self._passes:
            short = replace(candidate, num_micro_batches=few, keep_last=int(not arrangement.fuses), resident_layers=0)
            self._passes[key] = _Passes(request, short)
        return ShortRun(request, candidate, self._passes[key], self)

    def pass_times(self, request: FitRequest, passes: _Passes) -> _PassTimes:
        """Return the times of passes on the request's card."""
        key = (id(passes), request.card, request.host, request.world)  # passes live as long as this
        if key not in self._pass_times:
            self._pass_times[key] = _PassTimes(passes, request)
        return self._pass_times[key]

    def update_time(self, request: FitRequest, level: Numerics, arrangement: Arrangement) -> _Update:
        """Return the time of an update on the request's card."""
        if level.trains_adapters:
            return _Update(0.0, Bottleneck.OPTIMIZER)  # of a hundredth of the parameters
        model = replace(request.model, num_blocks=_UPDATED_BLOCKS, vocab_size=_FEW_WORDS)
        if block_params(model) > _MANY_PARAMS:
            model = replace(model, ffn_width=min(model.ffn_width, model.width))
        of_trace = (model, level, arrangement, request.world.size)
        if of_trace not in self._updates:
            self._updates[of_trace] = _update_trace(request, model, level, arrangement)
        key = (of_trace, request.card, request.host, request.world)
        if key not in self._update_times:
            self._update_times[key] = _update_time(request, model, arrangement, self._updates[of_trace])
        return self._update_times[key]


def _of_few_blocks(model: ModelConfig) -> ModelConfig:
    return replace(model, num_blocks=min(_BLOCKS, model.num_blocks))


def _update_trace(request: FitRequest, model: ModelConfig, level: Numerics, arrangement: Arrangement) -> LedgerTrace:
    candidate = Candidate(
        level=level, arrangement=arrangement, micro_batch_size=1, num_micro_batches=1, keep_last=0,
        world=request.world.size,
    )  # fmt: skip
    empty = np.zeros((1, _NO_TOKENS.seq_len), dtype=np.int64)
    batches = [[TokenBatch(token_ids_BT=empty, target_ids_BT=empty)]] * 2  # the first step makes the state
    config = TrainerConfig(optimizer=OPTIMIZERS[level.optimizer]())
    plan, group = compose(candidate.optimizations()), _group_of(request)
    return record_steps(model, plan, batches, VirtualTransfer(), config, group=group)


def _update_time(request: FitRequest, model: ModelConfig, arrangement: Arrangement, trace: LedgerTrace) -> _Update:
    card, world = request.card, request.world
    time = estimate_step(
        on_links(trace.step_ops(1), card, world, is_pipeline=False), card, upload_bytes=0, first=trace.steps[1].op,
        host=request.rank_host,
    )  # fmt: skip
    clock = seconds = 0.0
    measured = f"block.{0 if arrangement.fuses else _UPDATED_BLOCKS - 1}"
    for timed in (timed for timed in time.ops if timed.op.lane is Lane.COMPUTE):
        end = timed.start_s + timed.duration_s
        seconds += end - clock if timed.op.stage is Stage.UPDATE and timed.op.unit == measured else 0.0
        clock = end
    by_bound = {b: s for b, s in time.seconds_by_bound.items() if b not in {Bottleneck.COMPUTE, Bottleneck.MEMORY}}
    return _Update(seconds / block_params(model), max(by_bound, key=lambda bound: by_bound[bound]))


def _group_of(request: FitRequest) -> VirtualGroup | None:
    return VirtualGroup(0, request.world.size) if request.world.size > 1 else None


@dataclass(frozen=True, slots=True)
class ShortRun:
    """A candidate's figures, extended from short runs. Bytes are known without times."""

    request: FitRequest
    candidate: Candidate
    passes: _Passes
    runs: ShortRuns

    def seconds(self, kept: int) -> float:
        """Return the seconds of a whole step."""
        return self._passing(kept) + self._updating

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the true seconds over the estimate."""
        return self._times.spread

    def bound(self, kept: int) -> Bottleneck:
        """Return the bottleneck of a step."""
        passing, by_bound = self._passing(kept), self._times.by_bound
        share = passing / sum(by_bound.values())
        parts = defaultdict[Bottleneck, float](float, {b: share * s for b, s in by_bound.items()})
        parts[self._update.bound] += self._updating
        return max(parts, key=lambda bound: parts[bound])

    def computing(self, kept: int) -> float:
        """Return the seconds of a step in which the card computes or moves its own memory, update apart."""
        by_bound = self._times.by_bound
        busy = sum(by_bound.get(bound, 0.0) for bound in (Bottleneck.COMPUTE, Bottleneck.MEMORY))
        return self._passing(kept) * busy / sum(by_bound.values())

    @property
    def _times(self) -> _PassTimes:
        return self.runs.pass_times(self.request, self.passes)

    @property
    def _update(self) -> _Update:
        return self.runs.update_time(self.request, self.candidate.level, self.candidate.arrangement)

    def _passing(self, kept: int) -> float:
        count, few = self.candidate.num_micro_batches, self.passes.candidate.num_micro_batches
        again = self.request.model.num_blocks - kept
        parts = [share.rest + again * share.recomputed + kept * share.kept for share in self._times.shares]
        if self.candidate.arrangement.fuses:  # where the norm must be known before the first update, once more for it
            return (2 if self.request.clip == "exact" else 1) * parts[0] * count / few
        return sum(parts) + (count - few) * parts[_typical(self.candidate, len(parts))]

    @property
    def _updating(self) -> float:
        return self._update.seconds_per_param * self.request.model.num_params

    def device_bytes(self, kept: int) -> float:
        """Return the peak bytes of the card, CUDA context included."""
        return self.passes.device_bytes(self.request.card) + self._difference(kept)[0]

    def host_bytes(self, kept: int) -> float:
        """Return the peak bytes of host memory."""
        return self.passes.host_bytes + self._difference(kept)[1]

    def most_kept(self, capacity_bytes: float) -> int | None:
        """Return how many blocks may keep their activations on a card; None where not even none do."""
        if self.device_bytes(0) > capacity_bytes or self.host_bytes(0) > self.request.rank_host.tensor_bytes:
            return None
        if self.candidate.arrangement.fuses:
            return 0
        low, high = 0, self.request.model.num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.device_bytes(middle) <= capacity_bytes else (low, middle - 1)
        return low

    def _difference(self, kept: int) -> tuple[float, float]:
        """Return by how much the whole model takes more than the passes of the short one, on card and host."""
        whole = arithmetic(self.request, self.request.model, replace(self.candidate, keep_last=kept))
        short = arithmetic(self.request, self.passes.model, self.passes.candidate, has_state=False)
        return whole.card - short.card, whole.host - short.host


def arithmetic(request: FitRequest, model: ModelConfig, candidate: Candidate, *, has_state: bool = True) -> PlanBytes:
    """Return the bytes of a candidate by arithmetic; without moments if no update has been run."""
    return _arithmetic(request.seq_len, model, replace(candidate, kept_bytes=0.0, tokens_per_s=0.0), has_state)


@lru_cache(maxsize=65536)
def _arithmetic(seq_len: int, model: ModelConfig, candidate: Candidate, has_state: bool) -> PlanBytes:
    plan = compose(candidate.optimizations())
    workload = Workload(micro_batch_size=candidate.micro_batch_size, seq_len=seq_len)
    optimizer = OPTIMIZERS[candidate.level.optimizer]() if has_state else Adafactor()
    return _cut(bytes_of(model, plan, workload, optimizer), model, candidate, has_state)


def _cut(whole: PlanBytes, model: ModelConfig, candidate: Candidate, has_state: bool) -> PlanBytes:
    arrangement, level = candidate.arrangement, candidate.level
    if not arrangement.zero_stage:
        return whole
    others, block = 1 - 1 / candidate.world, block_params(model)
    card, host = whole.card, whole.host
    state = others * model.num_params * (level.state_bytes if has_state else level.master_bytes)
    if arrangement.offloads_state:
        host -= state
    else:
        card -= state
    if arrangement.cuts_weights:
        host -= others * model.num_blocks * block * level.weight_bytes
        card += block * level.weight_bytes  # gathered
    return PlanBytes(card=card, host=host, disk=whole.disk)


def batch_bytes(request: FitRequest, candidate: Candidate) -> int:
    """Return the bytes of tokens and targets of one micro-batch, two int64 tensors."""
    return 2 * 8 * candidate.micro_batch_size * request.seq_len


def _typical(candidate: Candidate, count: int) -> int:
    """Return which of a few micro-batches stands for those that are not run: the last that sums nothing over cards."""
    return -1 if candidate.world == 1 or count == 1 else -2


def typical_pass_seconds(run: DryRun, candidate: Candidate) -> float:
    """Return how long such a one of a horizontal schedule passes forward and backward, waiting included."""
    starts, end = list[float](), 0.0
    has_returned = True
    for timed in (timed for timed in run.time.ops if timed.op.lane is Lane.COMPUTE):
        if timed.op.stage is Stage.FORWARD and timed.op.unit == "embedding" and has_returned:
            starts.append(end)
        has_returned = timed.op.stage is Stage.BACKWARD
        if timed.op.stage in {Stage.FORWARD, Stage.BACKWARD}:
            end = timed.start_s + timed.duration_s
    passes = [stop - start for start, stop in pairwise([*starts, end])]
    return passes[_typical(candidate, len(passes))]

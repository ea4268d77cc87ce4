"""Fetching ahead costs no copy more than fetching on demand, and every copy but a pass's first is under way in time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.optimizations import (
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Weights,
    MixedPrecision,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage
from tiny_models import GPT2_UNTIED, random_steps

NUM_BLOCKS = 6
MODEL = replace(GPT2_UNTIED, num_blocks=NUM_BLOCKS)
RESIDENT: dict[int, set[int]] = {0: set(), 1: {5}, 2: {2, 5}, 3: {1, 3, 5}, 5: {1, 2, 3, 4, 5}}
"""By number, spread evenly."""


@dataclass(frozen=True)
class Case:
    """One way of streaming."""

    slots: int = 2
    ahead: int = 1
    resident: int = 0
    interval: int = 0
    accum_steps: int = 1
    vertical: bool = False
    fused: bool = False

    @property
    def stack(self) -> list[Optimization]:
        schedule = "vertical" if self.vertical else "horizontal"
        stack: list[Optimization] = [
            WeightStreaming(max_active_layers=self.slots, prefetch_distance=self.ahead, resident_layers=self.resident),
            GradAccumulation(grad_accum_steps=self.accum_steps, schedule=schedule),
        ]
        stack += [GradientCheckpointing(recompute_every=self.interval)] if self.interval else []
        return [*stack, FusedUpdate()] if self.fused else stack

    def passes(self) -> Iterator[int]:
        """Yield the blocks that one forward and backward pass over all micro-batches asks for, in order."""
        groups = 1 if self.vertical else self.accum_steps
        size = self.accum_steps if self.vertical else 1
        interval = self.interval or 1
        for _ in range(groups):
            yield from range(NUM_BLOCKS)
            for start in reversed(range(0, NUM_BLOCKS, interval)):
                segment = range(start, min(start + interval, NUM_BLOCKS))
                for _ in range(size):
                    if self.interval:
                        yield from segment
                    yield from reversed(segment)
                if self.fused:
                    yield from reversed(segment)

    def step(self) -> list[list[int]]:
        """Return the blocks of each pass of a step; exact clipping runs a fused step's pass twice."""
        if self.fused:
            return [[*self.passes()], [*self.passes()]]
        return [[*self.passes()], [*range(NUM_BLOCKS)]]

    def fetched(self) -> list[tuple[int, bool]]:
        """Return the blocks that a step after the first must fetch, each slot keeping its last block.

        With each block comes whether that can begin only when it is asked for: nobody knew before, as at the beginning
        of a pass, or the streamed block before it is in its slot.
        """
        streamed = [block for block in range(NUM_BLOCKS) if block not in RESIDENT[self.resident]]
        slot_of = {block: rank % self.slots for rank, block in enumerate(streamed)}
        held: dict[int, int] = {}
        fetched: list[tuple[int, bool]] = []
        for _ in range(2):
            fetched = []
            for asked_for in self.step():
                before: int | None = None
                for block in asked_for:
                    if block in slot_of and held.get(slot_of[block]) != block:
                        held[slot_of[block]] = block
                        fetched.append((block, before is None or slot_of[before] == slot_of[block]))
                    before = block if block in slot_of else before
        return fetched


def copies_in(stack: Sequence[Optimization], accum_steps: int, step: int = 1) -> list[OpRecord]:
    batches = random_steps(MODEL, step + 1, accum_steps)
    trace = record_steps(MODEL, compose(stack), batches, VirtualTransfer())
    return [op for op in trace.step_ops(step) if op.lane is Lane.COPY_IN]


CASES = [
    Case(slots=1, ahead=0),
    Case(ahead=0),
    Case(),
    Case(accum_steps=3),
    Case(accum_steps=3, vertical=True),
    Case(interval=1),
    Case(interval=1, accum_steps=3, vertical=True),
    Case(slots=3),
    Case(slots=3, ahead=2),
    Case(slots=3, ahead=2, interval=1),
    Case(slots=4, ahead=2),
    Case(slots=5, ahead=1),
    Case(slots=6, ahead=3),
    Case(interval=2),
    Case(slots=3, interval=2),
    Case(slots=3, ahead=2, interval=2),
    Case(slots=3, ahead=1, interval=3, accum_steps=2, vertical=True),
    Case(slots=4, ahead=3, interval=3),
    Case(resident=1),
    Case(resident=2, interval=1),
    Case(resident=2, interval=2, slots=3, ahead=2),
    Case(resident=1, accum_steps=3),
    Case(resident=5, slots=1, ahead=0),
    Case(fused=True),
    Case(fused=True, interval=1, accum_steps=2, vertical=True),
    Case(fused=True, interval=2, slots=3, ahead=1),
    Case(fused=True, resident=2, interval=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fetching_ahead_copies_nothing_twice_and_every_copy_that_can_begin_early_does(case: Case) -> None:
    ops = copies_in(case.stack, case.accum_steps)
    assert len(ops) == len(case.fetched())
    if case.ahead:
        assert late_blocks(ops, case) == [block for block, is_late in case.fetched() if is_late]


def late_blocks(ops: Sequence[OpRecord], case: Case) -> list[int]:
    """Return the blocks whose copies began only when they were asked for."""
    pairs = zip(ops, case.fetched(), strict=True)
    return [block for op, (block, _) in pairs if op.unit == f"block.{block}"]


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_with_two_slots_only_the_first_block_of_a_pass_is_late(resident: int) -> None:
    # By hand, for the arithmetic above: neighbours are never in one slot.
    case = Case(resident=resident, interval=1)
    assert [block for block, is_late in case.fetched() if is_late] == [0]
    assert {block for block, _ in case.fetched()} <= set(range(NUM_BLOCKS)) - RESIDENT[resident]


def test_every_block_is_fetched_once_forward_and_once_backward_but_for_those_in_slots() -> None:
    # By hand, for 6 blocks in 2 slots: 6 forward; backward finds 5 and 4 and fetches 3, 2, 1, 0; the update finds 0
    # and 1 and fetches the others; forward begins anew.
    ops = copies_in(Case().stack, 1)
    assert [(op.stage, op.unit) for op in ops] == [
        (Stage.FORWARD, "block.0"),
        (Stage.FORWARD, "block.0"),
        (Stage.FORWARD, "block.1"),
        (Stage.FORWARD, "block.2"),
        (Stage.FORWARD, "block.3"),
        (Stage.FORWARD, "block.4"),
        (Stage.BACKWARD, "block.4"),
        (Stage.BACKWARD, "block.3"),
        (Stage.BACKWARD, "block.2"),
        (Stage.BACKWARD, "block.1"),
        (Stage.UPDATE, "block.1"),
        (Stage.UPDATE, "block.2"),
        (Stage.UPDATE, "block.3"),
        (Stage.UPDATE, "block.4"),
    ]


def test_more_micro_batches_in_one_visit_fetch_no_more() -> None:
    cases = [Case(accum_steps=count, vertical=True, interval=1) for count in (1, 2, 5)]
    assert len({len(copies_in(case.stack, case.accum_steps)) for case in cases}) == 1


def test_weights_with_a_separate_master_are_not_fetched_for_the_update() -> None:
    ops = copies_in([WeightStreaming(), MixedPrecision()], 1)
    assert not [op for op in ops if op.stage is Stage.UPDATE]


@pytest.mark.parametrize("master", ["float32", "split16", "absent"])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_fused_update_does_not_disturb_fetching_ahead(master: str, interval: int) -> None:
    case = Case(fused=True, interval=interval, slots=3, ahead=1)
    ops = copies_in([*case.stack, MixedPrecision(master=master)], 1)
    assert late_blocks(ops, case) == [block for block, is_late in case.fetched() if is_late]


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (2, 1), (4, 1), (4, 3)])
def test_8_bit_blocks_wait_in_as_many_places_as_are_fetched_ahead(slots: int, ahead: int) -> None:
    streaming = WeightStreaming(max_active_layers=slots, prefetch_distance=ahead)
    ops = copies_in([streaming, Int8Weights(master="absent"), GradientCheckpointing(recompute_every=1)], 1)
    case = Case(slots=ahead + 1, ahead=ahead, interval=1)
    assert len(ops) == len(case.fetched())
    assert len({op.bytes_moved for op in ops}) == 1

"""State that waits on the host comes back before PREDICT ends, beside the next step, or before it: the same numbers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from hybrid_runs import (
    CONFIGS,
    HybridHistory,
    assert_same_cycles,
    fresh_hybrid,
    hybrid_config,
    hybrid_history,
    memory_of,
)
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.optimizations import MixedPrecision, PredictMemory, WeightStreaming
from hybridtrain.phase import Phase
from hybridtrain.virtual_gpu import find_card
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord
from hybridtrain.virtual_gpu.cards.card import Host
from hybridtrain.virtual_gpu.cards.roofline import estimate_step
from lazy_transfer import ComputeWatch, LazyTransfer
from tiny_models import GPT2_TIED_DROPOUT, LLAMA_GROUPED, random_steps

AT_THE_END, AHEAD, FAR_AHEAD = (PredictMemory(restore_lookahead=steps) for steps in (0, 1, 100))
WAITS = PredictMemory(async_restore=False)
NAMES = {AT_THE_END: "at the end", AHEAD: "ahead", FAR_AHEAD: "far ahead", WAITS: "waits"}


EVERYWHERE, IN_PREDICT = MixedPrecision(), MixedPrecision(active_phases=(Phase.PREDICT,))
"""Of the second the master moves with the weights, of the first with the state."""


@cache
def run_of(memory: PredictMemory, precision: MixedPrecision, config: str) -> HybridHistory:
    stack = [memory, precision, memory_of(CONFIGS[config], "float32")]
    return hybrid_history(GPT2_TIED_DROPOUT, stack, CONFIGS[config])


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("memory", [AHEAD, FAR_AHEAD, WAITS], ids=NAMES.get)
@pytest.mark.parametrize("precision", [EVERYWHERE, IN_PREDICT], ids=["16 bits", "16 bits in predict"])
@pytest.mark.parametrize("config", ["slow-separate", "slow-copy", "slow-every-step", "linear-every-step"])
def test_when_state_comes_back_changes_no_number(config: str, precision: MixedPrecision, memory: PredictMemory) -> None:
    assert_same_cycles(run_of(memory, precision, config), run_of(AT_THE_END, precision, config))


@pytest.mark.parametrize("config", ["slow-every-step", "linear-probe"])
def test_pieces_of_a_jump_wait_for_what_comes_back_meanwhile(config: str) -> None:
    transfer = LazyTransfer()
    stack = [FAR_AHEAD, WeightStreaming(), MixedPrecision(), memory_of(CONFIGS[config], "float32")]
    with ComputeWatch(transfer):
        late = hybrid_history(GPT2_TIED_DROPOUT, stack, CONFIGS[config], transfer=transfer, num_steps=4)
    assert transfer.hazards == []
    assert transfer.most_pending > 0
    direct = hybrid_history(GPT2_TIED_DROPOUT, stack, CONFIGS[config], num_steps=4)
    assert_same_cycles(late, direct)


WIDE = replace(LLAMA_GROUPED, width=1024, ffn_width=4096)
"""So large that copies take longer than issuing kernels does."""


class Cycle:
    """Ops of the first PREDICT phase and of the step after it, in a dry run with a look at the probe batch."""

    def __init__(self, memory: PredictMemory) -> None:
        config = hybrid_config(monitor="probe", probe_every=1, guard=False)
        ledger, steps = StorageLedger(), random_steps(WIDE, 10)
        with ledger:
            stack = [memory, memory_of(config, "float32")]
            hybrid = fresh_hybrid(WIDE, stack, config, VirtualTransfer(), ledger)
            while hybrid.phase is not Phase.CORRECT:
                hybrid.trainer.enter_phase(hybrid.phase)
                ledger.begin_step()
                hybrid.advance(steps.__getitem__)
            ledger.begin_step()
            hybrid.advance(steps.__getitem__)
        trace, last = ledger.trace(), len(ledger.trace().steps) - 1
        self.predict, self.correct = trace.step_ops(last - 1), trace.step_ops(last)
        self.seconds = estimate_step(
            self.correct, find_card("rtx-4090"), upload_bytes=0, first=trace.steps[last].op, host=Host()
        ).seconds
        # Moments and slow average.
        self.state_bytes = 3 * 4 * hybrid.trainer.model.config.num_params

    @property
    def behind_the_probe(self) -> int:
        """Bytes that set out for the device before the last product of PREDICT, the probe's head."""
        products = [number for number, op in enumerate(self.predict) if op.is_matmul]
        return fetched(self.predict[: products[-1]])


def fetched(ops: Sequence[OpRecord]) -> int:
    return sum(op.bytes_moved for op in ops if op.lane is Lane.COPY_IN)


def test_a_look_at_the_probe_batch_hides_what_comes_back() -> None:
    ahead, at_end = Cycle(AHEAD), Cycle(AT_THE_END)
    assert ahead.behind_the_probe - at_end.behind_the_probe == ahead.state_bytes
    assert fetched(at_end.correct) - fetched(ahead.correct) == ahead.state_bytes
    assert ahead.seconds < at_end.seconds


def test_a_step_that_waits_for_its_state_takes_longer() -> None:
    waits, at_end = Cycle(WAITS), Cycle(AT_THE_END)
    assert fetched(waits.correct) == fetched(at_end.correct)
    assert waits.seconds > at_end.seconds

"""Plans that change at the borders of phases: what FULL trains stays what it would have been, to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints import save_checkpoint
from hybridtrain.checkpoint import load_checkpoint
from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import PlanConflictError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridResult, HybridTrainer
from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import (
    ActivationOffload,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    PredictMemory,
    PredictorState,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from lazy_transfer import ComputeWatch, LazyTransfer
from stacks import ADAFACTOR
from tiny_models import GPT2_TIED_DROPOUT, LLAMA_GROUPED, random_batch, random_steps
from training_history import assert_all_bitwise, read_stored, stored_state, stored_weights

CYCLE = HybridConfig(warmup_steps=1, full_steps=1, fuse=False, forecaster="ema")
SETTINGS = TrainerConfig(
    optimizer=AdamWConfig(lr=3e-3, max_grad_norm=0.25), schedule=LrSchedule(warmup_steps=1, total_steps=20)
)

NUM_STEPS = 4
WARMUP, FULL, PREDICT, CORRECT = Phase
STEPS = (WARMUP, FULL, CORRECT)
Stack = Sequence[Optimization]


@dataclass(frozen=True)
class Wish:
    """Any claim."""

    claim: Claim
    kind: str = "wish"

    def claims(self) -> list[Claim]:
        return [self.claim]


def on_cpu(folder: Path | None = None) -> DirectTransfer:
    return DirectTransfer(torch.device("cpu"), disk_folder=folder)


def new_hybrid(
    stack: Stack,
    transfer: Transfer,
    config: HybridConfig = CYCLE,
    model: ModelConfig = GPT2_TIED_DROPOUT,
    observer: MemoryObserver | None = None,
) -> HybridTrainer:
    plan = compose([*stack, PredictorState()])
    trainer = Trainer(model, plan, SETTINGS, transfer, observer)
    accum_steps = plan.for_phase(FULL).grad_accum_steps

    def load_probe(number: int) -> list[TokenBatch]:
        rng = np.random.default_rng(1000 + number)
        return [random_batch(model, rng) for _ in range(accum_steps)]

    return HybridTrainer(trainer, config, load_probe)


@dataclass
class Found:
    """What a run left behind, in FULL."""

    results: list[HybridResult] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    host: dict[TensorClass, int] = field(default_factory=dict)

    @property
    def steps(self) -> list[tuple[float | None, ...]]:
        return [(r.loss, r.grad_norm, r.lr) for r in self.results if r.phase is not PREDICT]

    @property
    def jumps(self) -> list[tuple[float, ...]]:
        return [(r.step, r.predicted_steps, r.move_rms) for r in self.results if r.phase is PREDICT]


def run_on(hybrid: HybridTrainer, num_steps: int = NUM_STEPS, ledger: StorageLedger | None = None) -> Found:
    """Run until so many true steps are done."""
    trainer, found = hybrid.trainer, Found()
    steps = random_steps(trainer.model.config, NUM_STEPS, trainer.plan.grad_accum_steps)
    while trainer.steps_done < num_steps:
        if ledger is not None:
            ledger.begin_step()
        found.results.append(hybrid.advance(lambda number: steps[number]))
    return found


def look_into(hybrid: HybridTrainer, found: Found) -> Found:
    trainer = hybrid.trainer
    trainer.enter_phase(FULL)
    for unit in trainer.model.units():
        trainer.states.acquire(unit)
    trainer.transfer.finish()
    found.weights, found.state = stored_weights(trainer), stored_state(trainer)
    for unit in trainer.model.units():
        for (name, _), state in zip(unit.parameters, trainer.states.of(unit.name), strict=True):
            extra = (tensor for slot in state.extra for tensor in slot.tensors)
            found.state |= {f"{name}.history": read_stored(tensor).flatten() for tensor in extra}
    found.host = trainer.transfer.tiers.by_class(Placement.HOST)
    return found


def trained(
    stack: Stack, transfer: Transfer, config: HybridConfig = CYCLE, model: ModelConfig = GPT2_TIED_DROPOUT
) -> Found:
    hybrid = new_hybrid(stack, transfer, config, model)
    found = look_into(hybrid, run_on(hybrid))
    transfer.close()
    return found


def assert_same(actual: Found, expected: Found) -> None:
    assert [result.phase for result in expected.results][:4] == [WARMUP, FULL, PREDICT, CORRECT]
    assert expected.jumps[0][1] > 0
    assert actual.steps == expected.steps
    assert actual.jumps == expected.jumps
    assert_all_bitwise(actual.weights, expected.weights, "weight ")
    assert_all_bitwise(actual.state, expected.state, "state ")


VERTICAL = GradAccumulation(grad_accum_steps=2, schedule="vertical")
BASES: dict[str, list[Optimization]] = {
    "fp32": [],
    "bf16": [MixedPrecision()],
    "bf16-split": [MixedPrecision(master="split16")],
    "bf16-alone": [MixedPrecision(master="absent")],
    "int8-alone": [Int8Weights(master="absent")],
    "int8-alone-bf16": [Int8Weights(master="absent"), MixedPrecision(master="absent")],
    "int8-state": [Int8Optimizer()],
    "factored": [ADAFACTOR],
    "host-update": [OptimizerOffload(update_on="host")],
    "host-update-bf16": [OptimizerOffload(update_on="host"), MixedPrecision(master="split16")],
    "away": [OptimizerOffload(), VERTICAL, GradientCheckpointing(recompute_every=2), ActivationOffload()],
    "disk": [OptimizerOffload(tier="disk"), MixedPrecision()],
    "fused": [FusedUpdate(), MixedPrecision(master="split16")],
}


@cache
def plain(base: str) -> Found:
    """Return a run whose plans are the same in every phase."""
    with TemporaryDirectory() as folder:
        return trained(BASES[base], on_cpu(Path(folder)))


INT8 = Int8Weights(active_phases=(PREDICT,))
RESIDENT_WARMUP = WeightStreaming(active_phases=(FULL, PREDICT, CORRECT))
STREAMED_STEPS = WeightStreaming(
    max_active_layers=3, prefetch_distance=2, resident_layers=1, active_phases=(FULL, CORRECT)
)
STREAMED_PREDICT = WeightStreaming(max_active_layers=1, active_phases=(PREDICT,))
FROM_DISK = WeightStreaming(tier="disk", active_phases=(FULL, PREDICT))
PARTLY = GradientCheckpointing(recompute_every=3, kept_blocks=1, active_phases=(FULL, CORRECT))


def wide_predict(name: str) -> list[Optimization]:
    """Return a 16-bit base that is in 32 bits in PREDICT."""
    (precision,) = [item for item in BASES[name] if isinstance(item, MixedPrecision)]
    others = [item for item in BASES[name] if item is not precision]
    return [*others, replace(precision, active_phases=STEPS)]


SAME: dict[str, tuple[str, list[Optimization]]] = {
    "int8": ("fp32", [INT8]),
    "int8-static": ("fp32", [replace(INT8, static_scales=True), PredictMemory()]),
    "int8-affine": ("fp32", [replace(INT8, symmetric=False), PredictMemory()]),
    "int8-tensor": ("bf16", [replace(INT8, dynamic_range=DynamicRange.TENSOR), PredictMemory()]),
    "int8-row": ("bf16", [replace(INT8, dynamic_range=DynamicRange.ROW), PredictMemory()]),
    "int8-away": ("fp32", [INT8, PredictMemory()]),
    "int8-streamed": ("fp32", [INT8, STREAMED_PREDICT]),
    "int8-after-disk": ("fp32", [INT8, FROM_DISK]),
    "bf16": ("fp32", [MixedPrecision(active_phases=(PREDICT,))]),
    "fp16": ("fp32", [MixedPrecision(compute_dtype="float16", active_phases=(PREDICT,))]),
    "bf16-split": ("fp32", [MixedPrecision(master="split16", active_phases=(PREDICT,)), PredictMemory()]),
    "resident-warmup": ("fp32", [RESIDENT_WARMUP]),
    "streamed-steps": ("fp32", [STREAMED_STEPS, PredictMemory()]),
    "streamed-predict": ("fp32", [STREAMED_PREDICT, PARTLY]),
    "checkpointed-partly": ("fp32", [PARTLY]),
    "bf16-int8": ("bf16", [INT8, PredictMemory()]),
    "bf16-int8-streamed": ("bf16", [INT8, WeightStreaming(active_phases=(FULL,))]),
    "bf16-split-int8": ("bf16-split", [INT8, STREAMED_STEPS]),
    "bf16-alone-int8": ("bf16-alone", [STREAMED_PREDICT]),
    "int8-alone": ("int8-alone", [STREAMED_STEPS, PredictMemory()]),
    "int8-state": ("int8-state", [INT8, PredictMemory()]),
    "factored": ("factored", [INT8, RESIDENT_WARMUP]),
    "host-update": ("host-update", [INT8, STREAMED_STEPS]),
    "host-update-bf16": ("host-update-bf16", [INT8]),
    "away": ("away", [INT8, STREAMED_STEPS]),
    "disk": ("disk", [INT8, FROM_DISK, PredictMemory()]),
    "fused": ("fused", [INT8, RESIDENT_WARMUP]),
}
WIDE = ("bf16", "bf16-split", "bf16-alone", "host-update-bf16", "fused")


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", SAME)
def test_placement_and_the_storage_of_predict_change_no_number(name: str, tmp_path: Path) -> None:
    base, changes = SAME[name]
    actual = trained([*BASES[base], *changes], on_cpu(tmp_path))
    assert_same(actual, plain(base))


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", WIDE)
def test_wider_weights_in_predict_are_rounded_as_if_they_had_stayed(name: str) -> None:
    assert_same(trained(wide_predict(name), on_cpu()), plain(name))


@pytest.mark.parametrize("more", [[], [OptimizerOffload()], [WeightStreaming()]], ids=["", "state", "weights"])
def test_another_16_bit_type_in_predict_changes_no_number(more: Stack) -> None:
    assert_same(trained([*more, MixedPrecision(predict_dtype="float16")], on_cpu()), plain("bf16"))


@pytest.mark.parametrize("optimizer_state", ["none", "cpu", "compress"])
def test_state_and_weights_move_together(optimizer_state: str) -> None:
    memory = PredictMemory(optimizer_state=optimizer_state)
    base = [MixedPrecision(), memory]
    assert_same(trained([*base, INT8, RESIDENT_WARMUP], on_cpu()), trained(base, on_cpu()))


PROBED = replace(CYCLE, monitor="probe", probe_every=1)
GUESTS: dict[str, list[Optimization]] = {
    "int8": [INT8, PredictMemory()],
    "bf16": [MixedPrecision(master="split16", active_phases=(PREDICT,))],
    "fp16": [MixedPrecision(compute_dtype="float16", active_phases=(PREDICT,)), PredictMemory()],
    "streamed": [STREAMED_PREDICT],
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("monitor", ["probe", "every_step"])
@pytest.mark.parametrize("name", GUESTS)
def test_probes_run_in_the_precision_of_predict(name: str, monitor: str) -> None:
    config = replace(PROBED, monitor=monitor, guard=False)
    actual, expected = (trained(stack, on_cpu(), config) for stack in (GUESTS[name], []))
    assert_same(actual, expected)
    losses = [probe_loss(stack, monitor) for stack in (GUESTS[name], [])]
    assert (losses[0] == losses[1]) is (name == "streamed")  # the same weights, read in fewer bits
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # bfloat16 keeps 8 bits: 0.4 % of a logit near 0


def probe_loss(stack: Stack, monitor: str) -> float:
    hybrid = new_hybrid(stack, on_cpu(), replace(PROBED, monitor=monitor))
    run_on(hybrid, 2)
    hybrid.trainer.enter_phase(PREDICT)
    return hybrid.trainer.loss([random_batch(GPT2_TIED_DROPOUT, np.random.default_rng(7))])


@pytest.mark.parametrize("name", [*GUESTS, "bf16-alone"])
def test_a_copy_takes_a_jump_back_under_the_plan_of_another_phase(name: str) -> None:
    stack = wide_predict(name) if name == "bf16-alone" else [*GUESTS[name], RESIDENT_WARMUP][: 1 + (name != "streamed")]
    hybrid = new_hybrid(stack, on_cpu(), replace(CYCLE, rollback="copy"))
    before = look_into(hybrid, run_on(hybrid, 2))
    assert hybrid.phase is PREDICT
    hybrid.advance(lambda _: [])
    moved = look_into(hybrid, Found())
    hybrid.trainer.enter_phase(CORRECT)
    hybrid.undo()
    assert hybrid.trainer.phase is CORRECT
    back = look_into(hybrid, Found())
    assert any(not torch.equal(moved.weights[name], tensor) for name, tensor in before.weights.items())
    assert_all_bitwise(back.weights, before.weights, "weight ")
    assert_all_bitwise(back.state, before.state, "state ")


OTHER_STEPS: dict[str, list[Optimization]] = {
    "wide-warmup": [MixedPrecision(master="absent", active_phases=(FULL, PREDICT, CORRECT))],
    "wide-correct": [MixedPrecision(active_phases=(WARMUP, FULL))],
    "short-correct": [MixedPrecision(master="split16", active_phases=(CORRECT,)), OptimizerOffload()],
    "int8-correct": [Int8Weights(active_phases=(PREDICT, CORRECT)), STREAMED_STEPS, PredictMemory()],
    "int8-but-full": [Int8Weights(active_phases=(WARMUP, PREDICT, CORRECT)), OptimizerOffload(update_on="host")],
    "int8-wide-predict": [Int8Weights(master="absent"), MixedPrecision(master="absent", active_phases=STEPS)],
    "two-short-types": [MixedPrecision(warmup_dtype="float32", correct_dtype="float16"), PredictMemory()],
    "mixed-kinds": [MixedPrecision(master="split16"), Int8Weights(active_phases=(CORRECT,)), RESIDENT_WARMUP],
}


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_true_steps_run_in_the_precision_of_their_phase(name: str) -> None:
    found = trained(OTHER_STEPS[name], on_cpu()), plain("fp32")
    losses = [[loss for loss, *_ in run.steps] for run in found]
    assert losses[0] != losses[1]
    # Four steps at lr 3e-3 move the loss by 0.1; weights that came back wrong start anew from another model.
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


WIDE_LLAMA = replace(LLAMA_GROUPED, width=64)
BLOCK = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 48 + 2 * 64)
"""Bytes of one in float32: query and output, key and value, feed-forward, norms."""


class Watched:
    """A cycle seen by the ledger: its trace, and bytes at each border of PREDICT."""

    def __init__(self, stack: Stack, transfer: Transfer, config: HybridConfig = CYCLE) -> None:
        self.ledger = StorageLedger()
        self.transfer = transfer
        self.live: list[tuple[int, int, int]] = []
        with self.ledger:
            self.hybrid = new_hybrid(stack, transfer, config, WIDE_LLAMA, self.ledger)
            while len(self.live) < 2:
                run_on(self.hybrid, self.hybrid.trainer.steps_done + 1, self.ledger)
                if self.hybrid.phase is PREDICT:
                    self._borders()
        self.trace = self.ledger.trace()

    def _borders(self) -> None:
        before = self.ledger.live_bytes
        self.hybrid.trainer.enter_phase(PREDICT)
        within = self.ledger.live_bytes
        self.ledger.begin_step()
        self.hybrid.advance(lambda _: [])
        self.hybrid.trainer.enter_phase(CORRECT)
        self.live.append((before, within, self.ledger.live_bytes))


PLANNED: dict[str, list[Optimization]] = {
    "int8": [INT8, PredictMemory()],
    "int8-streamed": [INT8, STREAMED_STEPS, MixedPrecision()],
    "bf16": [MixedPrecision(master="split16", active_phases=(PREDICT,)), PARTLY],
    "wide": [MixedPrecision(master="absent", active_phases=STEPS), FROM_DISK],
    "two-short-types": [MixedPrecision(predict_dtype="float16", correct_dtype="float16"), PredictMemory()],
    "int8-correct": OTHER_STEPS["int8-correct"],
    "host-update": [OptimizerOffload(update_on="host"), INT8, STREAMED_STEPS],
    "away": [*BASES["away"], INT8, STREAMED_STEPS],
    "fused": [FusedUpdate(), INT8, RESIDENT_WARMUP, PredictMemory(optimizer_state="compress")],
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", PLANNED)
def test_cycles_are_planned_as_they_are_executed(name: str, tmp_path: Path) -> None:
    config = replace(PROBED, guard=False)
    real, dry = on_cpu(tmp_path), VirtualTransfer()
    executed, planned = Watched(PLANNED[name], real, config), Watched(PLANNED[name], dry, config)
    for part in ("events", "sizes", "classes", "units"):
        assert getattr(planned.trace, part) == getattr(executed.trace, part), part
    for placement in (Placement.HOST, Placement.DISK):
        assert dry.tiers.by_class(placement) == real.tiers.by_class(placement)
        assert dry.tiers.peak_bytes(placement) == real.tiers.peak_bytes(placement)
    real.close()


def test_int8_weights_make_room_in_predict() -> None:
    one_slot = WeightStreaming(max_active_layers=1, active_phases=(PREDICT,))
    for before, within, after in Watched([INT8, one_slot], on_cpu()).live:
        # Left are one block's codes, scales and values of four.
        assert before - within > 2.6 * BLOCK
        assert after == before


def test_resident_codes_take_a_quarter_and_the_slots() -> None:
    for before, within, after in Watched([INT8], on_cpu()).live:
        assert before - within > 0.7 * BLOCK
        assert after == before


def test_offloaded_weights_make_room_in_predict() -> None:
    for before, within, after in Watched([STREAMED_PREDICT], on_cpu()).live:
        assert before - within == pytest.approx(3 * BLOCK, rel=0.05)  # padded to 512 bytes per parameter
        assert after == before


def test_state_and_weights_make_room_together() -> None:
    alone = Watched([PredictMemory()], on_cpu()).live[1]
    both = Watched([PredictMemory(), STREAMED_PREDICT], on_cpu()).live[1]
    assert (both[0] - both[1]) - (alone[0] - alone[1]) == pytest.approx(3 * BLOCK, rel=0.05)


@pytest.mark.parametrize("stack", [[RESIDENT_WARMUP], [STREAMED_PREDICT], [INT8], PLANNED["int8-streamed"]])
def test_a_border_holds_the_slots_of_both_plans_and_one_unit_twice(stack: list[Optimization]) -> None:
    ledger = StorageLedger()
    with ledger:
        hybrid = new_hybrid(stack, VirtualTransfer(), model=replace(WIDE_LLAMA, num_blocks=12))
        run_on(hybrid, 2)
        for phase in (PREDICT, WARMUP, FULL, WARMUP, PREDICT, FULL):
            before = ledger.live_bytes
            ledger.begin_step()
            hybrid.trainer.enter_phase(phase)
            assert ledger.peak_bytes - max(before, ledger.live_bytes) < 7 * BLOCK  # of 12, and fp32 temporaries


NO_RECOMPUTATION = Claim("recompute_every", 1, CORRECT)


@pytest.mark.parametrize("guests", [[INT8], [STREAMED_PREDICT], [INT8, STREAMED_STEPS], [Wish(NO_RECOMPUTATION)]])
def test_nothing_below_the_device_is_left_behind_or_there_twice(guests: list[Optimization]) -> None:
    away = [OptimizerOffload(), VERTICAL, ActivationOffload(), GradientCheckpointing(recompute_every=2)]
    expected, found = trained(away, on_cpu()).host, trained([*away, *guests], on_cpu()).host
    assert set(expected) == {TensorClass.GRAD, TensorClass.OPTIM_STATE, TensorClass.BOUNDARY}
    if STREAMED_STEPS in guests:
        assert found.pop(TensorClass.WEIGHT) > 0
    if guests == [Wish(NO_RECOMPUTATION)]:
        del expected[TensorClass.BOUNDARY]  # of CORRECT, given back at its end; FULL has not asked for its own again
    assert found == expected


LATE = [
    "int8-away",
    "int8-after-disk",
    "bf16-split",
    "streamed-steps",
    "bf16-int8-streamed",
    "host-update",
    "away",
    "disk",
]


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", LATE)
def test_borders_wait_for_late_copies(name: str, tmp_path: Path) -> None:
    base, changes = SAME[name]
    transfer = LazyTransfer(disk_folder=tmp_path / "late")
    with ComputeWatch(transfer):
        late = trained([*BASES[base], *changes], transfer)
    assert transfer.hazards == []
    assert_same(late, plain(base))


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", ["int8-away", "bf16-int8-streamed", "int8-alone", "away"])
def test_a_state_saved_in_any_phase_is_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    base, changes = SAME[name]
    stack = [*BASES[base], *changes]
    whole = trained(stack, on_cpu())
    assert len({result.phase for result in whole.results}) == len(Phase)
    for number in range(1, 5):
        saved, resumed = new_hybrid(stack, on_cpu()), new_hybrid(stack, on_cpu())
        steps = random_steps(GPT2_TIED_DROPOUT, NUM_STEPS, saved.trainer.plan.grad_accum_steps)
        for _ in range(number):
            saved.advance(steps.__getitem__)
        save_checkpoint(saved.trainer, tmp_path / "state", saved)
        load_checkpoint(resumed.trainer, tmp_path / "state", resumed)
        rest = look_into(resumed, run_on(resumed))
        assert [replace(result, seconds=0) for result in rest.results] == [
            replace(result, seconds=0) for result in whole.results[number:]
        ]
        assert_all_bitwise(rest.weights, whole.weights, "weight ")
        assert_all_bitwise(rest.state, whole.state, "state ")


NOT_BACK = ", which is not exact; allowed in "
GRID = "int8 codes without a master and with equal scales. Set master ="
VALUES = "float32 values. Set master = 'float32' (or 'split16' with bfloat16 weights) where only predict is meant"
CODES = "int8_blocks"
REFUSED: list[tuple[str, list[Optimization]]] = [
    (
        f"weight: matrices are trained as float32 in full, but predict would keep bfloat16{NOT_BACK}predict: {VALUES}",
        [MixedPrecision(master="absent", active_phases=(PREDICT,))],
    ),
    (
        f"weight: matrices are trained as float32 in full, but predict would keep {CODES}{NOT_BACK}predict: {VALUES}",
        [replace(INT8, master="absent")],
    ),
    (
        f"weight: matrices are trained as int8_blocks in full, but warmup would keep float32{NOT_BACK}warmup: {GRID}",
        [Int8Weights(master="absent", active_phases=(FULL, PREDICT, CORRECT))],
    ),
    (
        f"weight: matrices are trained as {CODES} in full, but predict would keep {CODES}{NOT_BACK}predict: {GRID}",
        [Int8Weights(master="absent"), Wish(Claim("static_scales", 1, PREDICT))],
    ),
    (
        f"weight: vectors are trained as float32 in full, but correct would keep bfloat16{NOT_BACK}correct: float32",
        [Int8Weights(master="absent"), Wish(Claim("compute_dtype", Codec.BFLOAT16, CORRECT))],
    ),
    (
        "grad_accum_steps: 2 in predict, 1 in full; it must be equal: let",
        [Wish(Claim("grad_accum_steps", 2, PREDICT))],
    ),
    (
        "optim_state: float32 on host in warmup, float32 on device in full; it must be equal: let",
        [Wish(Claim("optim_state.placement", Placement.HOST, WARMUP))],
    ),
    (
        "boundary.placement: activation_offload needs gradient_checkpointing",
        [ActivationOffload(), GradientCheckpointing(active_phases=(FULL,))],
    ),
]


@pytest.mark.parametrize(("message", "stack"), REFUSED)
def test_a_border_that_loses_something_is_refused_when_the_stack_is_composed(
    message: str, stack: list[Optimization]
) -> None:
    with pytest.raises(PlanConflictError) as raised:
        compose(stack)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("kind", [GradientCheckpointing, MixedPrecision, Int8Weights, WeightStreaming])
def test_an_optimization_acts_somewhere(kind: type[Optimization]) -> None:
    with pytest.raises(ValueError, match=r"^active_phases: empty; name at least one phase or drop the optimization$"):
        kind(active_phases=())

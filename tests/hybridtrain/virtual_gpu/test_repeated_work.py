"""Work that is written down instead of done: the trace is that of work that is done, event by event."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.engine.block_work import block_key
from hybridtrain.memory.group import VirtualGroup
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.decoder import Block
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optimizations import (
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    MixedPrecision,
    Nf4Weights,
    OptimizerOffload,
    WeightStreaming,
    Zero,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import LinearKind, WidenBy
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.virtual_gpu.account.repeated_work import PendingBackward, Work
from tiny_models import FAMILIES, GPT2_TIED_DROPOUT, LLAMA_GROUPED, random_steps

MODELS = {
    "gpt2": GPT2_TIED_DROPOUT,
    "llama": LLAMA_GROUPED,
    "windows": replace(FAMILIES["gemma3"], num_blocks=6),
    "experts": replace(FAMILIES["mixtral"], num_blocks=5),
}
BF16 = MixedPrecision(master="absent")
STACKS: dict[str, tuple[list[Optimization], int]] = {
    "plain": ([], 1),
    "horizontal": ([MixedPrecision(), GradAccumulation(grad_accum_steps=3)], 3),
    "vertical": (
        [GradAccumulation(grad_accum_steps=3, schedule="vertical", visit_micro_batches=2), Int8Optimizer()], 3,
    ),
    "recomputed": ([BF16, GradientCheckpointing(recompute_every=2), WeightStreaming(tier="disk")], 1),
    "some kept": (
        [
            BF16, Int8Weights(master="absent", widen_by=WidenBy.MATRIX), GradAccumulation(grad_accum_steps=2),
            GradientCheckpointing(recompute_every=2, kept_blocks=1),
        ], 2,
    ),
    "adapters": (
        [BF16, Nf4Weights(), Lora(rank=4, dropout=0.1), GradientCheckpointing(recompute_every=1), WeightStreaming()], 1,
    ),
}  # fmt: skip


def recorded(model: ModelConfig, stack: str) -> LedgerTrace:
    optimizations, accum_steps = STACKS[stack]
    return record_steps(model, compose(optimizations), random_steps(model, 2, accum_steps), VirtualTransfer())


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", MODELS)
def test_steps_of_equal_blocks_leave_the_trace_of_blocks_that_are_all_computed(
    model: str, stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [0], Block.forward

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(Block, "forward", counted)
    written = recorded(MODELS[model], stack)
    computed, calls[0] = calls[0], 0
    monkeypatch.setattr(Work, "full_key", lambda *_: None)
    assert recorded(MODELS[model], stack) == written
    assert computed < calls[0]


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {"ademamix"}))  # which keeps a slow average too
@pytest.mark.parametrize("place", ["device", "disk"])
def test_updates_of_equal_parameters_leave_the_trace_of_updates_that_are_all_computed(
    optimizer: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compose([BF16, *([] if place == "device" else [OptimizerOffload(tier="disk")])])

    def trace() -> LedgerTrace:
        config = TrainerConfig(optimizer=OPTIMIZERS[optimizer]())
        return record_steps(LLAMA_GROUPED, plan, random_steps(LLAMA_GROUPED, 2), VirtualTransfer(), config)

    written = trace()
    monkeypatch.setattr(Work, "full_key", lambda *_: None)
    assert trace() == written


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exchanges_of_ranks_leave_the_trace_of_exchanges_that_are_all_computed(
    rank: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = [WeightStreaming(), GradientCheckpointing(recompute_every=1)] if stage == 3 else []
    plan = compose([BF16, Zero(stage=stage), GradAccumulation(grad_accum_steps=14), *streamed])

    def trace() -> LedgerTrace:
        group = VirtualGroup(rank, 7)  # small parameters leave nothing for the last ranks
        return record_steps(LLAMA_GROUPED, plan, random_steps(LLAMA_GROUPED, 2, 2), VirtualTransfer(), group=group)

    written = trace()
    monkeypatch.setattr(Work, "full_key", lambda *_: None)
    assert trace() == written


class Gate(nn.Module):
    """Keeps two tensors for its backward pass, and gives back two that share one storage."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width, device="meta"))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.weight).exp().sigmoid()


def gate_pass(ledger: StorageLedger, gate: Gate, hidden: Tensor, grad: Tensor, done: list[str]) -> tuple[Tensor, ...]:
    def run() -> tuple[Tensor, ...]:
        done.append("forward")
        return (gate(hidden),)

    def differentiate(again: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        done.append("backward")
        (grad_weight,) = torch.autograd.grad((again or outputs)[0], gate.parameters(), grad)
        rows = grad_weight + 1
        return rows[1:], rows[:1]

    outputs, held = ledger.repeat_forward(Work(run, [hidden], lambda: type(gate)))
    return ledger.repeat_backward(held, [grad], differentiate)


def gates_traced(grads: list[Tensor], *, repeats: bool) -> tuple[LedgerTrace, list[str], int]:
    done: list[str] = []
    with StorageLedger() as ledger:
        hidden = torch.ones(4, 8, device="meta")
        for number, grad in enumerate(grads):
            with ledger.region(Stage.BACKWARD, f"block.{number}"):
                gate = Gate()
                ledger.join(ledger.work(Lane.COPY_IN, 8, ()))
                observer = ledger if repeats else StorageLedger(record=False)  # which does all work
                below, above = gate_pass(observer, gate, hidden, grad, done)
                assert (below.shape, below.storage_offset(), above.shape) == ((7, 8), 8, (1, 8))
                held = ledger.live_bytes
                del below
                assert ledger.live_bytes == held  # the other one's storage is the same
                del above
                assert ledger.live_bytes == held - 256
                del gate
    return ledger.trace(), done, ledger.peak_bytes


def test_a_pass_and_its_backward_pass_are_written_down_together() -> None:
    grads = [torch.ones(4, 8, device="meta")] * 4
    trace, done, peak = gates_traced(grads, repeats=True)
    assert done == ["forward", "backward"]
    assert gates_traced(grads, repeats=False)[::2] == (trace, peak)


def test_a_backward_pass_that_was_never_seen_is_done_apart_with_its_forward_pass() -> None:
    other = torch.ones(8, 4, device="meta").t()
    grads = [torch.ones(4, 8, device="meta"), other, other]
    trace, done, peak = gates_traced(grads, repeats=True)
    assert done == ["forward", "backward"] * 2
    assert gates_traced(grads, repeats=False)[::2] == (trace, peak)


def test_a_pass_that_its_key_does_not_decide_is_done_from_then_on() -> None:
    numbers: list[int] = []
    with StorageLedger() as ledger:
        gate, hidden, grad = Gate(), torch.ones(4, 8, device="meta"), torch.ones(4, 8, device="meta")

        def begin(times: int) -> tuple[tuple[Tensor, ...], PendingBackward | None]:
            def run() -> tuple[Tensor, ...]:
                numbers.append(times)
                return (gate(hidden) * times if times > 1 else gate(hidden),)

            return ledger.repeat_forward(Work(run, [hidden], lambda: "gate"))

        (output,), held = begin(1)
        assert begin(2)[1] is None
        ledger.repeat_backward(held, [grad], lambda _: torch.autograd.grad(output, gate.weight, grad))
        assert begin(1)[1] is None
    assert numbers == [1, 2, 1]


def scaled_twice(tensor: Tensor) -> None:
    doubled = tensor * 2.0
    tensor.copy_(doubled.exp())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_work_that_is_written_down_leaves_the_trace_of_work_that_is_done(device: str) -> None:
    done: list[int] = []

    def trace(*, repeats: bool) -> LedgerTrace:
        done.clear()
        with StorageLedger() as ledger:
            tensors = [torch.ones(size, device=device) for size in (1000, 1000, 50, 1000)]
            for number, tensor in enumerate(tensors):
                copy = ledger.work(Lane.COPY_IN, 8, ())
                ledger.join(copy)

                def work(tensor: Tensor = tensor, number: int = number) -> tuple[Tensor, ...]:
                    done.append(number)
                    scaled_twice(tensor)
                    return ()

                with ledger.region(Stage.UPDATE, f"block.{number}"):
                    ledger.repeat(Work(work, [tensor], lambda: "scale")) if repeats else work()
            assert ledger.peak_bytes == ledger.live_bytes + 8000
            return ledger.trace()

    assert trace(repeats=True) == trace(repeats=False)
    trace(repeats=True)
    assert done == ([0, 2] if device == "meta" else [0, 1, 2, 3])


def test_work_that_keeps_something_is_done_each_time() -> None:
    kept: list[Tensor] = []

    def keep() -> tuple[Tensor, ...]:
        kept.append(tensor + 1)
        return ()

    with StorageLedger() as ledger:
        tensor = torch.ones(10, device="meta")
        for _ in range(3):
            ledger.repeat(Work(keep, [tensor], lambda: "keep"))
    assert len(kept) == 3


def test_blocks_are_told_apart_by_all_that_decides_their_work() -> None:
    def block(number: int = 0) -> nn.Module:
        with torch.device("meta"):
            return Block(FAMILIES["qwen2"], number, None, torch.bfloat16)

    key = block_key(block())
    assert key is not None
    assert block_key(block()) == key
    assert block_key(block(1)) != key  # a window
    widths = replace(FAMILIES["qwen2"], ffn_width=51)
    with torch.device("meta"):
        assert block_key(Block(widths, 0, None, torch.bfloat16)) != key
    for change in (
        lambda b: b.eval(),
        lambda b: b.query.weight.requires_grad_(False),
        lambda b: setattr(b, "head_dim", 8),
        lambda b: setattr(b.ffn_out, "kind", LinearKind.TERNARY),
        lambda b: setattr(b.ffn_out, "adapter", nn.Identity()),
    ):
        changed = block()
        change(changed)
        assert block_key(changed) not in {key, None}
    for change in (lambda b: b.register_forward_hook(lambda *_: None), lambda b: setattr(b, "notes", [])):
        changed = block()
        change(changed)
        assert block_key(changed) is None

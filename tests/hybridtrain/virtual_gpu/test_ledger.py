"""The ledger of storages: one entry per storage whatever looks at it, from its allocation to its release."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hybridkernels.adamw_int8 import adamw_int8_
from hybridkernels.flash_attention import backward_workspace_bytes, causal_attention
from hybridtrain.engine.step_visit import differentiate_block, run_block
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing, Int8Optimizer, MixedPrecision
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account import op_rules
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.op_rules import MetaCache, register_scratch
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from tiny_models import GPT2_TIED_DROPOUT, LLAMA_GROUPED, random_steps

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@DEVICES
def test_a_storage_counts_from_its_allocation_to_its_release(device: str) -> None:
    with StorageLedger() as ledger:
        tensor = torch.empty(25, device=device)
        assert ledger.live_bytes == 100
        del tensor
        assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 100


@DEVICES
def test_views_share_one_entry(device: str) -> None:
    with StorageLedger() as ledger:
        tensor = torch.empty(4, 6, device=device)
        views = [tensor.t(), tensor[1:], tensor.view(-1), tensor.detach(), tensor.expand(3, 4, 6), *tensor.split(2)]
        assert ledger.live_bytes == 96
        del tensor
        assert ledger.live_bytes == 96  # the views still hold it
        del views
        assert ledger.live_bytes == 0
    assert ledger.trace().events == (0, ~0)


@DEVICES
def test_events_are_in_the_order_of_allocations_and_releases(device: str) -> None:
    with StorageLedger() as ledger:
        first = torch.empty(1, device=device)
        second = torch.empty(2, device=device)
        del first
        third = second + 1
        del third, second
    trace = ledger.trace()
    assert trace.events == (0, 1, ~0, 2, ~2, ~1)
    assert trace.sizes == (4, 8, 8)
    assert list(trace.live_bytes()) == [4, 12, 8, 16, 8, 0]


@DEVICES
def test_an_address_used_again_is_a_new_storage(device: str) -> None:
    with StorageLedger() as ledger:
        for size in (10, 20, 30):
            torch.empty(size, device=device)
    assert ledger.trace().sizes == (40, 80, 120)
    assert ledger.trace().events == (0, ~0, 1, ~1, 2, ~2)


@DEVICES
def test_operations_in_place_allocate_nothing(device: str) -> None:
    with StorageLedger() as ledger:
        tensor = torch.zeros(8, device=device)
        tensor.add_(1).mul_(2)
        torch._foreach_mul_([tensor], 2.0)
        torch.add(tensor, 1, out=tensor)
    assert ledger.trace().sizes == (32,)


@DEVICES
def test_every_output_of_a_list_is_counted(device: str) -> None:
    with StorageLedger() as ledger:
        tensors = [torch.zeros(size, device=device) for size in (3, 5)]
        sums = torch._foreach_add(tensors, 1.0)
        assert ledger.live_bytes == 2 * (12 + 20)
        del sums
        assert ledger.live_bytes == 12 + 20


@DEVICES
def test_empty_storages_are_not_counted(device: str) -> None:
    with StorageLedger() as ledger:
        torch.empty(0, device=device)
    assert ledger.trace().events == ()


@DEVICES
def test_a_storage_from_outside_counts_from_its_first_use(device: str) -> None:
    outside = torch.zeros(16, device=device)
    with StorageLedger() as ledger:
        assert ledger.live_bytes == 0
        outside.add_(1)
        assert ledger.live_bytes == 64


@DEVICES
def test_what_autograd_saves_and_makes_is_seen(device: str) -> None:
    weight = nn.Parameter(torch.ones(10, device=device))
    with StorageLedger() as ledger:
        loss = (weight.exp() * 2).sum()
        # Saved by exp: its output (40 bytes). The product is gone, the sum is here; the weight was never an output.
        assert ledger.live_bytes == 40 + 4
        loss.backward()
        assert ledger.live_bytes == 4 + 40  # the saved output went, the gradient came


@DEVICES
def test_the_ledger_keeps_no_storage_alive(device: str) -> None:
    ledger = StorageLedger()
    with ledger:
        tensor = torch.empty(25, device=device)
        ledger.label(tensor, TensorClass.WEIGHT, "unit")
        released: list[bool] = []
        storage = tensor.untyped_storage()
        weakref.finalize(storage, released.append, True)
        del storage, tensor
        assert released == [True]  # at once, without a garbage collection


def test_a_storage_may_outlive_the_ledger() -> None:
    ledger = StorageLedger()
    with ledger:
        tensor = torch.empty(25)
    assert ledger.live_bytes == 100
    del tensor
    assert ledger.live_bytes == 0


def test_a_label_holds_from_the_allocation_on() -> None:
    with StorageLedger() as ledger:
        with ledger.region(Stage.FORWARD, "block.0"):
            kept, dropped = torch.empty(10), torch.empty(20)
        ledger.label(kept.view(2, 5), TensorClass.BOUNDARY, "block.1")  # any view of it
        del kept, dropped
    trace = ledger.trace()
    assert trace.classes == (TensorClass.BOUNDARY, TensorClass.ACTIVATION)
    assert trace.units == ("block.1", "block.0")


DEFAULT_CLASSES = [
    (Stage.BUILD, TensorClass.WEIGHT),
    (Stage.LOAD, TensorClass.ACTIVATION),
    (Stage.FORWARD, TensorClass.ACTIVATION),
    (Stage.BACKWARD, TensorClass.ACTIVATION),
    (Stage.UPDATE, TensorClass.WORKSPACE),
]


@pytest.mark.parametrize(("stage", "expected"), DEFAULT_CLASSES)
def test_each_stage_has_its_default_class(stage: Stage, expected: TensorClass) -> None:
    with StorageLedger() as ledger, ledger.region(stage, "unit"):
        torch.empty(10)
    assert ledger.trace().classes == (expected,)


def test_regions_nest_and_end_with_an_error() -> None:
    ledger = StorageLedger()

    def fail() -> None:
        with ledger.region(Stage.BACKWARD, "inner"):
            torch.empty(1)
            raise RuntimeError("inside")

    with ledger, ledger.region(Stage.FORWARD, "outer"):
        torch.empty(1)
        with pytest.raises(RuntimeError, match="inside"):
            fail()
        torch.empty(1)
    assert ledger.trace().units == ("outer", "inner", "outer")


def test_a_step_starts_its_peak_from_what_is_live() -> None:
    with StorageLedger() as ledger:
        kept = torch.empty(10)
        torch.empty(1000)
        assert ledger.peak_bytes == 4040
        ledger.begin_step()
        assert ledger.peak_bytes == 40
        torch.empty(5)
    assert ledger.peak_bytes == 60
    assert ledger.trace().step_range(0) == range(3, 5)
    assert kept.numel() == 10


@DEVICES
def test_scratch_of_the_attention_backward_is_taken_and_given_back(device: str) -> None:
    q, k, v = (torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    with StorageLedger() as ledger:
        out = causal_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    trace = ledger.trace()
    (scratch,) = [index for index, size in enumerate(trace.sizes) if size == backward_workspace_bytes(q, k)]
    position = trace.events.index(scratch)
    assert trace.events[position + 1] == ~scratch
    assert trace.classes[scratch] is TensorClass.WORKSPACE


def _extra_bytes(compute: Callable[[], Tensor]) -> int:
    """Return the bytes that are held at most beyond the result."""
    with StorageLedger() as ledger:
        kept = compute()
    return ledger.peak_bytes - kept.nbytes


@DEVICES
def test_torchs_own_ops_take_scratch(device: str) -> None:
    aten, x = torch.ops.aten, torch.zeros(8, 16, device=device)
    assert _extra_bytes(lambda: aten._softmax_backward_data(x, x, -1, torch.float32)) == x.nbytes
    assert _extra_bytes(lambda: torch.logsumexp(x, -1)) == x.nbytes
    for reduction, extra in (("none", 1), ("mean", 2)):
        loss = partial(nn.functional.binary_cross_entropy_with_logits, x, x, reduction=reduction)
        assert _extra_bytes(loss) == extra * x.nbytes
    assert _extra_bytes(lambda: nn.functional.huber_loss(x, x)) == x.nbytes


@pytest.mark.parametrize(("dtype", "tokens", "parts"), [
    (torch.float32, 3072, 0), (torch.bfloat16, 3072, 0), (torch.bfloat16, 4000, 500), (torch.float32, 4000, 500),
])  # fmt: skip
def test_an_embeddings_gradient_takes_fp32_sums_of_ten_rows(dtype: torch.dtype, tokens: int, parts: int) -> None:
    rows, width = 100, 16
    gradient, ids = torch.zeros(tokens, width, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
    lists = 8 * (3 * tokens + 2 * rows + parts) if parts else 0
    found = _extra_bytes(lambda: torch.ops.aten.embedding_dense_backward(gradient, ids, rows, -1, False))
    assert found == lists + 4 * parts * width


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, ()), (torch.bfloat16, (4 * 256,))], ids=str)
def test_scratch_of_the_8_bit_update_is_the_widened_gradient(dtype: torch.dtype, expected: tuple[int, ...]) -> None:
    param, grad = torch.zeros(256), torch.zeros(256, dtype=dtype)
    codes = torch.zeros(256, dtype=torch.uint8)
    moments = (codes, torch.zeros(1), codes.clone(), torch.zeros(1))
    with StorageLedger() as ledger:
        adamw_int8_(param, grad, moments, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1)
    assert ledger.trace().sizes == expected


class Unadorned(nn.Module):
    """What the engine needs of a block."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, device=device)

    def forward(self, hidden: Tensor, documents: None, balance: None, *, computes_output: bool, kept: None) -> Tensor:
        assert documents is None
        assert balance is None
        assert computes_output
        assert kept is None
        return nn.functional.gelu(self.linear(hidden))


@DEVICES
def test_a_block_that_runs_twice_is_counted_twice(device: str) -> None:
    def run(ledger: StorageLedger) -> int:
        ledger.begin_step()
        start = ledger.live_bytes
        with ledger.region(Stage.BACKWARD, "block.0"):
            differentiate_block(
                run_block(block, hidden, None, None, ledger)[0],
                tuple(block.parameters()),
                torch.zeros_like(hidden),
                ledger,
            )
        assert ledger.live_bytes == start
        return ledger.peak_bytes - start

    with StorageLedger() as ledger:
        block = Unadorned(8, device)
        hidden = torch.zeros(2, 8, device=device)
        first, second = run(ledger), run(ledger)
    assert first == second > 0
    assert allocations(ledger.trace(), 0) == allocations(ledger.trace(), 1) != []


def allocations(trace: LedgerTrace, step: int) -> list[int]:
    events = [trace.events[position] for position in trace.step_range(step)]
    return [trace.sizes[event] for event in events if event >= 0]


STACKS = {
    "plain": [],
    "tight": [
        GradAccumulation(grad_accum_steps=2, schedule="vertical"),
        GradientCheckpointing(recompute_every=2),
        MixedPrecision(master="split16"),
        Int8Optimizer(),
    ],
}
ACCUM_STEPS = {"plain": 1, "tight": 2}


@pytest.mark.parametrize("stack", STACKS)
def test_a_ledger_without_records_counts_the_same_peaks(stack: str) -> None:
    config, plan = GPT2_TIED_DROPOUT, compose(STACKS[stack])

    def peaks(*, record: bool) -> list[int]:
        ledger = StorageLedger(record=record)
        found = []
        with ledger:
            trainer = Trainer(config, plan, TrainerConfig(), VirtualTransfer(), ledger)
            for batches in random_steps(config, 2, ACCUM_STEPS[stack]):
                ledger.begin_step()
                trainer.step(batches)
                found.append(ledger.peak_bytes)
        assert bool(ledger.trace().events) is record
        return found

    assert peaks(record=False) == peaks(record=True)


@pytest.mark.parametrize("config", [GPT2_TIED_DROPOUT, LLAMA_GROUPED], ids=["gpt2", "llama"])
@pytest.mark.parametrize("stack", STACKS)
def test_remembered_ops_make_the_trace_of_real_ones(
    stack: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = random_steps(config, 2, ACCUM_STEPS[stack])
    remembered = record_steps(config, compose(STACKS[stack]), batches, VirtualTransfer())
    monkeypatch.setattr(MetaCache, "call", call_every_op)
    assert record_steps(config, compose(STACKS[stack]), batches, VirtualTransfer()) == remembered


def call_every_op(_cache: MetaCache, func: Callable[..., object], args: tuple, kwargs: dict, _key: object) -> object:
    return func(*args, **kwargs)


def test_only_operands_of_the_same_shape_and_strides_are_remembered() -> None:
    with StorageLedger() as ledger:
        for size in (3, 5, 3):
            torch.zeros(size, device="meta") + 1
        dense, turned = torch.zeros(3, 4, device="meta"), torch.zeros(4, 3, device="meta").t()
        assert [(tensor + 1).stride() for tensor in (dense, turned, dense)] == [(4, 1), (1, 3), (4, 1)]
    assert ledger.trace().sizes[:6] == (12, 12, 20, 20, 12, 12)


def test_what_is_remembered_does_not_grow_with_the_steps() -> None:
    ledger = StorageLedger(record=False)
    with ledger:
        trainer = Trainer(LLAMA_GROUPED, compose(()), TrainerConfig(), VirtualTransfer(), ledger)
        sizes = set()
        for batches in random_steps(LLAMA_GROUPED, 20):
            trainer.step(batches)  # the step's number and rates are in its ops
            sizes.add(len(ledger._meta_cache._known))
    assert len(sizes) == 1


def test_numbers_are_remembered_only_where_they_decide_a_shape() -> None:
    ledger = StorageLedger()
    with ledger:
        tensor = torch.ones(3, device="meta")
        for number in range(1, 20):
            assert torch.arange(number, device="meta").shape == (number,)
            assert torch.zeros(number, device="meta").shape == (number,)
        remembered = len(ledger._meta_cache._known)
        for number in range(2, 20):  # 1 is alpha's default, which the dispatcher leaves out
            assert torch.full((2,), float(number), device="meta").dtype == torch.float32
            assert torch.full((2,), number, device="meta").dtype == torch.int64
            assert (tensor * number).shape == torch.add(tensor, tensor, alpha=number).shape == (3,)
            assert tensor.clamp(min=number).shape == (3,)
    assert len(ledger._meta_cache._known) == remembered + 5


def test_an_ops_scratch_has_one_rule() -> None:
    op = torch.ops.aten.frac.default
    with StorageLedger() as before:
        torch.ones(5, device="meta").frac()
    register_scratch(op, double_operand)
    try:
        register_scratch(op, double_operand)  # the same again: a module imported twice
        with pytest.raises(ValueError, match=r"aten\.frac\.default: the op has a scratch rule already"):
            register_scratch(op, lambda _args: 1)
        with StorageLedger() as after:
            torch.ones(5, device="meta").frac()
    finally:
        del op_rules._SCRATCH_RULES[op]
    assert before.trace().sizes == (20, 20)
    assert after.trace().sizes == (20, 20, 40)
    assert after.trace().classes[2] is TensorClass.WORKSPACE


def double_operand(args: Sequence[torch.Tensor]) -> int:
    return 2 * args[0].nbytes

"""Peaks of the executor against those of plain autograd and of torch's checkpointing, and what it keeps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridtrain.engine.executor import Executor
from hybridtrain.engine.step_visit import DeviceBatch
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.build import build_model
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StorageLedger, holders
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from memory_parts import plan_of
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED, random_steps

META = torch.device("meta")
MODELS = {"gpt2-tied-dropout": GPT2_TIED_DROPOUT, "gpt2-untied": GPT2_UNTIED, "llama-grouped": LLAMA_GROUPED}
BATCH_SIZE, SEQ_LEN = 4, 32
SCALAR_BYTES = 4
Block = Callable[[nn.Module, Tensor], Tensor]


def call(block: nn.Module, hidden_BTD: Tensor) -> Tensor:
    return block(hidden_BTD)


def checkpointed(block: nn.Module, hidden_BTD: Tensor) -> Tensor:
    # Nothing is drawn on meta; keeping CPU random states would only add their bytes to the ledger.
    return checkpoint(block, hidden_BTD, use_reentrant=False, preserve_rng_state=False)


def meta_batch() -> DeviceBatch:
    shape = (BATCH_SIZE, SEQ_LEN)
    tokens, targets = (torch.empty(shape, dtype=torch.int64, device=META) for _ in range(2))
    return DeviceBatch(tokens, targets, num_targets=targets.numel())


def plain_peak(config: ModelConfig, run_block: Block) -> int:
    """Return the peak of one forward and backward pass through one autograd graph."""
    ledger = StorageLedger()
    with ledger:
        model = build_model(config, torch.float32, META)
        batch = meta_batch()
        hidden_BTD = model.embedding(batch.token_ids_BT)
        for block in model.blocks:
            hidden_BTD = run_block(block, hidden_BTD)
        loss = model.head(hidden_BTD, batch.target_ids_BT)
        del hidden_BTD
        loss.backward()
    return ledger.peak_bytes


def executor_peak(config: ModelConfig, stack: Sequence[Optimization]) -> int:
    ledger = StorageLedger()
    with ledger:
        model = build_model(config, torch.float32, META)
        plan, copies = plan_of(stack), CopyEngine(VirtualTransfer(), ledger)
        weights = WeightStore(model, plan, Shards(copies))
        executor = Executor(model, weights, plan, Shards(copies), wants_norm=False)
        executor.forward_backward([meta_batch()], seed=0)
    return ledger.peak_bytes


def large_vocabulary(config: ModelConfig) -> ModelConfig:
    """Return a model whose peak is at the logits, where nothing of a block's backward pass is left."""
    return replace(config, vocab_size=2000, num_blocks=6)


def small_vocabulary(config: ModelConfig) -> ModelConfig:
    """Return a model whose peak is in a block's backward pass."""
    return replace(config, vocab_size=11, width=64, ffn_width=256, num_blocks=6)


@pytest.mark.parametrize("name", MODELS)
def test_keeping_everything_peaks_at_the_head_like_plain_autograd(name: str) -> None:
    config = large_vocabulary(MODELS[name])
    assert executor_peak(config, []) == plain_peak(config, call)


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_peaks_at_the_head_like_torch_checkpoint(name: str) -> None:
    config = large_vocabulary(MODELS[name])
    assert executor_peak(config, [GradientCheckpointing(recompute_every=1)]) == plain_peak(config, checkpointed)


@pytest.mark.parametrize("name", MODELS)
def test_keeping_everything_peaks_in_a_block_like_plain_autograd(name: str) -> None:
    # Less a scalar at most: the executor has no unit gradient of the loss at that time.
    config = small_vocabulary(MODELS[name])
    extra = executor_peak(config, []) - plain_peak(config, call)
    assert -SCALAR_BYTES <= extra <= 0


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_peaks_in_a_block_like_torch_checkpoint(name: str) -> None:
    config = small_vocabulary(MODELS[name])
    extra = executor_peak(config, [GradientCheckpointing(recompute_every=1)]) - plain_peak(config, checkpointed)
    # The scalar of the test above; and one vector of the feed-forward's width: the gradient of its bias is made
    # at the peak of one and just after the peak of the other.
    bias_bytes = 4 * config.ffn_width
    assert -SCALAR_BYTES <= extra <= bias_bytes


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_holds_less_than_keeping(name: str) -> None:
    config = small_vocabulary(MODELS[name])
    assert executor_peak(config, [GradientCheckpointing(recompute_every=1)]) < executor_peak(config, [])


def boundary_bytes(config: ModelConfig, itemsize: int = 4) -> int:
    return BATCH_SIZE * SEQ_LEN * config.width * itemsize


def boundaries_at_the_head(config: ModelConfig, stack: Sequence[Optimization], accum_steps: int = 1) -> int:
    """Return the bytes of kept block inputs when the last micro-batch of the first group enters the head."""
    batches = random_steps(config, 1, accum_steps, BATCH_SIZE, SEQ_LEN)
    trace = record_steps(config, compose(stack), batches, VirtualTransfer())
    by_class, _ = holders(trace, last_event_of_first_head(trace))
    return by_class[TensorClass.BOUNDARY]


def last_event_of_first_head(trace: LedgerTrace) -> int:
    at_head = [op.unit == "head" for op in trace.step_ops(0)]
    after = at_head.index(False, at_head.index(True))
    return trace.step_ops(0)[after].event - 1


@pytest.mark.parametrize(("interval", "num_kept"), [(1, 6), (2, 3), (3, 2), (4, 2), (6, 1), (9, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_one_boundary_is_kept_per_interval(name: str, interval: int, num_kept: int) -> None:
    config = large_vocabulary(MODELS[name])
    kept = boundaries_at_the_head(config, [GradientCheckpointing(recompute_every=interval)])
    assert kept == num_kept * boundary_bytes(config)


def test_boundaries_are_kept_in_the_compute_dtype() -> None:
    config = large_vocabulary(LLAMA_GROUPED)
    kept = boundaries_at_the_head(config, [GradientCheckpointing(recompute_every=2), MixedPrecision()])
    assert kept == 3 * boundary_bytes(config, itemsize=2)


@pytest.mark.parametrize(("tied", "num_head_inputs"), [(False, 0), (True, 1)])
def test_a_vertical_schedule_keeps_the_boundaries_of_every_micro_batch(tied: bool, num_head_inputs: int) -> None:
    # A tied head's input waits as well: its weight gradient is computed when the embedding's is at hand.
    config = replace(large_vocabulary(GPT2_UNTIED), tied=tied)
    stack = [GradientCheckpointing(recompute_every=2), GradAccumulation(grad_accum_steps=3, schedule="vertical")]
    assert boundaries_at_the_head(config, stack, 3) == 3 * (3 + num_head_inputs) * boundary_bytes(config)

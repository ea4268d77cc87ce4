"""The ledger beside torch's own CPU allocator, which counts every tensor and shares no code with it.

Scratch that only CUDA's kernels take is in the ledger and not here; it is not at the peak of these steps.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hybridtrain.data.batches import BatchSampler
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import (
    ChunkedLoss,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    MixedPrecision,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridvalidation.experiments.allocator_witness import allocator_peak

SHAPE = ModelConfig(
    family="gpt2", vocab_size=512, max_seq_len=128, num_blocks=4, width=128, num_heads=4, num_kv_heads=4, ffn_width=512,
    tied=True,
)  # fmt: skip
Stack = Callable[[], list[Optimization]]
STACKS: dict[str, Stack] = {
    "vanilla": list,
    "checkpointing": lambda: [GradientCheckpointing()],
    "mixed": lambda: [MixedPrecision()],
    "streamed": lambda: [MixedPrecision(), WeightStreaming()],
    "chunked": lambda: [ChunkedLoss(loss_chunk_tokens=64)],
    "together": lambda: [
        GradientCheckpointing(), MixedPrecision(), Int8Optimizer(), GradAccumulation(grad_accum_steps=2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_the_ledger_counts_what_torchs_allocator_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = BatchSampler(np.arange(9999, dtype=np.uint16) % 512, micro_batch_size=4, seq_len=128, seed=0)
    plan, ledger = compose(STACKS[name]()), StorageLedger()
    count = 2 if name == "together" else 1
    # oneDNN, which some processors use for bfloat16, allocates scratch in fp32 for its products.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with allocator_peak() as witness, ledger:
        trainer = Trainer(SHAPE, plan, TrainerConfig(seed=0), DirectTransfer(torch.device("cpu")), ledger)
        for step in range(2):
            trainer.step([sampler.batch(step, number) for number in range(count)])
    assert witness.num_bytes - ledger.peak_bytes == torch.get_rng_state().nbytes


def test_the_witness_sees_a_tensor_that_no_ledger_counts() -> None:
    ledger = StorageLedger()
    with allocator_peak() as witness:
        hidden = torch.zeros(1000)
        with ledger:
            kept = torch.zeros(500)
    assert ledger.peak_bytes == kept.nbytes
    assert witness.num_bytes == hidden.nbytes + kept.nbytes

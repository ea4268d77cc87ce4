"""Documents packed in rows train as each would alone: attention, positions and targets stay inside a document."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridtrain.data.packing import EncodedDocuments, PackedRows, pack
from hybridtrain.engine.step import StepResult
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import Experts, ModelConfig
from hybridtrain.optimizations import ChunkedLoss, GradAccumulation, GradientCheckpointing, TiledMlp
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from tiny_models import GPT2_UNTIED, LLAMA_GROUPED

EXPERTS = Experts(count=4, per_token=2, ffn_width=24, balance_coefficient=1.0)
MIXTRAL = replace(LLAMA_GROUPED, family="mixtral", experts=EXPERTS)


def _documents(model: ModelConfig) -> EncodedDocuments:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 20, 20)
    size = int(lengths.sum())
    return EncodedDocuments(
        tokens=rng.integers(0, model.vocab_size, size).astype(np.uint16), ends=np.cumsum(lengths),
        counted=rng.integers(0, 2, size).astype(np.uint8),
    )  # fmt: skip


def _step(
    model: ModelConfig, seq_len: int, *stack: Optimization, joins: bool, pad_id: int = 0
) -> tuple[PackedRows, StepResult]:
    """Return all rows, and what one step over all of them in two micro-batches did."""
    documents = _documents(model)
    rows = pack(documents, seq_len=seq_len, seed=0, joins_documents=joins, what="it", pad_id=pad_id)
    batches = list(rows.batches(micro_batch_size=-(-rows.num_rows // 2), max_rows=rows.num_rows))
    plan = compose([GradAccumulation(grad_accum_steps=2), *stack])
    trainer = Trainer(model, plan, TrainerConfig(), DirectTransfer(torch.device("cpu")))
    return rows, trainer.step(batches)


@pytest.mark.parametrize(
    "stack", [(), (GradientCheckpointing(), TiledMlp(mlp_tile_tokens=5))], ids=["", "tiled"]
)  # fmt: skip
@pytest.mark.parametrize("model", [GPT2_UNTIED, LLAMA_GROUPED], ids=lambda model: model.family)
def test_packed_rows_train_as_documents_alone(model: ModelConfig, stack: tuple[Optimization, ...]) -> None:
    packed_rows, packed = _step(model, 24, *stack, joins=True)
    rows_alone, alone = _step(model, 24, joins=False)
    assert packed_rows.num_rows < rows_alone.num_rows / 1.5
    # The same float32 terms, summed in another order.
    assert (packed.loss, packed.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-5)
    assert packed.num_tokens == alone.num_tokens == packed_rows.num_tokens


@pytest.mark.parametrize("stack", [(), (GradientCheckpointing(), ChunkedLoss(loss_chunk_tokens=7))], ids=["", "lean"])
@pytest.mark.parametrize("model", [GPT2_UNTIED, LLAMA_GROUPED, MIXTRAL], ids=lambda model: model.family)
def test_padding_is_inert(model: ModelConfig, stack: tuple[Optimization, ...]) -> None:
    _, short = _step(model, 20, *stack, joins=False)
    for seq_len, pad_id in ((32, 0), (32, 1), (20, 1)):
        _, padded = _step(model, seq_len, *stack, joins=False, pad_id=pad_id)
        # As above: products of larger matrices add in another order.
        assert (padded.loss, padded.grad_norm) == pytest.approx((short.loss, short.grad_norm), rel=1e-5)
        assert padded.num_tokens == short.num_tokens

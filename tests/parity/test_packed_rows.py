"""Documents packed in rows train as each would alone: attention, positions and targets stay inside a document."""

import numpy as np
import pytest
import torch

from hybridtrain.data.packing import EncodedDocuments, pack
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import GradAccumulation
from hybridtrain.plan.compose import compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from tiny_models import GPT2_UNTIED, LLAMA_GROUPED


@pytest.mark.parametrize("model", [GPT2_UNTIED, LLAMA_GROUPED], ids=lambda model: model.family)
def test_packed_rows_train_as_documents_alone(model: ModelConfig) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 20, 20)
    size = int(lengths.sum())
    documents = EncodedDocuments(
        tokens=rng.integers(0, model.vocab_size, size).astype(np.uint16), ends=np.cumsum(lengths),
        counted=rng.integers(0, 2, size).astype(np.uint8),
    )  # fmt: skip
    results = []
    for joins in (True, False):
        rows = pack(documents, seq_len=24, seed=0, joins_documents=joins, what="it")
        batches = list(rows.batches(micro_batch_size=-(-rows.num_rows // 2), max_rows=rows.num_rows))
        plan = compose([GradAccumulation(grad_accum_steps=2)])
        trainer = Trainer(model, plan, TrainerConfig(), DirectTransfer(torch.device("cpu")))
        done = trainer.step(batches)
        results.append((rows.num_rows, done.loss, done.grad_norm))
    assert results[0][0] < results[1][0] / 1.5
    # The same float32 terms, summed in another order.
    assert results[0][1:] == pytest.approx(results[1][1:], rel=1e-5)

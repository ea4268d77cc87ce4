"""Training as somebody would write it with transformers and torch: what ours is held against, step by step.

B rows, T inputs of a row, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hybridtrain.data.batches import TokenBatch, document_positions
from hybridtrain.data.packing import EncodedDocuments, RowSampler, pack
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig

ADAMW = AdamWConfig(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
"""With an eps above what float32 leaves of a gradient that is 0: divided by itself it would be a step of any size."""
NUM_STEPS, ACCUMULATED, SEQ_LEN = 3, 2, 16
Told = list[tuple[float, float]]
"""Loss in nats per token, and gradient norm before clipping, of each step."""


def rows_of(config: ModelConfig, *, packing: str) -> list[list[TokenBatch]]:
    """Return the micro-batches of each step: documents of 3 to 15 tokens, of which a third counts as no target."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, SEQ_LEN, 30)
    size = int(lengths.sum())
    documents = EncodedDocuments(
        tokens=rng.integers(0, config.vocab_size, size).astype(np.uint16), ends=np.cumsum(lengths),
        counted=(rng.random(size) < 2 / 3).astype(np.uint8),
    )  # fmt: skip
    rows = pack(documents, seq_len=SEQ_LEN, seed=0, joins_documents=packing == "documents", what="it")
    sampler = RowSampler(rows, batch_size=2 * ACCUMULATED, micro_batch_size=2, seed=0)
    return [[sampler.batch(step, number) for number in range(ACCUMULATED)] for step in range(NUM_STEPS)]


def train_with_transformers(model: nn.Module, steps: Sequence[Sequence[TokenBatch]]) -> Told:
    """Return what torch's AdamW and clipping tell of a model of transformers, or of PEFT around one.

    The loss is that of transformers, of a micro-batch by its share of the targets; as ours it is told without the
    load-balancing loss.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": ADAMW.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps)
    told = []
    for batches in steps:
        counts = [int((batch.target_ids_BT >= 0).sum()) for batch in batches]
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            share = count / sum(counts)
            loss, balance = _losses(model, batch)
            (share * (loss + balance)).backward()
            total += share * loss.item()
        norm = nn.utils.clip_grad_norm_(trained, ADAMW.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        told.append((total, norm.item()))
    return told


def _losses(model: Any, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return transformers' cross entropy, and its load-balancing loss times its coefficient, 0 without one.

    Padding is told by the attention mask. Of rows of several documents transformers knows by positions that begin anew,
    and then takes no mask; their load-balancing loss is its own function's, with the mask.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    token_ids_BT, target_ids_BT = torch.from_numpy(batch.token_ids_BT), torch.from_numpy(batch.target_ids_BT)
    lengths_B = np.full(len(token_ids_BT), token_ids_BT.shape[1]) if batch.lengths_B is None else batch.lengths_B
    mask_BT = torch.from_numpy(np.arange(token_ids_BT.shape[1]) < lengths_B[:, None]).long()
    if batch.document_ids_BT is None:
        out = model(input_ids=token_ids_BT, attention_mask=mask_BT)
    else:
        positions_BT = torch.from_numpy(document_positions(batch.document_ids_BT))
        out = model(input_ids=token_ids_BT, position_ids=positions_BT, use_cache=False)
    loss = base.loss_function(out.logits, target_ids_BT, vocab_size=base.config.vocab_size, shift_labels=target_ids_BT)
    if not getattr(base.config, "output_router_logits", False):
        return loss, torch.zeros(())
    balance = out.aux_loss
    if batch.document_ids_BT is not None:
        balance = load_balancing_loss_func(out.router_logits, base.num_experts, base.num_experts_per_tok, mask_BT)
    return loss, base.router_aux_loss_coef * balance

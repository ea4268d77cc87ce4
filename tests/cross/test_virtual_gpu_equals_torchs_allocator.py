"""The independent oracle: torch's own allocator events of a real run on the CPU, against the virtual card's ledger.

The same script runs twice, for real under ``torch.profiler`` with memory, and on the virtual card. The peak and what
is left are the same to the byte, every allocation has its like. Left aside, each by its rule: numbers of up to 16 bytes
(counts of steps stay on the host, Python's numbers become tensors on the CPU alone), cuBLAS's two workspaces, and what
the CPU's kernels allocate and free inside one op (``SCRATCH``).
"""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from hybridtrain.virtual_gpu import VirtualGpu, find_card
from memory_events import profiled_changes, summary

CARD = find_card("rtx-4090")
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2Config": {
        "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "LlamaConfig": GROUPED,
    "MistralConfig": GROUPED | {"sliding_window": 16},
    "Qwen2Config": GROUPED,
    "Qwen3Config": HEADS,
    "Gemma2Config": HEADS | SPECIAL,
    "Gemma3TextConfig": HEADS | SPECIAL,
    "Phi3Config": GROUPED | SPECIAL,
    "Olmo2Config": GROUPED | SPECIAL,
    "MixtralConfig": GROUPED | SPECIAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": HEADS | SPECIAL | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "ViTConfig": SHAPE | {"image_size": 32, "patch_size": 8, "num_labels": 16},
    "T5Config": SPECIAL | {
        "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "OPTConfig": SHAPE | SPECIAL | {
        "ffn_dim": 128, "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": 64,
    },
}  # fmt: skip
SMALL = 16
SCRATCH = {
    66 * 8, 66 * 64 * 4, 4 * 64 * 4, 2 * 64 * 4, 64 * 4, 5056, 4 * 33 * 33 * 4, 4 * 3 * 32 * 32 * 4,
    4 * 16 * 64 * 4, 5 * 4, 9 * 4, 8 * 4,
}  # fmt: skip
"""Bytes: positions and rows sorted for an embedding's gradient, that gradient, sums of a bias over rows; the state of
the CPU's generator, which a recomputed block keeps; what T5's table of positions gets, made contiguous; a convolution's
operands in another layout; edges and counts of a histogram of tokens by expert."""
KINDS = {"ViTConfig": "AutoModelForImageClassification", "T5Config": "AutoModelForSeq2SeqLM"}
"""What a config is for, where it is no causal language model."""
Batch = dict[str, torch.Tensor]


def batch_for(name: str) -> Batch:
    if name == "ViTConfig":
        return {"pixel_values": torch.ones(4, 3, 32, 32), "labels": torch.arange(4)}
    ids = torch.arange(66).view(2, 33)
    return {"input_ids": ids, "labels": ids}


def build(name: str, device: str, *, recompute: bool) -> tuple[Any, torch.optim.Optimizer, Batch]:
    config = getattr(transformers, name)(**CONFIGS[name])
    kind = getattr(transformers, KINDS.get(name, "AutoModelForCausalLM"))
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = model.to(device).train()
    if recompute:
        # Renamed in transformers 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    batch = {key: value.to(device) for key, value in batch_for(name).items()}
    if name != "ViTConfig":
        batch["use_cache"] = False
    return model, torch.optim.AdamW(model.parameters(), foreach=False), batch


def train(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


def executed(name: str, *, recompute: bool) -> tuple[dict[int, int], int, int]:
    parts = build(name, "cpu", recompute=recompute)
    return summary(profiled_changes(lambda: train(*parts)), SMALL)


def planned(name: str, *, recompute: bool) -> tuple[dict[int, int], int, int]:
    with VirtualGpu(CARD) as gpu, torch.backends.cudnn.flags(enabled=False):  # the CPU takes no workspaces of cuDNN's
        gpu.ledger.scratch_rules[torch.ops.aten._softmax_backward_data.default] = lambda _args: 0  # CUDA's alone
        parts = build(name, "cuda", recompute=recompute)
        start = len(gpu.ledger.trace().events)
        train(*parts)
        trace = gpu.ledger.trace()  # before the model is dropped
    changes = [trace.sizes[event] if event >= 0 else -trace.sizes[~event] for event in trace.events[start:]]
    return summary((change for change in changes if change != CARD.cublas_workspace_bytes), SMALL)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize(("name", "recompute"), [*((name, False) for name in CONFIGS), ("LlamaConfig", True)])
def test_every_byte_is_torchs_own(name: str, *, recompute: bool) -> None:
    sizes, peak, left = planned(name, recompute=recompute)
    true_sizes, true_peak, true_left = executed(name, recompute=recompute)
    assert (peak, left) == (true_peak, true_left)
    assert not Counter(sizes) - Counter(true_sizes)
    assert set(Counter(true_sizes) - Counter(sizes)) <= SCRATCH


def test_a_block_that_is_older_than_the_profile_counts_for_nothing() -> None:
    older: list[torch.Tensor] = []

    def work() -> None:
        younger = torch.ones(1000)
        older.clear()
        del younger

    profiled_changes(lambda: older.append(torch.ones(65536)))
    assert profiled_changes(work) == [4000, -4000]

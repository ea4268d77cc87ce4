"""Adapters merged into a folder of transformers, and written as PEFT's files (read by PEFT itself in tests/peers)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_folders import FAMILY_MODELS, save_model, transformers_model
from hybridtrain.errors import ConfigError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import Lora, MixedPrecision, Nf4Weights, WeightStreaming
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.weights.adapters import export_adapter
from hybridtrain.weights.export import export_folder
from hybridtrain.weights.hf_source import open_folder
from tiny_models import random_steps

SETTINGS = TrainerConfig(optimizer=AdamWConfig(lr=3e-2), schedule=LrSchedule(kind="constant", warmup_steps=0))
TOKENS_BT = torch.arange(34).view(2, 17)
KINDS: dict[str, tuple[str, list[Optimization]]] = {
    "lora": ("llama", [Lora(rank=3, alpha=5.0)]),
    "dora-transposed-tied": ("gpt2-odd-tied", [Lora(rank=3, magnitude=True)]),
    "rslora-attention-streamed": ("qwen3", [Lora(rank=2, scaling="rslora", targets=("attention",)), WeightStreaming()]),
    "fused-disk": ("phi3", [Lora(rank=2), WeightStreaming(tier="disk", max_active_layers=1, prefetch_distance=0)]),
    "nf4": ("gpt2-untied", [Lora(rank=4), Nf4Weights(), WeightStreaming()]),
}


def trained(kind: str, tmp_path: Path) -> Trainer:
    name, stack = KINDS[kind]
    config = FAMILY_MODELS[name]
    source = open_folder(save_model(transformers_model(config), tmp_path / "source"), config)
    transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path)
    trainer = Trainer(config, compose(stack), SETTINGS, transfer, source=source)
    for batches in random_steps(config, 3):
        trainer.step(batches)
    trainer.model.eval()
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_has_the_same_logits_in_transformers(kind: str, tmp_path: Path) -> None:
    trainer = trained(kind, tmp_path)
    export_folder(trainer, tmp_path / "out", dtype=torch.float32)
    tokens_BT = TOKENS_BT % trainer.model.config.vocab_size
    with torch.no_grad():
        ours = trainer.executor.forward(tokens_BT)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens_BT).logits
        before = AutoModelForCausalLM.from_pretrained(tmp_path / "source")(tokens_BT).logits
    largest = before.abs().max()
    # One matmul instead of three: sums in another order.
    assert (ours - theirs).abs().max() < 2e-5 * largest
    assert (before - theirs).abs().max() > 1e-2 * largest


def test_adapters_are_written_as_peft_names_them(tmp_path: Path) -> None:
    trainer = trained("dora-transposed-tied", tmp_path)
    export_adapter(trainer, tmp_path / "out", base="my/base")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    prefix = "base_model.model.transformer.h.1.mlp.c_proj."
    named = dict(trainer.model.named_unit_parameters())
    for theirs, ours in {
        "lora_A.weight": "lora_a",
        "lora_B.weight": "lora_b",
        "lora_magnitude_vector": "magnitude",
    }.items():
        assert torch.equal(tensors.pop(prefix + theirs), named[f"block.1.ffn_out.adapter.{ours}"])
    assert len(tensors) == 2 * 4 * 3 - 3
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert (config["r"], config["lora_alpha"], config["use_dora"], config["fan_in_fan_out"]) == (3, 32.0, True, True)


def test_masters_of_adapters_are_exact(tmp_path: Path) -> None:
    KINDS["mixed"] = ("llama", [Lora(rank=3), MixedPrecision()])
    trainer = trained("mixed", tmp_path)
    export_adapter(trainer, tmp_path / "out", base="")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")[
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    ]
    rounded = dict(trainer.model.named_unit_parameters())["block.0.ffn_up.adapter.lora_a"]
    assert torch.equal(found.bfloat16(), rounded)
    assert not torch.equal(found, rounded.float())


def test_a_model_without_adapters_has_none_to_write(tmp_path: Path) -> None:
    config = FAMILY_MODELS["llama"]
    trainer = Trainer(config, compose([]), SETTINGS, DirectTransfer(torch.device("cpu")))
    with pytest.raises(ConfigError, match="has no adapters"):
        export_adapter(trainer, tmp_path / "out", base="")

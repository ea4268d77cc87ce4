"""TRL's script for supervised fine-tuning (``trl/scripts/sft.py``), as it is installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BLOCK = 512
"""Bytes to which the allocator rounds a request up."""
SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Save a model, its tokenizer and a data set of texts; return the model."""
    named = {"unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(tmp_path / "tiny")
    made = LlamaForCausalLM(LlamaConfig(**SHAPE))
    made.save_pretrained(tmp_path / "tiny")
    texts = [" ".join(f"w{row * word % 61}" for word in range(20 + row)) for row in range(16)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return made


def tensors(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


OPTIONS = (
    "--model_name_or_path", "tiny", "--dataset_name", "./data", "--output_dir", "out", "--max_steps", "3",
    "--per_device_train_batch_size", "2", "--max_length", "32", "--report_to", "none", "--dtype", "bfloat16",
)  # fmt: skip


def test_all_weights_are_trained_and_saved(
    model: LlamaForCausalLM, virtual: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    answer = virtual("-m", "trl.scripts.sft", *OPTIONS)
    parameters = list(model.parameters())
    assert answer["params"] == sum(parameter.numel() for parameter in parameters)
    assert [step["step"] for step in answer["steps"]] == [1, 2, 3]
    assert answer["fits"] is True
    assert answer["without_gradient"] == []
    weights = sum(rounded(2 * parameter.numel()) for parameter in parameters)
    assert answer["by_class"]["weight"] == weights + BLOCK  # frequencies of the positions
    assert answer["by_class"]["optim_state"] == 2 * weights + BLOCK * len(parameters)  # the fused update's counts
    assert tensors(tmp_path / "out" / "model.safetensors") == tensors(tmp_path / "tiny" / "model.safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert "hybridtrain_virtual" in file.metadata()  # shapes without values, not what lay at some address


@pytest.mark.usefixtures("model")
def test_adapters_are_trained_and_saved(virtual: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    lora = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--gradient_checkpointing")
    answer = virtual("-m", "trl.scripts.sft", *OPTIONS, *lora)
    assert len(answer["steps"]) == 3
    assert answer["without_gradient"] == []
    saved = tensors(tmp_path / "out" / "adapter_model.safetensors")
    assert sorted(saved.values()) == sorted(2 * [(4, 64), (64, 4), (4, 64), (32, 4)])

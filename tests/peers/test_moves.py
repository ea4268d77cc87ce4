"""How accelerate and Trainer bring a model to the card: its parameters live on, tied ones as one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)

from hybridtrain.virtual_gpu import VirtualGpu

QWEN = Qwen2Config(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4)
ROWS = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(8)]


@pytest.fixture(params=["qwen2", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = Qwen2ForCausalLM(QWEN) if request.param == "qwen2" else GPT2LMHeadModel(GPT2)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def mapped(folder: Path, device_map: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    optimizer = torch.optim.AdamW(model.parameters())
    for row in DataLoader(ROWS, batch_size=2):  # type: ignore[arg-type,var-annotated]
        model(**{name: value.to("cuda") for name, value in row.items()}).loss.backward()
        optimizer.step()
    return model, optimizer


def prepared(folder: Path, *, early: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(mixed_precision="bf16")
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = torch.optim.AdamW(model.parameters()) if early else None
    model = accelerator.prepare(model)
    optimizer = made or torch.optim.AdamW(model.parameters())
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(ROWS, batch_size=2))  # type: ignore[arg-type]
    for row in loader:
        accelerator.backward(model(**row).loss)
        optimizer.step()
    return model, optimizer.optimizer


def by_trainer(folder: Path, *, bf16: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    settings = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, report_to=[], bf16=bf16,
        save_strategy="no", optim="adamw_torch",
    )  # fmt: skip
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), settings, train_dataset=ROWS)  # type: ignore[arg-type]
    trainer.train()
    return trainer.model, trainer.optimizer.optimizer


WAYS = {
    "device_map of a name": lambda folder: mapped(folder, "cuda"),
    "device_map of a number": lambda folder: mapped(folder, {"": 0}),
    "prepare, the optimizer before": lambda folder: prepared(folder, early=True),
    "prepare, the optimizer after": lambda folder: prepared(folder, early=False),
    "Trainer": lambda folder: by_trainer(folder, bf16=False),
    "Trainer, bf16": lambda folder: by_trainer(folder, bf16=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_live_on(folder: Path, way: str) -> None:
    real = AutoModelForCausalLM.from_pretrained(folder)
    expected = [(name, parameter.numel()) for name, parameter in real.named_parameters()]
    with VirtualGpu("rtx-4090") as gpu:
        model, optimizer = WAYS[way](folder)
        assert [(name, parameter.numel()) for name, parameter in model.named_parameters()] == expected
        assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
        assert all(parameter.is_cuda for parameter in model.parameters())
        run = gpu.report()
    size = sum(4 * numel for _, numel in expected)
    assert gpu.num_params == sum(numel for _, numel in expected)
    assert size <= run.by_class()["optim_state"] - size <= size + 512 * 2 * len(expected)

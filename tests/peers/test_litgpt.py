"""LitGPT's commands, as they are installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from litgpt import GPT, Config
from litgpt.utils import save_config
from tokenizers import Tokenizer

SHAPE: dict[str, Any] = {
    "name": "tiny", "block_size": 64, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 4,
    "n_query_groups": 2, "n_embd": 64, "intermediate_size": 128, "bias": False, "parallel_residual": False,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rotary_percentage": 1.0,
}  # fmt: skip
DATA = '''
from dataclasses import dataclass

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader


@dataclass
class RandomTokens(DataModule):
    """Tokens at random."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=-1):
        self.batch_size, self.length = batch_size, max_seq_length + 1

    def train_dataloader(self):
        return DataLoader(torch.randint(0, 64, (16, self.length)), batch_size=self.batch_size)

    val_dataloader = train_dataloader
'''
TRAIN = ("--train.global_batch_size", "4", "--train.micro_batch_size", "2", "--out_dir", "out")


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> Config:
    """Save a checkpoint as LitGPT keeps one; return what it is of."""
    folder = tmp_path / "checkpoints" / "tiny"
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = Config(**SHAPE)
    save_config(config, folder)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    return config


def test_pretrain(virtual: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "random_tokens.py").write_text(DATA)
    answer = virtual(
        "-m", "litgpt", "pretrain", "pythia-14m", "--data", "random_tokens.RandomTokens", "--logger_name", "csv",
        "--train.max_seq_length", "32", "--train.max_tokens", "512", *TRAIN,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(Config.from_name("pythia-14m"))
    assert answer["params"] == sum(parameter.numel() for parameter in model.parameters())
    # 512 tokens in steps of 4 x 32; after the last the model is validated, which counts as one that has begun
    assert [step["step"] for step in answer["steps"]] == [1, 2, 3, 4, 5]
    assert answer["without_gradient"] == []
    assert (tmp_path / "out" / "final" / "lit_model.pth").is_file()


def test_finetune_lora(checkpoint: Config, virtual: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    rows = [{"instruction": f"w{row} w{row + 1}", "input": "", "output": "w3 w4 w5"} for row in range(20)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    answer = virtual(
        "-m", "litgpt", "finetune_lora", "checkpoints/tiny", "--data", "JSON", "--data.json_path", "data.json",
        "--data.val_split_fraction", "0.2", "--data.num_workers", "0", "--train.max_steps", "2", "--train.epochs", "1",
        "--train.lr_warmup_steps", "1", "--eval.max_new_tokens", "4", *TRAIN,
    )  # fmt: skip
    adapters = 2 * (2 * 8 * 64 + 8 * (64 + 32))  # of queries and values, rank 8, in two blocks
    assert answer["params"] == adapters + sum(parameter.numel() for parameter in GPT(checkpoint).parameters())
    assert answer["without_gradient"] == []
    assert (tmp_path / "out" / "final" / "lit_model.pth.lora").is_file()
    assert (tmp_path / "out" / "final" / "lit_model.pth").is_file()  # the adapters merged into the weights

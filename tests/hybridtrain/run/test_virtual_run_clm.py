"""``hybridtrain virtual`` and a script in the manner of transformers' examples/pytorch/language-modeling/run_clm.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from hybridtrain.cli.main import main

SCRIPT = '''"""Fine-tune a causal language model on a text file."""
import argparse
import math
import random
from itertools import chain
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, get_scheduler, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path")
parser.add_argument("--train_file")
parser.add_argument("--block_size", type=int, default=32)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--output_dir")
args = parser.parse_args()
set_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

config = AutoConfig.from_pretrained(args.model_name_or_path)
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config, dtype=torch.bfloat16)
if model.get_input_embeddings().weight.shape[0] < 128:
    model.resize_token_embeddings(128)
model.gradient_checkpointing_enable()
model.to(device)

lines = [[ord(letter) for letter in line] for line in Path(args.train_file).read_text().splitlines(keepends=True)]
joined = list(chain(*lines))
total = len(joined) // args.block_size * args.block_size
blocks = [joined[i : i + args.block_size] for i in range(0, total, args.block_size)]
rows = [{"input_ids": block, "attention_mask": [1] * len(block), "labels": block} for block in blocks]
random.shuffle(rows)
train = DataLoader(rows[4:], shuffle=True, collate_fn=default_data_collator, batch_size=2, pin_memory=True)
evaluation = DataLoader(rows[:4], collate_fn=default_data_collator, batch_size=4)

decayed = [p for n, p in model.named_parameters() if "norm" not in n]
others = [p for n, p in model.named_parameters() if "norm" in n]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-5)
steps = len(train) // args.gradient_accumulation_steps
schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=steps)
for epoch in range(1):
    model.train()
    total_loss = 0
    for step, batch in enumerate(train):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        loss = model(**batch).loss
        total_loss += loss.detach().float()
        (loss / args.gradient_accumulation_steps).backward()
        if step % args.gradient_accumulation_steps == args.gradient_accumulation_steps - 1:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(f"step {step}: norm {norm:.2f}, {torch.cuda.max_memory_allocated()} bytes")
    model.eval()
    losses = []
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**{name: value.to(device) for name, value in batch.items()})
        losses.append(outputs.loss.repeat(4))
    print("perplexity", math.exp(torch.mean(torch.cat(losses))), total_loss.item() / len(train))
    torch.save({"epoch": epoch, "optimizer": optimizer.state_dict()}, f"{args.output_dir}/state.pt")
model.save_pretrained(args.output_dir)
'''


@pytest.mark.filterwarnings("default")  # transformers' own
def test_a_model_is_loaded_tuned_evaluated_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        vocab_size=120, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    (tmp_path / "train.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (tmp_path / "run_clm.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    files = ["--model_name_or_path", "base", "--train_file", "train.txt", "--output_dir", "out"]
    options = [f"{tmp_path / item}" if not item.startswith("--") else item for item in files]
    assert main(["virtual", "--card", "rtx-4090", "--json", "--", str(tmp_path / "run_clm.py"), *options]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert "perplexity" in captured.err
    # 20 lines of 44 letters in blocks of 32: 27, less 4, in 12 batches of 2, 2 of them a step; then the evaluation
    assert len(answer["steps"]) == 7
    assert answer["without_gradient"] == []
    blocks = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64)
    assert answer["params"] == 2 * 128 * 64 + 64 + blocks  # the vocabulary as it was enlarged
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.get_slice("lm_head.weight").get_shape() == [128, 64]
        assert file.get_slice("lm_head.weight").get_dtype() == "BF16"

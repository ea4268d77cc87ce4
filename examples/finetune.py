"""Fine-tune all parameters of Llama 3.2 1B with transformers: a script for a CUDA card, run on a virtual one."""

import argparse

import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="models/llama-3.2-1b")
parser.add_argument("--batch-size", type=int, default=1)
asked = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16).cuda()
model.train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(10):
    tokens = torch.randint(0, model.config.vocab_size, (asked.batch_size, 2048), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

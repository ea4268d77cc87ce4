"""Fine-tune Llama 3.2 1B in bfloat16 with bitsandbytes' 8-bit Adam, checkpointed, 8 sequences of 1,024 tokens."""

import bitsandbytes
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/llama-3.2-1b", dtype=torch.bfloat16).cuda()
model.train()
model.gradient_checkpointing_enable()
optimizer = bitsandbytes.optim.Adam8bit(model.parameters(), lr=1e-5)
for step in range(6):
    tokens = torch.randint(0, model.config.vocab_size, (8, 1024), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

"""Fine-tune all parameters of Llama 3.2 1B in bfloat16, checkpointed, AdamW, 4 sequences of 2,048 tokens."""

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/llama-3.2-1b", dtype=torch.bfloat16).cuda()
model.train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(6):
    tokens = torch.randint(0, model.config.vocab_size, (4, 2048), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

"""Pretrain GPT-2 124M: float32 parameters, bfloat16 autocast, fused AdamW, 12 sequences of 1,024 tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
for step in range(8):
    tokens = torch.randint(0, config.vocab_size, (12, 1024), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())

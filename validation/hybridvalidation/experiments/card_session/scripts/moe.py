"""Fine-tune a Mixtral of 8 small experts in bfloat16, AdamW, 2 sequences of 2,048 tokens."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
model = MixtralForCausalLM(config).to(torch.bfloat16).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(6):
    tokens = torch.randint(0, config.vocab_size, (2, 2048), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

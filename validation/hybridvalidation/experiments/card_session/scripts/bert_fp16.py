"""Fine-tune BERT base as a classifier: float16 autocast, GradScaler, AdamW, dropout, 32 sequences of 384 tokens."""

import torch
from transformers import BertConfig, BertForSequenceClassification

model = BertForSequenceClassification(BertConfig(num_labels=3)).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
scaler = torch.amp.GradScaler("cuda")
for step in range(8):
    tokens = torch.randint(0, 30_522, (32, 384), device="cuda")
    mask, labels = torch.ones_like(tokens), torch.randint(0, 3, (32,), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())

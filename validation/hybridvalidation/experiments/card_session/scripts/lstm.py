"""Train an LSTM language model of two layers: cuDNN's recurrent kernels, float32, Adam, 32 sequences of 256 tokens."""

import torch
from torch import nn

embedding, lstm = nn.Embedding(30_000, 1024).cuda(), nn.LSTM(1024, 1024, num_layers=2, batch_first=True).cuda()
head = nn.Linear(1024, 30_000).cuda()
optimizer = torch.optim.Adam([*embedding.parameters(), *lstm.parameters(), *head.parameters()])
for step in range(8):
    tokens = torch.randint(0, 30_000, (32, 257), device="cuda")
    hidden, _ = lstm(embedding(tokens[:, :-1]))
    loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

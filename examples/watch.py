"""Any PyTorch code on a card that is not here: peak bytes by class and the time of a step, without a GPU."""

# %% Meta tensors compute nothing and take no memory, whatever the model's size.
import torch
from torch import nn

from hybridtrain import watch

with watch("rtx-4090") as gpu, torch.device("meta"):
    model = nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step makes the optimizer's state
        gpu.begin_step()
        model(torch.empty(64, 8192)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

# %% What the card would have done.
print(gpu.report().summary())

"""Any training code, unmodified, on a virtual card: peak bytes by class and the time of a step."""

# %% A script as written for the card itself. Nothing is computed and no memory is taken.
import torch
from torch import nn

from hybridtrain import VirtualGpu

with VirtualGpu("rtx-4090") as gpu:
    model = nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step makes the optimizer's state
        loss = model(torch.randn(64, 8192, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("allocated:", torch.cuda.max_memory_allocated())

# %% What the card would have done, and where placeholder values were used.
print(gpu.report().summary())
print("placeholders:", gpu.placeholders())

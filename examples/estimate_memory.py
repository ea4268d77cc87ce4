"""Memory of a training step of any model: does it fit, the largest batch. No card, no memory."""

# %% A function that builds the model, and a batch. Any nn.Module works, transformers' models too.
import torch
from torch import nn

from hybridtrain import estimate_memory


def build() -> nn.Module:
    """Return an encoder with 50 million parameters."""
    layer = nn.TransformerEncoderLayer(1024, 16, dim_feedforward=4096, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


found = estimate_memory(build, torch.empty(4, 512, 1024), card="rtx-4060-ti-16gb", optimizer="AdamW")

# %% The answer.
print(found.summary())
print("fits an RTX 4090:", found.fits("rtx-4090"))
print("largest batch:", found.largest_batch())
for name, size in list(found.by_module().items())[:3]:
    print(f"{name:12} {size:>14,} B")

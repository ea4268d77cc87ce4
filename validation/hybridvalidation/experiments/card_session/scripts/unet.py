"""Train a U-Net of convolutions, group norms and attention: bfloat16 autocast, 8 latents of 64 x 64."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions with group norms, and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(values)))
        return self.conv2(F.silu(self.norm2(hidden))) + self.short(values)


class Attention(nn.Module):
    """Self-attention over all places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, values: Tensor) -> Tensor:
        batch, width, height, _ = values.shape
        query, key, value = self.qkv(self.norm(values)).view(batch, 3, width // 64, 64, -1).transpose(-1, -2).unbind(1)
        hidden = F.scaled_dot_product_attention(query, key, value)
        return values + self.out(hidden.transpose(-1, -2).reshape(batch, width, height, -1))


class UNet(nn.Module):
    """Three levels down and up."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280)) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up, before = nn.ModuleList(), nn.ModuleList(), widths[0]
        for width in widths:
            self.down.append(nn.Sequential(Residual(before, width), Attention(width)))
            before = width
        self.middle = Residual(before, before)
        for width in reversed(widths):
            self.up.append(nn.Sequential(Residual(before + width, width), Attention(width)))
            before = width
        self.leave = nn.Conv2d(before, 4, 3, padding=1)

    def forward(self, values: Tensor) -> Tensor:
        hidden, kept = self.enter(values), []
        for level in self.down:
            hidden = level(hidden)
            kept.append(hidden)
            hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden)
        for level in self.up:
            hidden = level(torch.cat([F.interpolate(hidden, scale_factor=2.0), kept.pop()], 1))
        return self.leave(hidden)


model = UNet().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(6):
    images, noise = torch.randn(8, 4, 64, 64, device="cuda"), torch.randn(8, 4, 64, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.mse_loss(model(images + noise), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())

"""Train ViT-B/16 of timm: bfloat16 autocast, AdamW, 64 images of 224 x 224."""

import timm
import torch

model = timm.create_model("vit_base_patch16_224").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    images, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())

"""Fine-tune Whisper small: float16 autocast, GradScaler, AdamW, 8 recordings of 30 seconds."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
    encoder_ffn_dim=3072, decoder_ffn_dim=3072,
)  # fmt: skip
model = WhisperForConditionalGeneration(config).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cuda")
for step in range(6):
    features, labels = torch.randn(8, 80, 3000, device="cuda"), torch.randint(0, 50_000, (8, 128), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_features=features, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())

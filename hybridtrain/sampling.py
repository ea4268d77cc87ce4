"""Text from a trained model. B batch of one, T sequence, V vocabulary."""

import numpy as np
import torch

from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS, decode_tokens, encode_bytes
from hybridtrain.errors import DataError
from hybridtrain.trainer import Trainer

_TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(trainer: Trainer, prompt: str, *, num_tokens: int, seed: int) -> str:
    """Return ``prompt`` continued by ``num_tokens`` bytes, drawn at temperature 0.8 from the byte tokens."""
    model = trainer.model
    device = model.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = [int(token) for token in encode_bytes(prompt.encode() or b"\n")]
    if max(tokens) >= model.config.vocab_size:
        raise DataError(
            f"sample prompt {prompt!r}: byte token {max(tokens)} is outside the model's vocabulary of "
            f"{model.config.vocab_size}; choose a prompt of its tokens, or sample_tokens = 0 for data that are no bytes"
        )
    model.eval()
    for _ in range(num_tokens):
        window_BT = torch.tensor([tokens[-model.config.max_seq_len :]], device=device)
        logits_V = trainer.executor.forward(window_BT)[0, -1, :NUM_BYTE_TOKENS].float() / _TEMPERATURE
        tokens.append(int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator)))
    model.train()
    return decode_tokens(np.array(tokens, dtype=np.uint16)).decode(errors="replace")

"""Text from a trained model. B batch of one, T sequence, V vocabulary."""

import torch

from hybridtrain.data.tokenizer import ByteTokenizer, Tokenizer
from hybridtrain.errors import DataError
from hybridtrain.trainer import Trainer

_TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(
    trainer: Trainer, prompt: str, *, num_tokens: int, seed: int, tokenizer: Tokenizer | None = None
) -> str:
    """Return ``prompt`` continued by ``num_tokens`` tokens, sampled at temperature 0.8.

    Sampling stops at an end-of-text token; without ``tokenizer`` (bytes) it continues.
    """
    tokenizer = tokenizer or ByteTokenizer()
    model = trainer.model
    device = model.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = [*tokenizer.bos_ids, *tokenizer.encode([prompt])[0].ids.tolist()] or list(tokenizer.stop_ids)
    if not tokens:
        tokens = tokenizer.encode(["\n"])[0].ids.tolist()
    if max(tokens) >= model.config.vocab_size:
        raise DataError(
            f"sample prompt {prompt!r}: token {max(tokens)} is outside the model's vocabulary of "
            f"{model.config.vocab_size}; choose another prompt, or sample_tokens = 0 if the data are not bytes"
        )
    model.eval()
    for _ in range(num_tokens):
        window_BT = torch.tensor([tokens[-model.config.max_seq_len :]], device=device)
        logits_V = trainer.executor.forward(window_BT)[0, -1, : tokenizer.vocab_size].float() / _TEMPERATURE
        tokens.append(int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator)))
        if tokens[-1] in tokenizer.stop_ids:
            break
    model.train()
    return tokenizer.decode(tokens[len(tokenizer.bos_ids) :])

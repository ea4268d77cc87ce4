"""The kernels' random numbers in plain torch: Philox-4x32, so that a seed gives the same words on every device.

From "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., SC 2011), whose seven-round variant passes all of
BigCrush. P elements, C = P / 4 counters: counter e // 4 gives four words, and element e takes number e % 4 of them.
"""

import torch
from torch import Tensor

NUM_ROUNDS = 7
UNIFORM_BITS = 23
"""Bits of the fraction of a float32."""
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def random_seed(device: torch.device) -> Tensor:
    """Return a (1,) int64 seed drawn from the device's global generator, without waiting for the device."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


def random_words(seed: Tensor, num_elements: int, first: int = 0) -> Tensor:
    """Return the (P,) words in [0, 2^32), int64, of elements ``first``, a multiple of 4, ``first + 1``, ...

    ``seed`` is (1,) int64; the words live on its device.
    """
    counters_C = torch.arange(first // 4, first // 4 + -(-num_elements // 4), device=seed.device)
    # Words of 32 bits in int64: a product's 64 bits wrap rightly, and its upper half is masked after the shift.
    words = [counters_C & _MASK, counters_C >> 32, torch.zeros_like(counters_C), torch.zeros_like(counters_C)]
    keys = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(NUM_ROUNDS):
        product0_C, product2_C = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((product2_C >> 32) & _MASK) ^ words[1] ^ keys[0],
            product2_C & _MASK,
            ((product0_C >> 32) & _MASK) ^ words[3] ^ keys[1],
            product0_C & _MASK,
        ]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack(words, dim=1).flatten()[:num_elements]


def uniform_of(words_P: Tensor) -> Tensor:
    """Return float32 numbers in [0, 1), the upper 23 bits of each word; exact."""
    return (words_P >> (32 - UNIFORM_BITS)).float() * 2.0**-UNIFORM_BITS

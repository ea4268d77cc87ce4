"""Bytes as GPT-2 tokens: one token per byte, so any GPT-2 vocabulary reads any file without a tokenizer.

GPT-2's vocabulary starts with the 256 byte values. Its order is that of ``bytes_to_unicode`` in
https://github.com/openai/gpt-2/blob/master/src/encoder.py: first the bytes that print as one visible Latin-1
character, then the other 68, both in increasing order.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridtrain.errors import DataError

TokenArray: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
"""Token ids in one dimension, in memory or memory-mapped."""

NUM_BYTE_TOKENS: Final = 256
"""The smallest vocabulary that holds every byte."""

_VISIBLE: Final = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1))


_BYTE_OF_TOKEN: Final = np.array([*_VISIBLE, *sorted({*range(NUM_BYTE_TOKENS)} - {*_VISIBLE})], dtype=np.uint8)
_TOKEN_OF_BYTE: Final = np.argsort(_BYTE_OF_TOKEN).astype(np.uint16)


def encode_bytes(data: bytes) -> npt.NDArray[np.uint16]:
    """Return the token id of each byte: (len(data),) uint16, a new array."""
    return _TOKEN_OF_BYTE[np.frombuffer(data, dtype=np.uint8)]


def decode_tokens(token_ids: npt.NDArray[np.integer]) -> bytes:
    """Return the bytes of (N,) tokens; raises ``DataError`` for a token that is not one of the 256 byte tokens."""
    strange = np.flatnonzero((token_ids < 0) | (token_ids >= NUM_BYTE_TOKENS))
    if strange.size:
        position = int(strange[0])
        raise DataError(
            f"token {token_ids[position]} at position {position} is not a byte token; byte tokens are 0 to "
            f"{NUM_BYTE_TOKENS - 1}: decode with the tokenizer that encoded this text"
        )
    return bytes(_BYTE_OF_TOKEN[token_ids])


def byte_letters() -> list[str]:
    """Return the character that GPT-2's vocabulary uses for each byte, in the order of bytes."""
    visible = [chr(byte) for byte in _VISIBLE]
    return visible + [chr(NUM_BYTE_TOKENS + number) for number in range(NUM_BYTE_TOKENS - len(visible))]

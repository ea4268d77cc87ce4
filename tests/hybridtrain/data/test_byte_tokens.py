import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS, decode_tokens, encode_bytes
from hybridtrain.errors import DataError


@pytest.mark.parametrize(
    ("byte", "token"),
    [
        (b"!", 0),
        (b"A", 32),
        (b"a", 64),
        (b"~", 93),
        (b"\xa1", 94),
        (b"\xac", 105),
        (b"\xae", 106),
        (b"\xff", 187),
        (b"\x00", 188),
        (b"\n", 198),
        (b" ", 220),
        (b"\x7f", 221),
        (b"\xa0", 254),
        (b"\xad", 255),
    ],
)
def test_tokens_are_those_of_gpt2(byte: bytes, token: int) -> None:
    assert encode_bytes(byte).tolist() == [token]


def test_every_byte_has_its_own_token() -> None:
    tokens = encode_bytes(bytes(range(256)))
    assert tokens.dtype == np.uint16
    assert sorted(tokens.tolist()) == list(range(NUM_BYTE_TOKENS))


@given(st.binary())
def test_bytes_come_back(data: bytes) -> None:
    assert decode_tokens(encode_bytes(data)) == data


@pytest.mark.parametrize("strange", [256, 50256, -1])
def test_a_token_that_is_no_byte_is_named_with_its_position(strange: int) -> None:
    with pytest.raises(DataError, match=f"token {strange} at position 2 is not a byte token;"):
        decode_tokens(np.array([0, 255, strange, 300], dtype=np.int64))


def test_encoding_gives_an_array_of_its_own() -> None:
    tokens = encode_bytes(b"aa")
    tokens[0] = 7
    assert encode_bytes(b"aa").tolist() == [64, 64]

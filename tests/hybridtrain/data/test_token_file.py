from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtrain.data import token_file
from hybridtrain.data.token_file import TokenFormat, open_token_file, write_token_file
from hybridtrain.errors import DataError

WIDE = {TokenFormat.RAW_UINT32, TokenFormat.LLMC_LLAMA3}


def header(*items: int) -> bytes:
    array = np.zeros(256, dtype="<i4")
    array[: len(items)] = items
    return array.tobytes()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def u16(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<u2").tobytes()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 50256), min_size=2, max_size=50), token_format=st.sampled_from(TokenFormat))
def test_what_is_written_is_read_back(tmp_path: Path, tokens: list[int], token_format: TokenFormat) -> None:
    path = tmp_path / ("t.uint32.bin" if token_format == TokenFormat.RAW_UINT32 else "t.bin")
    write_token_file(path, np.array(tokens), token_format)
    file = open_token_file(path, vocab_size=50257)
    assert file.tokens.tolist() == tokens
    assert file.format == token_format
    assert file.path == path
    assert file.tokens.dtype == (np.uint32 if token_format in WIDE else np.uint16)
    assert list(tmp_path.iterdir()) == [path], "no unfinished file stays"
    path.unlink()


def test_tokens_are_read_only(tmp_path: Path) -> None:
    tokens = open_token_file(write(tmp_path / "t.bin", u16(1, 2, 3)), vocab_size=10).tokens
    assert not tokens.flags.writeable


def test_a_file_as_llmc_writes_it_is_recognised(tmp_path: Path) -> None:
    gpt2 = write(tmp_path / "gpt2.bin", header(20240520, 1, 3) + u16(50256, 0, 7))
    file = open_token_file(gpt2, vocab_size=50257)
    assert (file.format, file.tokens.tolist()) == (TokenFormat.LLMC_GPT2, [50256, 0, 7])
    wide = np.array([128000, 5], dtype="<u4").tobytes()
    llama = write(tmp_path / "llama.bin", header(20240801, 7, 2) + wide)
    file = open_token_file(llama, vocab_size=128256)
    assert (file.format, file.tokens.tolist()) == (TokenFormat.LLMC_LLAMA3, [128000, 5])


def test_the_type_of_a_raw_file_comes_from_option_name_or_default(tmp_path: Path) -> None:
    content = u16(1, 0, 2, 0)
    plain, named = write(tmp_path / "t.bin", content), write(tmp_path / "t.uint32.bin", content)
    assert open_token_file(plain, vocab_size=9).tokens.tolist() == [1, 0, 2, 0]
    assert open_token_file(plain, vocab_size=9, dtype="uint32").tokens.tolist() == [1, 2]
    assert open_token_file(named, vocab_size=9).tokens.tolist() == [1, 2]
    assert open_token_file(named, vocab_size=9, dtype="uint16").tokens.tolist() == [1, 0, 2, 0]


def test_the_digest_is_of_type_and_tokens_not_of_the_header(tmp_path: Path) -> None:
    paths = {token_format: tmp_path / f"{token_format}.bin" for token_format in TokenFormat}
    for token_format, path in paths.items():
        write_token_file(path, np.array([1, 2, 3]), token_format)
    narrow = open_token_file(paths[TokenFormat.RAW_UINT16], vocab_size=9)
    assert narrow.digest == open_token_file(paths[TokenFormat.LLMC_GPT2], vocab_size=9).digest
    assert narrow.digest == sha256(b"uint16" + u16(1, 2, 3)).hexdigest()
    assert narrow.digest != open_token_file(paths[TokenFormat.LLMC_LLAMA3], vocab_size=9).digest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds 0 tokens; at least 2 are needed"),
        (u16(1), "holds 1 tokens; at least 2 are needed"),
        (b"\1\0\2\0\3", "has 5 bytes, not a multiple of 2 bytes per uint16 token"),
        (header(20240520, 1, 3) + u16(1, 2), "its header states 3 tokens"),
        (header(20240520, 1, 1) + u16(1, 2), "its header states 1 tokens"),
        (header(20240520, 1, -1) + u16(1, 2), "its header states -1 tokens"),
        (header(20240520, 1, 2)[:100], "its header states 2 tokens"),
        (header(20240520, 1, 2)[:8], "its header states 0 tokens"),
        (header(20240520, 2, 2) + u16(1, 2), "magic number 20240520 with version 2; version 1 is supported:"),
        (header(20240801, 1, 1) + u16(1, 0), "magic number 20240801 with version 1; version 7 is supported:"),
        (header(20240801, 7, 1) + u16(1, 0), "holds 1 tokens"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=rf"t\.bin .*{words}"):
        open_token_file(write(tmp_path / "t.bin", content), vocab_size=50257)


def test_a_header_and_the_option_must_agree(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", header(20240520, 1, 2) + u16(1, 2))
    assert open_token_file(path, vocab_size=9, dtype="uint16").tokens.tolist() == [1, 2]
    with pytest.raises(DataError, match="contains uint16 tokens by its header, not uint32"):
        open_token_file(path, vocab_size=9, dtype="uint32")


@pytest.mark.parametrize("position", [0, 3, 7, 8])
def test_a_token_beyond_the_vocabulary_is_found_in_any_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(token_file, "_CHUNK_TOKENS", 4)
    tokens = [9] * 9
    tokens[position] = 10
    path = write(tmp_path / "t.bin", u16(*tokens))
    with pytest.raises(
        DataError, match=f"a vocabulary of 10 allows 0 to 9, but the token at position {position} is 10"
    ):
        open_token_file(path, vocab_size=10)
    assert open_token_file(path, vocab_size=11).tokens.size == 9


def test_chunks_do_not_show_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(11)
    write_token_file(tmp_path / "whole.bin", tokens, TokenFormat.LLMC_GPT2)
    whole = open_token_file(tmp_path / "whole.bin", vocab_size=11)
    monkeypatch.setattr(token_file, "_CHUNK_TOKENS", 4)
    write_token_file(tmp_path / "parts.bin", tokens, TokenFormat.LLMC_GPT2)
    assert (tmp_path / "parts.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert open_token_file(tmp_path / "parts.bin", vocab_size=11).digest == whole.digest


def test_a_folder_is_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file"):
        open_token_file(tmp_path, vocab_size=9)


def test_an_unreadable_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path, _mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "t.bin", u16(1, 2))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"t\.bin cannot be read \(Permission denied\)"):
        open_token_file(path, vocab_size=9)


@pytest.mark.parametrize(("token", "token_format"), [(65536, "raw_uint16"), (-1, "raw_uint32"), (2**32, "raw_uint32")])
def test_a_token_that_does_not_fit_leaves_the_old_file(tmp_path: Path, token: int, token_format: str) -> None:
    path = write(tmp_path / "t.bin", b"old")
    with pytest.raises(DataError, match=f"the token at position 1 is {token}"):
        write_token_file(path, np.array([1, token]), TokenFormat(token_format))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_more_tokens_than_the_header_counts_are_refused(tmp_path: Path) -> None:
    many: npt.NDArray[np.uint8] = np.broadcast_to(np.zeros(1, dtype=np.uint8), 2**31)  # takes no memory
    with pytest.raises(DataError, match=r"2147483648 tokens do not fit llm\.c's header"):
        write_token_file(tmp_path / "t.bin", many, TokenFormat.LLMC_GPT2)


def test_writing_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        write_token_file(tmp_path / "no" / "t.bin", np.array([1, 2]), TokenFormat.RAW_UINT16)

"""Memory-mapped token files: raw ones as nanoGPT writes them, and those with llm.c's header.

A raw file is little-endian token ids and nothing else. llm.c
(https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py) puts 256 int32 in front: a magic
number, a version and the number of tokens. The magic number decides: as two uint16 tokens it would begin
with 55432 or 55713, which GPT-2's vocabulary of 50257 does not have, and as one uint32 it is beyond any
vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridtrain.atomic_write import replaced_file
from hybridtrain.config.decode import missing_path
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.data.file_array import open_array
from hybridtrain.errors import DataError

TokenDtype: TypeAlias = Literal["uint16", "uint32"]
"""Stored type of a token."""

_HEADER_ITEMS: Final = 256
_HEADER_BYTES: Final = _HEADER_ITEMS * 4
_MAX_HEADER_COUNT: Final = 2**31 - 1  # the count is an int32
_CHUNK_TOKENS: Final = 2**22  # 8 or 16 MiB at a time while a file is checked or written
_MIN_TOKENS: Final = 2  # one input and its target


class TokenFormat(StrEnum):
    """The layout of a token file."""

    RAW_UINT16 = "raw_uint16"
    """nanoGPT's ``*.bin``."""
    RAW_UINT32 = "raw_uint32"
    """Raw uint32 tokens, recognised by the name ``*.uint32.bin``."""
    LLMC_GPT2 = "llmc_gpt2"
    """llm.c header, magic 20240520, version 1, uint16."""
    LLMC_LLAMA3 = "llmc_llama3"
    """llm.c header, magic 20240801, version 7, uint32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    dtype: TokenDtype
    magic: int | None = None
    version: int = 0

    @property
    def offset(self) -> int:
        """Bytes before the tokens."""
        return 0 if self.magic is None else _HEADER_BYTES

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy type in the file."""
        return np.dtype(self.dtype).newbyteorder("<")


_LAYOUTS: Final[dict[TokenFormat, _Layout]] = {
    TokenFormat.RAW_UINT16: _Layout(dtype="uint16"),
    TokenFormat.RAW_UINT32: _Layout(dtype="uint32"),
    TokenFormat.LLMC_GPT2: _Layout(dtype="uint16", magic=20240520, version=1),
    TokenFormat.LLMC_LLAMA3: _Layout(dtype="uint32", magic=20240801, version=7),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """An open token file, fully verified."""

    path: Path
    tokens: TokenArray
    """(N,) token ids, memory-mapped read-only."""
    format: TokenFormat
    digest: str
    """SHA-256 in hex of the stored type and the tokens, independent of a header."""


def open_token_file(path: Path, *, vocab_size: int, dtype: TokenDtype | None = None) -> TokenFile:
    """Open a token file and verify all tokens, at about a second per gigabyte.

    A raw file has ``dtype``, by default uint32 for ``*.uint32.bin``, else uint16. Raises ``DataError``: it is missing,
    truncated, of an unknown version or another type, or has a token of ``vocab_size`` or more.
    """
    if not path.is_file():
        raise DataError(f"{path} {'is not a file' if path.exists() else missing_path(path)}")
    try:
        with path.open("rb") as file:  # what would be llm.c's magic number, version and count
            header = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
        token_format = _detect(path, dtype, *header[:2])
        layout = _LAYOUTS[token_format]
        _check_length(path, layout, declared=header[2])
        tokens: TokenArray = open_array(path, layout.stored, offset=layout.offset)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    total = sha256(layout.dtype.encode("ascii"))
    for chunk in _checked_chunks(tokens, vocab_size - 1, f"{path}: a vocabulary of {vocab_size}"):
        total.update(chunk.tobytes())
    return TokenFile(path=path, tokens=tokens, format=token_format, digest=total.hexdigest())


def write_token_file(path: Path, tokens: npt.NDArray[np.integer], token_format: TokenFormat) -> None:
    """Write (N,) integers of any type atomically, replacing an existing file.

    Raises:
        DataError: the folder is missing, a token does not fit the stored type, or the count does not fit llm.c's
        header. OSError: the disk fails.
    """
    layout = _LAYOUTS[token_format]
    if layout.magic is not None and tokens.size > _MAX_HEADER_COUNT:
        raise DataError(f"{tokens.size} tokens do not fit llm.c's header; write a raw file, or several files")
    if not path.parent.is_dir():
        raise DataError(f"{path} cannot be written: there is no folder {path.parent}")
    with replaced_file(path) as partial, partial.open("wb") as file:
        if layout.magic is not None:
            header = np.zeros(_HEADER_ITEMS, dtype="<i4")
            header[:3] = layout.magic, layout.version, tokens.size
            file.write(header.tobytes())
        for chunk in _checked_chunks(tokens, np.iinfo(layout.stored).max, f"{path}: {layout.dtype} tokens"):
            file.write(chunk.astype(layout.stored).tobytes())


def _detect(path: Path, dtype: TokenDtype | None, magic: int, version: int) -> TokenFormat:
    """Return the format of a file, from its first bytes or, for raw ones, its name."""
    for token_format, layout in _LAYOUTS.items():
        if layout.magic != magic:
            continue
        if layout.version != version:
            raise DataError(
                f"{path} has llm.c's magic number {magic} with version {version}; version {layout.version} is "
                f"supported: write the file with a current llm.c"
            )
        if dtype not in {None, layout.dtype}:
            raise DataError(f"{path} contains {layout.dtype} tokens by its header, not {dtype}; remove dtype")
        return token_format
    wide = path.name.endswith(".uint32.bin") if dtype is None else dtype == "uint32"
    return TokenFormat.RAW_UINT32 if wide else TokenFormat.RAW_UINT16


def _check_length(path: Path, layout: _Layout, declared: int) -> None:
    num_bytes = path.stat().st_size
    if layout.magic is not None:
        expected = _HEADER_BYTES + declared * layout.stored.itemsize
        if num_bytes != expected:
            raise DataError(
                f"{path} is truncated or damaged: its header states {declared} tokens ({expected} bytes), it has "
                f"{num_bytes} bytes; copy it again"
            )
    num_tokens, rest = divmod(num_bytes - layout.offset, layout.stored.itemsize)
    if rest:
        raise DataError(
            f"{path} has {num_bytes} bytes, not a multiple of {layout.stored.itemsize} bytes per {layout.dtype} "
            f"token; it is truncated or of another type: copy it again, or set dtype"
        )
    if num_tokens < _MIN_TOKENS:
        raise DataError(f"{path} holds {num_tokens} tokens; at least {_MIN_TOKENS} are needed")


def _checked_chunks(tokens: npt.NDArray[np.integer], largest: int, source: str) -> Iterator[npt.NDArray[np.integer]]:
    """Yield the tokens chunk by chunk; raises ``DataError`` for one that is negative or above ``largest``."""
    for first in range(0, tokens.size, _CHUNK_TOKENS):
        chunk = tokens[first : first + _CHUNK_TOKENS]
        if int(chunk.max()) > largest or int(chunk.min()) < 0:
            index = int(np.flatnonzero((chunk > largest) | (chunk < 0))[0])
            raise DataError(
                f"{source} allows 0 to {largest}, but the token at position {first + index} is {chunk[index]}; "
                "check that the tokenizer and the stored type are the right ones"
            )
        yield chunk

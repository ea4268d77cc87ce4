"""A corpus from any source of tokens: a train part, a validation part and a digest of both.

Held-out documents are chosen by a hash of the path, so that adding documents does not change the others. The embedded
corpus is the source code of the Python standard library on this machine: megabytes of real text that need no download
and no place in the repository. Text is read as byte tokens and held in memory, two bytes per byte of text; for more
than a few gigabytes write a token file (``hybridtrain.data.token_file``).
"""

import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS, TokenArray, encode_bytes
from hybridtrain.data.documents import open_source, path_hash
from hybridtrain.data.file_kinds import Kind
from hybridtrain.data.token_file import open_token_file
from hybridtrain.errors import DataError
from hybridtrain.plain_file import read_plain
from hybridtrain.units import MIB

EMBEDDED_BYTES: Final = 8 * MIB
"""Default size of the embedded corpus: more tokens than a short run reads, loaded in 0.1 s."""

VALIDATION_PERCENT: Final = 10
"""Percent of the documents, or of a single document's end, held out for validation."""

MIN_TOKENS: Final = 20
"""Smallest corpus: its validation tenth has one input token and its target."""

_TOKEN_FILES: Final = ("train.bin", "val.bin")
_SEPARATOR: Final = b"\0"  # after each document; GPT-2's end-of-text token is no byte
_SKIPPED_FOLDERS: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# These describe how this machine's Python was built; without them equal Python versions give equal corpora.
_SKIPPED_PREFIXES: Final = ("_sysconfigdata", "config-", "sitecustomize")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Training and validation tokens. The arrays may be memory-mapped, and are read-only."""

    name: str
    """Short name for tables: ``embedded``, or the name of the file or folder."""
    train: TokenArray
    """(N,) token ids."""
    validation: TokenArray
    """(M,) token ids, disjoint from ``train`` in its source."""
    digest: str
    """SHA-256 in hex of all source content."""
    num_documents: int
    """Documents in both parts; 0 where unknown, as in token files."""
    source: str
    """One sentence on where the tokens come from."""


def embedded_corpus(max_bytes: int = EMBEDDED_BYTES) -> Corpus:
    """Return the Python standard library's own sources as byte tokens, one document per file.

    Files are taken in the order of a hash of their path, an unbiased sample, up to ``max_bytes`` in total. Raises
    ``DataError`` if this Python has no source files installed, or ``max_bytes`` is too small to split.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, bytes] = {}
    room = max_bytes
    for path in sorted(_python_files(root), key=path_hash):
        if 0 < (root / path).stat().st_size <= room:
            documents[path] = (root / path).read_bytes()
            room -= len(documents[path])
    if not documents:
        raise DataError(
            f"the embedded corpus found no Python file of at most {max_bytes} bytes in {root}; raise "
            "max_bytes, or name a text file, a folder or a token file as the corpus"
        )
    source = f"{len(documents)} files of the Python {platform.python_version()} standard library, as byte tokens"
    return corpus_of_documents(documents, name="embedded", source=source)


def corpus_of_documents(documents: Mapping[str, bytes], *, name: str, source: str) -> Corpus:
    """Return documents as byte tokens, a NUL byte after each, in the order of a hash of their path.

    A document is held out for validation when the hash of its path, of several with the same content the first one's,
    falls into the lowest tenth. If that selects none, the document nearest to it is held out; of a single
    document the last tenth.

    ``documents`` has contents, which are not empty, by relative POSIX path. Raises ``DataError`` for too little text.
    """
    paths = sorted(documents, key=path_hash)
    first_of: dict[bytes, str] = {}
    owners = {path: first_of.setdefault(documents[path], path) for path in paths}
    if len(paths) > 1 and len(first_of) == 1:
        raise DataError(
            f"{source}: all {len(paths)} documents have the same content, so none can be held out; give "
            f"one of the files"
        )
    is_held_out = held_out(np.array([path_hash(owners[path]) for path in paths], dtype=np.uint64), VALIDATION_PERCENT)
    train: TokenArray
    validation: TokenArray
    train, validation = (
        encode_bytes(b"".join(documents[path] + _SEPARATOR for path in compress(paths, chosen)))
        for chosen in (~is_held_out, is_held_out)
    )
    if len(paths) == 1:
        train, validation = split_tail(train, source)
    if min(train.size, validation.size) < 2 or train.size + validation.size < MIN_TOKENS:
        sizes = f"{train.size} tokens to train and {validation.size} to validate on"
        raise DataError(_too_small(sizes, source))
    return Corpus(
        name=name, train=train, validation=validation, digest=_digest(documents, paths), num_documents=len(paths),
        source=source,
    )  # fmt: skip


def split_tail(
    tokens: TokenArray, source: str, percent: int = VALIDATION_PERCENT
) -> tuple[TokenArray, TokenArray]:  # fmt: skip
    """Split off the last ``percent`` of the tokens; return views of both parts.

    Raises ``DataError`` for less than ``MIN_TOKENS``.
    """
    if percent and tokens.size < MIN_TOKENS:
        raise DataError(_too_small(f"{tokens.size} tokens to train and to validate on", source))
    first = tokens.size - (max(1, tokens.size * percent // 100) if percent else 0)
    return tokens[:first], tokens[first:]


def _too_small(sizes: str, source: str) -> str:
    return f"{source}: {sizes} are too few; at least {MIN_TOKENS} are needed, thousands for training"


def _python_files(root: Path) -> Iterator[str]:
    """Yield the relative POSIX path of every library source, skipping tests and installed packages."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                yield Path(folder, name).relative_to(root).as_posix()


def held_out(ranks: npt.NDArray[np.uint64], percent: int) -> npt.NDArray[np.bool_]:
    """Return for each document whether it is held out.

    Documents of one rank stay together; some documents are always kept for each part.
    """
    distinct, first = np.unique(ranks, return_index=True)
    if not percent or distinct.size < 2:
        return np.zeros(ranks.size, dtype=np.bool_)
    distinct = distinct[np.argsort(first)]
    share = distinct % np.uint64(100)
    count = min(int((share < percent).sum()), distinct.size - 1)
    return np.isin(ranks, distinct[np.argsort(share, kind="stable")[: max(1, count)]])


def _digest(documents: Mapping[str, bytes], paths: list[str]) -> str:
    """Return the SHA-256 over every path and content; lengths keep the two apart."""
    total = sha256()
    for path in paths:
        name = path.encode("utf-8", "surrogateescape")
        total.update(np.array([len(name), len(documents[path])], dtype="<u8").tobytes())
        total.update(name)
        total.update(documents[path])
    return total.hexdigest()


def text_corpus(path: Path) -> Corpus:
    """Return a UTF-8 text file, or all UTF-8 text files below a folder, as byte tokens.

    A single file keeps its last tenth for validation. In a folder each file is a document, and whole documents are held
    out. ``open_source`` defines the files that are skipped.
    Raises ``DataError``: as ``open_source``, and for records and too little text.
    """
    files = open_source(path)
    for file in files.files:
        if file.kind is not Kind.TEXT:
            raise DataError(
                f"{file.path} contains {file.kind}, not plain text; give it in the [data] table of a training "
                f'file: path = "{file.path}"'
            )
    documents = {file.name: read_plain(file.path) for file in files.files}
    source = f"text file {path}"
    if path.is_dir():
        source = f"{len(documents)} text files below {path}, {len(files.left_out)} other files ignored"
    return corpus_of_documents(documents, name=_name(path), source=source)


def _name(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.name


def open_corpus(path: Path | None, *, vocab_size: int) -> Corpus:
    """Return the corpus at a path; every token is below ``vocab_size``.

    That is the embedded corpus for None; a ``*.bin`` token file, whose last tenth is for validation; a folder with
    ``train.bin`` and ``val.bin``; or a text file or a folder of text, read as byte tokens.
    Raises ``DataError``: the path is missing or cannot be used, or the vocabulary is too small for it.
    """
    if path is not None and is_token_path(path):
        return token_corpus(path, vocab_size=vocab_size)
    if vocab_size < NUM_BYTE_TOKENS:
        raise DataError(
            f"text needs {NUM_BYTE_TOKENS} byte tokens, but the model's vocab_size is {vocab_size}; use a model with "
            f"a larger vocabulary, or a token file"
        )
    return embedded_corpus() if path is None else text_corpus(path)


def is_token_path(path: Path) -> bool:
    """Return whether a path is a token file, or a folder with some."""
    if path.is_dir():
        return any((path / name).exists() for name in _TOKEN_FILES)
    return path.suffix == ".bin"


def token_corpus(path: Path, *, vocab_size: int, percent: int = VALIDATION_PERCENT) -> Corpus:
    """Return the tokens of a file, the last ``percent`` held out, or ``train.bin`` and ``val.bin`` of a folder."""
    if not path.is_dir():
        file = open_token_file(path, vocab_size=vocab_size)
        source = f"token file {path} ({file.format})"
        train, validation = split_tail(file.tokens, source, percent)
        digest = file.digest
    else:
        for name in _TOKEN_FILES:
            if not (path / name).exists():
                raise DataError(
                    f"{path} has no {name}; add it, or give a single *.bin file, whose last tenth is held out"
                )
        files = [open_token_file(path / name, vocab_size=vocab_size) for name in _TOKEN_FILES]
        train, validation = (file.tokens for file in files)
        digest = sha256("".join(file.digest for file in files).encode("ascii")).hexdigest()
        source = f"token files train.bin and val.bin ({files[0].format}) in {path}"
    return Corpus(name=_name(path), train=train, validation=validation, digest=digest, num_documents=0, source=source)

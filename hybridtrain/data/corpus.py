"""What every source of tokens becomes: a train part, a validation part and a digest of both.

Which document is held out for validation depends on its path, so adding a document to many does not move the
others. The embedded corpus is the source code of the Python standard library on this machine: megabytes of
real text that need no download and no place in the repository.
"""

import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np

from hybridtrain.data.byte_tokens import TokenArray, encode_bytes
from hybridtrain.errors import DataError
from hybridtrain.units import MIB

EMBEDDED_BYTES: Final = 8 * MIB
"""Default size of the embedded corpus: more tokens than a short run reads, loaded in a tenth of a second."""

VALIDATION_PERCENT: Final = 10
"""Share of the documents, or of one document's tail, held out for validation."""

MIN_TOKENS: Final = 20
"""Smallest corpus: a tenth of it is one input token and its target."""

_SEPARATOR: Final = b"\0"  # after each document; GPT-2's end-of-text token is no byte
_SKIPPED_FOLDERS: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# These describe how this machine's Python was built; without them equal Python versions give equal corpora.
_SKIPPED_PREFIXES: Final = ("_sysconfigdata", "config-", "sitecustomize")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Tokens to train and to validate on. The arrays may be memory-mapped; nobody writes to them."""

    name: str
    """Short name for tables: ``embedded``, or the name of the file or folder."""
    train: TokenArray
    """(N,) token ids."""
    validation: TokenArray
    """(M,) token ids, disjoint from ``train`` in its source."""
    digest: str
    """SHA-256 in hex of everything the corpus was made from."""
    num_documents: int
    """Documents in both parts together; 0 where the source does not tell, as in token files."""
    num_skipped_files: int = 0
    """Files of a folder that are not UTF-8 text."""
    source: str
    """One sentence on where the tokens come from."""


def embedded_corpus(max_bytes: int = EMBEDDED_BYTES) -> Corpus:
    """Return the Python standard library's own sources as byte tokens, one document per file.

    Files are taken in the order of a hash of their path: a part of the library is then a fair sample of it.

    Args:
        max_bytes: Upper bound of the source text taken.

    Raises:
        DataError: this Python has no sources beside it, or ``max_bytes`` is too small to split.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, bytes] = {}
    room = max_bytes
    for path in sorted(_python_files(root), key=_path_hash):
        if 0 < (root / path).stat().st_size <= room:
            documents[path] = (root / path).read_bytes()
            room -= len(documents[path])
    if not documents:
        raise DataError(
            f"the embedded corpus found no Python file of at most {max_bytes} bytes in {root}; raise "
            "max_bytes, or name a text file, a folder or a token file as the corpus"
        )
    version = platform.python_version()
    return corpus_of_documents(
        documents,
        name="embedded",
        source=f"{len(documents)} files of the Python {version} standard library, as byte tokens",
    )


def corpus_of_documents(
    documents: Mapping[str, bytes], *, name: str, source: str, num_skipped_files: int = 0
) -> Corpus:
    """Return documents as byte tokens, a NUL byte after each, in the order of a hash of their path.

    A document is held out for validation when the hash of its path falls into the lowest tenth. When that
    holds for none, the one nearest to it is held out; when there is one document only, its last tenth.

    Args:
        documents: Relative POSIX path to content, which is not empty.
        name: Name of the corpus.
        source: One sentence on where the documents come from.
        num_skipped_files: Files that were no text.

    Raises:
        DataError: too little text to split.
    """
    paths = sorted(documents, key=_path_hash)
    held_out = _held_out(paths)
    train = _tokens([documents[path] for path in paths if path not in held_out])
    validation = _tokens([documents[path] for path in paths if path in held_out])
    if len(paths) == 1:
        train, validation = split_tail(validation, source)
    if min(train.size, validation.size) < 2 or train.size + validation.size < MIN_TOKENS:
        found = f"{train.size} tokens to train and {validation.size} to validate on"
        raise DataError(_too_small(found, source))
    return Corpus(
        name=name,
        train=train,
        validation=validation,
        digest=_digest(documents, paths),
        num_documents=len(paths),
        num_skipped_files=num_skipped_files,
        source=source,
    )


def split_tail(tokens: TokenArray, source: str) -> tuple[TokenArray, TokenArray]:
    """Return views of all but the last tenth, and of the last tenth.

    Raises:
        DataError: fewer than ``MIN_TOKENS`` tokens.
    """
    if tokens.size < MIN_TOKENS:
        raise DataError(_too_small(f"{tokens.size} tokens to train and to validate on", source))
    num_validation = tokens.size * VALIDATION_PERCENT // 100
    return tokens[:-num_validation], tokens[-num_validation:]


def _too_small(found: str, source: str) -> str:
    """Return the sentence for a corpus that cannot be split."""
    return f"{source}: {found} are too few; at least {MIN_TOKENS} are needed, and thousands to learn from"


def _python_files(root: Path) -> Iterator[str]:
    """Yield the relative POSIX path of every library source, skipping tests and installed packages."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                yield Path(folder, name).relative_to(root).as_posix()


def _path_hash(path: str) -> int:
    """Return 64 bits of the SHA-256 of a path: the same on every machine, unlike ``hash``."""
    return int.from_bytes(sha256(path.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _held_out(paths: list[str]) -> set[str]:
    """Return the paths of the validation documents: never none, and never all of several."""
    by_rank = sorted(paths, key=lambda path: _path_hash(path) % 100)
    count = sum(_path_hash(path) % 100 < VALIDATION_PERCENT for path in paths)
    return set(by_rank[: max(1, min(count, len(paths) - 1))])


def _tokens(contents: list[bytes]) -> TokenArray:
    """Return documents as one array of byte tokens."""
    return encode_bytes(b"".join(content + _SEPARATOR for content in contents))


def _digest(documents: Mapping[str, bytes], paths: list[str]) -> str:
    """Return the SHA-256 over every path and content; lengths keep the two apart."""
    total = sha256()
    for path in paths:
        name = path.encode("utf-8", "surrogateescape")
        total.update(np.array([len(name), len(documents[path])], dtype="<u8").tobytes())
        total.update(name)
        total.update(documents[path])
    return total.hexdigest()

"""Documents in files: plain text, and records of text, of prompts with completions, of messages.

A text file is one document; each line of a .jsonl file, each element of a list of JSON and each row of a table is one.
Only a piece of a text file, a record, or one JSON file is in memory at a time. A fault of a record is a sentence
with file, line number and what is allowed.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from hybridtrain.config.decode import missing_path
from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.chat import ChatTemplate, Spans
from hybridtrain.data.file_kinds import (
    DOCUMENT_KEYS,
    NO_JSON,
    Kind,
    Record,
    is_about_records,
    is_json_text,
    json_kind,
    kind_of,
    packed_records,
    read_records,
    split_of,
)
from hybridtrain.data.template_renderer import TemplateLimitError
from hybridtrain.errors import DataError
from hybridtrain.plain_file import open_plain

_READ_BYTES: Final = 2**20
_PIECE_CHARACTERS: Final = 2**17
"""Characters of a text file encoded at a time; longer pieces are split."""
_BORDERS: Final = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)"), re.compile(r"\s(?=\S)"))
"""Split points in order of preference: a single newline between two words, which GPT-2's pattern makes a token of its
own; any newline; any space."""
_MOST_FAULTS: Final = 10
_MOST_NAMES: Final = 10
"""File names listed in a message, at most."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ALLOWED: Final = (
    'allowed: an object with "text", with "prompt" and "completion", or with "messages", a list of '
    '{"role": ..., "content": ...}'
)


class _LineError(ValueError):
    """The fault of a line: what is wrong, what is allowed, what to do."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a piece of one."""

    text: str
    counted: Spans | None = None
    """Character ranges whose tokens are targets; None: all."""
    opens: bool = True
    """Whether it starts its document, so that the begin token precedes it."""
    closes: bool = True
    """Whether it ends its document, so that the end token follows it."""
    ends: bool = True
    """Whether the next passage belongs to another document."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    name: str
    """Relative to the source, in POSIX form."""
    path: Path
    kind: Kind = Kind.TEXT
    digest: str = ""
    """SHA-256 of its content in hex; empty for an ignored file."""
    left_out: str = ""
    """Why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """The files at a path."""

    path: Path
    files: tuple[SourceFile, ...]
    digest: str
    """SHA-256 of names and contents in hex."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Ignored files of a folder, and why."""

    @property
    def has_records(self) -> bool:
        """Whether some documents are records (JSON lines, Parquet, Arrow)."""
        return any(file.kind is not Kind.TEXT for file in self.files)

    def contents(self) -> npt.NDArray[np.uint64]:
        """Return a 64-bit content hash of each document."""
        hashes: list[int] = []
        for file in self.files:
            if file.kind is Kind.TEXT:
                hashes.append(int(file.digest[:16], 16))
            else:
                records = (sha256(_content(record)) for _, record in read_records(file.path, file.kind))
                hashes += (int.from_bytes(digest.digest()[:8], "big") for digest in records)
        return np.array(hashes, dtype=np.uint64)

    def ranks(self) -> npt.NDArray[np.uint64]:
        """Return a 64-bit hash of each document that selects the held-out ones; equal content has equal hashes.

        It hashes a text file's path, as in a corpus, or a record's content.
        """
        texts = (file for file in reversed(self.files) if file.kind is Kind.TEXT)
        by_path = {int(file.digest[:16], 16): path_hash(file.name) for file in texts}
        return np.array([by_path.get(content, content) for content in self.contents().tolist()], dtype=np.uint64)

    def as_text(self) -> str:
        """Return a sentence on which files are read and which are ignored."""
        read = ", ".join(_some(sorted(f"{file.name} ({file.kind})" for file in self.files)))
        left_out = ", ".join(_some([f"{name} ({why})" for name, why in self.left_out]))
        return f"{self.path}: reads {read}" + (f"; ignores {left_out}" if left_out else "")


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"and {len(names) - _MOST_NAMES} more"]


def path_hash(path: str) -> int:
    """Return 64 bits of the SHA-256 of a path; unlike ``hash``, equal on every machine."""
    return int.from_bytes(sha256(path.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _visible_files(root: Path) -> Iterator[Path]:
    """Yield every file below a folder that is not hidden; links to folders are not followed."""
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _raise(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error


def open_source(path: Path, *, part: Literal["train", "validation"] = "train") -> TextSource:
    """Open the documents of a file or folder, which is read once completely.

    Hidden and empty files are ignored. In a folder, binary files, metadata of data sets and records of other splits are
    ignored. ``part`` "train" takes the split "train", or all records if there is none; "validation" takes "validation",
    else "test".

    Raises:
        DataError: the path is missing or unreadable, a file is damaged, a text file contains JSON, or there is no
        document.
    """
    if not path.exists():
        raise DataError(f"{path} {missing_path(path)}")
    files = [_opened(path, path.name, is_alone=True)] if not path.is_dir() else []
    if path.is_dir():
        names = sorted((file.relative_to(path).as_posix() for file in _visible_files(path)), key=path_hash)
        files = [_opened(path / name, name, is_alone=False) for name in names]
    if path.is_dir() and (
        splits := {split_of(file.name) for file in files if file.kind is not Kind.TEXT and file.digest}
    ):
        if damaged := next((file for file in files if file.left_out.startswith(NO_JSON)), None):
            raise DataError(f"{damaged.path} is {damaged.left_out}; fix it, or remove it from the folder")
        files = [file if file.left_out else replace(file, left_out=_unread(file, splits, part)) for file in files]
    left_out = tuple(sorted((file.name, file.left_out) for file in files if file.left_out))
    kept = tuple(file for file in files if file.digest and not file.left_out)
    if not kept:
        others = f" ({', '.join(_some([f'{name}: {why}' for name, why in left_out]))})" if left_out else ""
        raise DataError(
            f"{path} contains no UTF-8 text and no records{others}; give a text file, a .jsonl file, or a folder of "
            f"them"
        )
    total = sha256()
    for file in kept:
        total.update(f"{len(file.name)}:{file.name}:{file.digest}".encode("utf-8", "surrogateescape"))
    return TextSource(path=path, files=kept, digest=total.hexdigest(), left_out=left_out)


def holds_records(path: Path) -> bool:
    """Return whether a path is a file of records, or a folder with one."""
    if not path.is_dir():
        return kind_of(path) is not Kind.TEXT
    files = ((file, kind_of(file)) for file in _visible_files(path))
    return any(
        packed_records(file) or (isinstance(json_kind(file), Kind) if kind is Kind.JSON else kind is not Kind.TEXT)
        for file, kind in files
    )


def _opened(path: Path, name: str, *, is_alone: bool) -> SourceFile:
    """Return a file with its digest, empty for an empty one, or why it is left out; ``DataError``: it cannot be."""
    kind = kind_of(path)
    if packed_records(path):
        raise DataError(f"{path} is compressed, which is not supported; unpack it and remove the archive")
    digest, fault = _checked(path, is_text=kind not in {Kind.PARQUET, Kind.ARROW})
    if fault and (kind is not Kind.TEXT or is_alone):
        raise DataError(f"{path} is not UTF-8 text: {fault}; save it as UTF-8, or name a token file *.bin")
    if fault or not digest:
        return SourceFile(name, path, kind, left_out="no UTF-8 text" if fault else "")
    if kind is Kind.TEXT and is_json_text(path):
        raise DataError(
            f"{path} contains JSON, which is not trained on as plain text; rename it to .jsonl (one document per "
            f"line) or .json (a list), or remove it"
        )
    documents = json_kind(path) if kind is Kind.JSON else kind
    if isinstance(documents, Kind):
        return SourceFile(name, path, documents, digest)
    if is_alone and documents.startswith(NO_JSON):
        raise DataError(f"{path} is {documents}; fix it, or give a .jsonl file")
    if is_alone:
        raise DataError(f"{path} contains no document; {_ALLOWED}, or a list of them")
    return SourceFile(name, path, kind, left_out=documents)


def _unread(file: SourceFile, splits: set[str], part: str) -> str:
    """Return why a file is left out of a folder whose records are of these splits, or nothing."""
    if is_about_records(file.path):
        return "metadata"
    if file.kind is Kind.TEXT or "train" not in splits:
        return ""
    wanted = {"train", ""}
    if part == "validation":
        wanted = {"validation"} if "validation" in splits else {"test"} & splits or splits
    split = split_of(file.name)
    return "" if split in wanted else f"of the split {split}" if split else "not of a split"


def _content(record: Record) -> bytes:
    """Return canonical bytes, equal for equal records."""
    value = record
    if isinstance(record, bytes):
        try:
            value = json.loads(record)
        except (RecursionError, ValueError):
            return record
    if not isinstance(value, dict):
        return repr(value).encode("utf-8", "surrogatepass")
    texts = [value.get("text")] if "text" in value else [value.get("prompt"), value.get("completion")]
    if all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts)).encode("utf-8", "surrogatepass")
    messages = value.get("messages")
    if isinstance(messages, list):
        messages = [
            {key: part for key, part in message.items() if key != "weight"} if isinstance(message, dict) else message
            for message in messages
        ]
    return json.dumps([messages, value.get("tools")], sort_keys=True, default=str).encode("ascii")


def _checked(path: Path, *, is_text: bool) -> tuple[str, str]:
    """Return the digest of a file's content, empty for an empty one, and why it is no text, if it is to be one."""
    total, size, decoder = sha256(), 0, codecs.getincrementaldecoder("utf-8")()
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                total.update(chunk)
                if is_text and (nul := chunk.find(b"\0")) >= 0:
                    return "", f"byte {size + nul} is NUL"
                if is_text:
                    decoder.decode(chunk)
                size += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:  # the last character of the chunk before stands first in what is decoded
        first = size - len(decoder.getstate()[0]) + error.start
        return "", f"byte {first} is 0x{error.object[error.start]:02x}"
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return (total.hexdigest() if size else ""), ""


def read_documents(
    source: TextSource, template: Callable[[], ChatTemplate], *, counts_all: bool
) -> Iterator[list[Passage] | Iterator[Passage]]:
    """Yield the passages of each text file and each record.

    ``template`` returns the chat template, called only for messages. ``counts_all``: every token is a target, not only
    completions and answers. Raises ``DataError``: records are invalid; up to ten faults are listed.
    """
    faults: list[str] = []
    for file in source.files:
        if file.kind is Kind.TEXT:
            yield _text_passages(file.path)
            continue
        for where, record in read_records(file.path, file.kind):
            try:
                passages = _record_passages(record, template, counts_all=counts_all)
            except TemplateLimitError as error:
                raise DataError(f"{file.path}, {where}: {error}") from None
            except ValueError as error:
                faults.append(f"{file.path}, {where}: {error}")
                if len(faults) == _MOST_FAULTS:
                    raise DataError("\n".join([*faults, "there may be more; fix these first"])) from None
            else:
                yield passages
    if faults:
        raise DataError("\n".join(faults))


def _text_passages(path: Path) -> Iterator[Passage]:
    """Yield a text file in pieces whose tokens equal those of the whole."""
    opens, rest = True, ""
    with path.open(encoding="utf-8", newline="") as file:
        while chunk := file.read(_PIECE_CHARACTERS):
            text = rest + chunk
            ends = (max((match.end() for match in border.finditer(text)), default=0) for border in _BORDERS)
            cut = next(filter(None, ends), len(text)) if len(chunk) == _PIECE_CHARACTERS else 0
            if cut:
                yield Passage(text[:cut], opens=opens, closes=False, ends=False)
                opens = False
            rest = text[cut:]
    yield Passage(rest, opens=opens)


def _record_passages(record: Record, template: Callable[[], ChatTemplate], *, counts_all: bool) -> list[Passage]:
    """Return the document of a record, or several of one conversation; raises ``ValueError`` with what is wrong."""
    try:
        value = json.loads(record) if isinstance(record, bytes) else record
    except ValueError as error:
        raise _LineError(f"is not JSON ({error}); {_ALLOWED}") from None
    except RecursionError:
        raise _LineError(f"is nested too deeply; {_ALLOWED}") from None
    if not isinstance(value, dict):
        raise _LineError(f"found {type(value).__name__} {_shown(value)}; {_ALLOWED}")
    kinds = [kind for kind in DOCUMENT_KEYS if kind in value]
    if len(kinds) != 1:
        keys = f'has both "{kinds[0]}" and "{kinds[1]}"' if kinds else f"keys {sorted(value)}"
        raise _LineError(f"found {keys}; {_ALLOWED}, one of them")
    if kinds == ["messages"]:
        messages, tools = _messages(value["messages"], counts_all=counts_all), value.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise _LineError(
                f"tools: found {type(tools).__name__}; allowed: a list of tool descriptions, or no such key"
            )
        if counts_all:  # the template writes what stands before and after a conversation
            return [Passage(template().text(messages, tools), None, opens=False, closes=False)]
        answered = template().answered(messages, tools)
        return [Passage(text, answers, opens=False, closes=False) for text, answers in answered]
    if kinds == ["text"]:
        return [Passage(_string(value, "text"))]
    prompt, completion = _string(value, "prompt"), _string(value, "completion")
    counted = None if counts_all else ((len(prompt), len(prompt) + len(completion)),)
    return [Passage(prompt + completion, counted)]


def _messages(value: object, *, counts_all: bool) -> list[JsonMapping]:
    if not isinstance(value, list) or not value:
        raise _LineError(f"messages: found {_shown(value)}; allowed: a list of at least one message")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _LineError(f'{where}: found {_shown(message)}; {{"role": ..., "content": ...}} is allowed')
        if message.get("role") not in _ROLES:
            raise _LineError(f"{where}.role: found {_shown(message.get('role'))}; allowed: {', '.join(_ROLES)}")
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise _LineError(f"{where}.weight: found {_shown(weight)}; allowed: 1, or 0 to exclude it from the loss")
        if counts_all and not weight:
            raise _LineError(
                f"{where}.weight: 0 contradicts loss_on = 'all', which trains on everything; remove one of them"
            )
        if message.get("content") is None and message.get("tool_calls"):
            continue
        _string(message, "content", where=f"{where}.")
    return value


def _string(value: Mapping[str, object], key: str, *, where: str = "") -> str:
    """Return a text of a line."""
    if key not in value:
        raise _LineError(f"{where}{key} is missing; a string is required")
    text = value[key]
    if not isinstance(text, str):
        raise _LineError(f"{where}{key}: found {_shown(text)}; a string is required")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _LineError(f"{where}{key}: character {error.start} is an unpaired surrogate; write valid UTF-8") from None
    return text


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."

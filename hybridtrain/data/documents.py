"""Documents in files: plain text, and records of text, of prompts with completions, of messages.

A text file is one document; each line of a .jsonl file, each element of a list of JSON and each row of a table is one.
Nothing is held in memory but a piece of a text file, a record, or one file of JSON. A fault of a record is a sentence
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
"""Of a text file, encoded at a time; longer ones are cut."""
_BORDERS: Final = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)"), re.compile(r"\s(?=\S)"))
"""Where, in order of preference: after a line's end alone between two words, which byte-level tokenizers take for a
token of its own (the pattern of GPT-2 splits longer white space by what follows it); any line's end; any space."""
_MOST_FAULTS: Final = 10
_MOST_NAMES: Final = 10
"""Of files that a message names."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ALLOWED: Final = (
    'allowed is an object with "text", with "prompt" and "completion", or with "messages", a list of '
    '{"role": ..., "content": ...}'
)


class _LineError(ValueError):
    """The fault of a line: what is wrong, what is allowed, what to do."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a piece of one."""

    text: str
    counted: Spans | None = None
    """Characters whose tokens are targets; None: all."""
    opens: bool = True
    """It is the first of its document and wants what stands before one."""
    closes: bool = True
    """It wants what stands after a document."""
    ends: bool = True
    """The next passage is of another document."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    name: str
    """Relative to the source, in POSIX form."""
    path: Path
    kind: Kind = Kind.TEXT
    digest: str = ""
    """SHA-256 in hex of its content; empty: it is, or is left out."""
    left_out: str = ""
    """Why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """The files at a path."""

    path: Path
    files: tuple[SourceFile, ...]
    digest: str
    """SHA-256 in hex of names and contents."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Files of a folder that are not read, and why."""

    @property
    def has_records(self) -> bool:
        """Whether some documents are records."""
        return any(file.kind is not Kind.TEXT for file in self.files)

    def contents(self) -> npt.NDArray[np.uint64]:
        """Return 64 bits of each document's content, the same for equal content."""
        hashes: list[int] = []
        for file in self.files:
            if file.kind is Kind.TEXT:
                hashes.append(int(file.digest[:16], 16))
            else:
                records = (sha256(_content(record)) for _, record in read_records(file.path, file.kind))
                hashes += (int.from_bytes(digest.digest()[:8], "big") for digest in records)
        return np.array(hashes, dtype=np.uint64)

    def ranks(self) -> npt.NDArray[np.uint64]:
        """Return 64 bits of each document that say which are held out, the same for equal content.

        They are those of a text file's path, as in a corpus, or of a record's content.
        """
        texts = (file for file in reversed(self.files) if file.kind is Kind.TEXT)
        by_path = {int(file.digest[:16], 16): path_hash(file.name) for file in texts}
        return np.array([by_path.get(content, content) for content in self.contents().tolist()], dtype=np.uint64)

    def as_text(self) -> str:
        """Return a sentence on the files that are read and left out."""
        read = ", ".join(_some(sorted(f"{file.name} ({file.kind})" for file in self.files)))
        left_out = ", ".join(_some([f"{name} ({why})" for name, why in self.left_out]))
        return f"{self.path}: reads {read}" + (f"; leaves out {left_out}" if left_out else "")


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"and {len(names) - _MOST_NAMES} more"]


def path_hash(path: str) -> int:
    """Return 64 bits of the SHA-256 of a path: the same on every machine, unlike ``hash``."""
    return int.from_bytes(sha256(path.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _visible_files(root: Path) -> Iterator[Path]:
    """Yield every file below a folder that is not hidden; links to folders are not followed."""
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _raise(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error


def open_source(path: Path, *, part: Literal["train", "validation"] = "train") -> TextSource:
    """Return the documents of a file or a folder, read once from end to end.

    Hidden and empty files are passed over. Of a folder, files that are no text, files about the records beside them and
    records of another split are left out; where no file is of a split "train", all records are taken. The ``part``
    "train" takes that split, "validation" takes "validation", else "test".

    Raises:
        DataError: the path is missing or unreadable, a file of records or a single file is damaged, records have the
            name of a text, or there is no document.
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
            raise DataError(f"{damaged.path} is {damaged.left_out}; fix it, or move it away")
        files = [file if file.left_out else replace(file, left_out=_unread(file, splits, part)) for file in files]
    left_out = tuple(sorted((file.name, file.left_out) for file in files if file.left_out))
    kept = tuple(file for file in files if file.digest and not file.left_out)
    if not kept:
        others = f" ({', '.join(_some([f'{name}: {why}' for name, why in left_out]))})" if left_out else ""
        raise DataError(
            f"{path} holds no UTF-8 text and no records{others}; name a text file, a .jsonl file, or a folder with some"
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
        raise DataError(f"{path} is compressed, which is not supported; unpack it and move the archive away")
    digest, fault = _checked(path, is_text=kind not in {Kind.PARQUET, Kind.ARROW})
    if fault and (kind is not Kind.TEXT or is_alone):
        raise DataError(f"{path} is not UTF-8 text: {fault}; save it as UTF-8, or name token files *.bin")
    if fault or not digest:
        return SourceFile(name, path, kind, left_out="no UTF-8 text" if fault else "")
    if kind is Kind.TEXT and is_json_text(path):
        raise DataError(
            f"{path} holds JSON, which is not trained on as prose; call it .jsonl with a document a line, or "
            ".json with a list of them, or move it away"
        )
    documents = json_kind(path) if kind is Kind.JSON else kind
    if isinstance(documents, Kind):
        return SourceFile(name, path, documents, digest)
    if is_alone and documents.startswith(NO_JSON):
        raise DataError(f"{path} is {documents}; fix it, or name a .jsonl file")
    if is_alone:
        raise DataError(f"{path} holds no document; {_ALLOWED}, or a list of them")
    return SourceFile(name, path, kind, left_out=documents)


def _unread(file: SourceFile, splits: set[str], part: str) -> str:
    """Return why a file is left out of a folder whose records are of these splits, or nothing."""
    if is_about_records(file.path):
        return "about the records"
    if file.kind is Kind.TEXT or "train" not in splits:
        return ""
    wanted = {"train", ""}
    if part == "validation":
        wanted = {"validation"} if "validation" in splits else {"test"} & splits or splits
    split = split_of(file.name)
    return "" if split in wanted else f"of the split {split}" if split else "of no split"


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
    """Yield the passages of each file of text, and of each record.

    ``template`` returns the chat template, and is called where there are messages. ``counts_all``: every token is a
    target, not only those of completions and answers.
    Raises ``DataError``: records have faults; up to ten are listed.
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
                    raise DataError("\n".join([*faults, "and perhaps more; fix these lines first"])) from None
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
        raise _LineError(f"nests too deep to be read; {_ALLOWED}") from None
    if not isinstance(value, dict):
        raise _LineError(f"found {type(value).__name__} {_shown(value)}; {_ALLOWED}")
    kinds = [kind for kind in DOCUMENT_KEYS if kind in value]
    if len(kinds) != 1:
        keys = f'both "{kinds[0]}" and "{kinds[1]}"' if kinds else f"keys {sorted(value)}"
        raise _LineError(f"found {keys}; {_ALLOWED}, one of them")
    if kinds == ["messages"]:
        messages, tools = _messages(value["messages"], counts_all=counts_all), value.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise _LineError(
                f"tools: found {type(tools).__name__}; a list of tool descriptions is allowed, or no such key"
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
        raise _LineError(f"messages: found {_shown(value)}; a list of at least one message is allowed")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _LineError(f'{where}: found {_shown(message)}; {{"role": ..., "content": ...}} is allowed')
        if message.get("role") not in _ROLES:
            raise _LineError(f"{where}.role: found {_shown(message.get('role'))}; allowed: {', '.join(_ROLES)}")
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise _LineError(f"{where}.weight: found {_shown(weight)}; 0, which is not learned, or 1 is allowed")
        if counts_all and not weight:
            raise _LineError(f"{where}.weight: 0 beside loss_on = 'all', which learns all; leave one of them out")
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
        raise _LineError(
            f"{where}{key}: character {error.start} is half of a surrogate pair; write it as UTF-8"
        ) from None
    return text


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."

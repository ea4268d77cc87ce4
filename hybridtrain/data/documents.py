"""Documents in files: plain text, and JSON lines of text, of prompts with completions, of messages.

A text file is one document, each line of a .jsonl file is one. Nothing is held in memory but a piece of a text file or
a line. A fault of a line is a sentence with file, line number and what is allowed.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from hybridtrain.config.decode import missing_path
from hybridtrain.config.encode import JsonMapping

# The order of files and the share that is held out are those of a corpus, so that both read one folder alike.
from hybridtrain.data.chat import ChatTemplate, Spans
from hybridtrain.data.corpus import _path_hash, _visible_files
from hybridtrain.errors import DataError
from hybridtrain.plain_file import open_plain

JSONL: Final = ".jsonl"

_READ_BYTES: Final = 2**20
_PIECE_CHARACTERS: Final = 2**17
"""Of a text file, encoded at a time; longer ones are cut."""
_BORDERS: Final = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)"), re.compile(r"\s(?=\S)"))
"""Where, in order of preference: after a line's end alone between two words, which byte-level tokenizers take for a
token of its own (the pattern of GPT-2 splits longer white space by what follows it); any line's end; any space."""
_MOST_FAULTS: Final = 10
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ALLOWED: Final = (
    'allowed is an object with "text", with "prompt" and "completion", or with "messages", a list of '
    '{"role": ..., "content": ...}'
)


class _LineError(ValueError):
    """What is wrong with a line, what is allowed, what to do."""


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

    @property
    def is_jsonl(self) -> bool:
        """Whether each line is a document."""
        return self.path.suffix == JSONL


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """The files below a path."""

    path: Path
    files: tuple[SourceFile, ...]
    digest: str
    """SHA-256 in hex of names and contents."""
    num_skipped_files: int = 0
    """Files of a folder that are no UTF-8 text."""

    @property
    def has_jsonl(self) -> bool:
        """Whether some documents are lines."""
        return any(file.is_jsonl for file in self.files)

    def ranks(self) -> Iterator[int]:
        """Yield 64 bits for each document that say which are held out: those of its path, or of a line's content."""
        for file in self.files:
            if file.is_jsonl:
                for _, line in _lines(file.path):
                    yield int.from_bytes(sha256(line).digest()[:8], "big")
            else:
                yield _path_hash(file.name)


def open_source(path: Path) -> TextSource:
    """Return the text files at a path, read once from end to end.

    Hidden and empty files are passed over; files of a folder that are no text are skipped and counted.

    Raises:
        DataError: the path is missing or unreadable, a .jsonl file or a single file is no text, or there is none.
    """
    if not path.exists():
        raise DataError(f"{path} {missing_path(path)}")
    files = [SourceFile(path.name, path)]
    if path.is_dir():
        files = [SourceFile(found.relative_to(path).as_posix(), found) for found in _visible_files(path)]
        files.sort(key=lambda file: _path_hash(file.name))
    kept: list[SourceFile] = []
    total, num_skipped = sha256(), 0
    for file in files:
        digest, fault = _checked(file.path)
        if fault and (file.is_jsonl or not path.is_dir()):
            raise DataError(f"{file.path} is no UTF-8 text: {fault}; save it as UTF-8, or name token files *.bin")
        num_skipped += bool(fault)
        if digest and not fault:
            kept.append(file)
            total.update(f"{len(file.name)}:{file.name}:{digest}".encode("utf-8", "surrogateescape"))
    if not kept:
        raise DataError(
            f"{path} holds no UTF-8 text ({num_skipped} other files were skipped); name a text file, a .jsonl file, or "
            "a folder with some"
        )
    return TextSource(path=path, files=tuple(kept), digest=total.hexdigest(), num_skipped_files=num_skipped)


def _checked(path: Path) -> tuple[str, str]:
    """Return the digest of a file's content, empty for an empty one, and why it is no text, if so."""
    total, first, tail = sha256(), 0, b""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                total.update(chunk)
                nul = chunk.find(b"\0")
                if nul >= 0:
                    return "", f"byte {first + nul} is NUL"
                text = tail + chunk
                try:
                    text.decode()
                    tail = b""
                except UnicodeDecodeError as error:
                    if error.reason != "unexpected end of data":
                        return "", f"byte {first - len(tail) + error.start} is 0x{text[error.start]:02x}"
                    tail = text[error.start :]
                first += len(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if tail:
        return "", f"byte {first - len(tail)} is 0x{tail[0]:02x}"
    return (total.hexdigest() if first else ""), ""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if content:
                yield number, content


def read_documents(
    source: TextSource, template: Callable[[], ChatTemplate], *, counts_all: bool
) -> Iterator[list[Passage] | Iterator[Passage]]:
    """Yield the passages of each file of text, and of each line.

    Args:
        source: The files.
        template: Returns the chat template; called where there are messages.
        counts_all: Every token is a target, not only those of completions and answers.

    Raises:
        DataError: lines have faults; all are told, up to ten.
    """
    faults: list[str] = []
    for file in source.files:
        if not file.is_jsonl:
            yield _text_passages(file.path)
            continue
        for number, line in _lines(file.path):
            try:
                passages = _line_passages(line, template, counts_all=counts_all)
            except ValueError as error:
                faults.append(f"{file.path}, line {number}: {error}")
                if len(faults) == _MOST_FAULTS:
                    raise DataError("\n".join([*faults, "and perhaps more; mend these lines first"])) from None
            else:
                yield passages
    if faults:
        raise DataError("\n".join(faults))


def _text_passages(path: Path) -> Iterator[Passage]:
    """Yield a text file in pieces that a tokenizer sees as it would see the whole."""
    opens, rest = True, ""
    with path.open(encoding="utf-8", newline="") as file:
        while chunk := file.read(_PIECE_CHARACTERS):
            text = rest + chunk
            cut = _cut(text) if len(chunk) == _PIECE_CHARACTERS else 0
            if cut:
                yield Passage(text[:cut], opens=opens, closes=False, ends=False)
                opens = False
            rest = text[cut:]
    yield Passage(rest, opens=opens)


def _cut(text: str) -> int:
    """Return where a text may be cut, as late as possible."""
    for border in _BORDERS:
        last = 0
        for found in border.finditer(text):
            last = found.end()
        if last:
            return last
    return len(text)


def _line_passages(line: bytes, template: Callable[[], ChatTemplate], *, counts_all: bool) -> list[Passage]:
    """Return the document of a line, or several of one conversation.

    Raises:
        ValueError: a ``_LineError``, or of the template: what is wrong with it, what is allowed, what to do.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _LineError(f"is not JSON ({error}); {_ALLOWED}") from None
    except RecursionError:
        raise _LineError(f"nests too deep to be read; {_ALLOWED}") from None
    if not isinstance(value, dict):
        raise _LineError(f"found {type(value).__name__} {line[:40].decode(errors='replace')}; {_ALLOWED}")
    kinds = [kind for kind in ("text", "prompt", "messages") if kind in value]
    if len(kinds) != 1:
        found = f'both "{kinds[0]}" and "{kinds[1]}"' if kinds else f"keys {sorted(value)}"
        raise _LineError(f"found {found}; {_ALLOWED}, one of them")
    if kinds == ["messages"]:
        return _chat_passages(_messages(value["messages"]), value.get("tools"), template(), counts_all=counts_all)
    if kinds == ["text"]:
        return [Passage(_string(value, "text"))]
    prompt, completion = _string(value, "prompt"), _string(value, "completion")
    counted = None if counts_all else ((len(prompt), len(prompt) + len(completion)),)
    return [Passage(prompt + completion, counted)]


def _chat_passages(
    messages: list[JsonMapping], tools: object, template: ChatTemplate, *, counts_all: bool
) -> list[Passage]:
    """Return a conversation; the template writes what stands before and after it."""
    if tools is not None and not isinstance(tools, list):
        raise _LineError(f"tools: found {type(tools).__name__}; a list of tool descriptions is allowed, or no such key")
    if counts_all:
        return [Passage(template.text(messages, tools), None, opens=False, closes=False)]
    found = template.answered(messages, tools)
    return [Passage(text, answers, opens=False, closes=False) for text, answers in found]


def _messages(value: object) -> list[JsonMapping]:
    """Return checked messages."""
    if not isinstance(value, list) or not value:
        raise _LineError(f"messages: found {_shown(value)}; a list of at least one message is allowed")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _LineError(f'{where}: found {_shown(message)}; {{"role": ..., "content": ...}} is allowed')
        if message.get("role") not in _ROLES:
            raise _LineError(f"{where}.role: found {_shown(message.get('role'))}; allowed: {', '.join(_ROLES)}")
        if message.get("content") is None and message.get("tool_calls"):
            continue
        _string(message, "content", where=f"{where}.")
    return value


def _string(value: Mapping[str, object], key: str, *, where: str = "") -> str:
    """Return a text of a line."""
    if key not in value:
        raise _LineError(f"{where}{key} is missing; a string is required")
    found = value[key]
    if not isinstance(found, str):
        raise _LineError(f"{where}{key}: found {_shown(found)}; a string is required")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise _LineError(
            f"{where}{key}: character {error.start} is half of a surrogate pair; write it as UTF-8"
        ) from None
    return found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

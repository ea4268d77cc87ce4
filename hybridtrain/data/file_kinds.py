"""Kinds of files: plain text, or records that are one document each; a record is never read as plain text.

Records are known by a file's name, and JSON under another name by its content. A folder of ``datasets`` also has
metadata files (card, licence), which are not documents.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

from hybridtrain.errors import DataError
from hybridtrain.plain_file import open_plain
from hybridtrain.units import GIB, KIB, MIB

Record: TypeAlias = bytes | object
"""A raw line, or a parsed value."""


class Kind(StrEnum):
    """The format of a file's documents."""

    TEXT = "text"
    """One document per file."""
    LINES = "JSON lines"
    """One document per line."""
    JSON = "JSON"
    """One document per list element, or a single one."""
    PARQUET = "Parquet"
    ARROW = "Arrow"
    """One document per row."""


_KINDS: Final = {
    ".jsonl": Kind.LINES, ".ndjson": Kind.LINES, ".jsonlines": Kind.LINES, ".ldjson": Kind.LINES, ".json": Kind.JSON,
    ".parquet": Kind.PARQUET, ".arrow": Kind.ARROW,
}  # fmt: skip
_PACKED: Final = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z"}
DOCUMENT_KEYS: Final = ("text", "prompt", "messages")
"""Keys that identify a record's kind; a record has exactly one."""
_COLUMNS: Final = {*DOCUMENT_KEYS, "completion", "tools"}
_ABOUT: Final = re.compile(r"(readme|licen[cs]e|citation|notice|changelog)\b|dataset_infos?\.|dataset_dict\.", re.ASCII)
"""Lower-case names of metadata files beside records."""
_CACHE: Final = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
"""Cache files of ``datasets``."""
_SPLITS: Final = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_SPLIT: Final = re.compile(rf"(?:^|[-._ /0-9])({'|'.join(_SPLITS)})(?=[-._ /0-9]|$)")
"""Split names in file and folder names, as ``datasets`` finds them."""
NO_JSON: Final = "no JSON"
_MOST_JSON_BYTES: Final = GIB
_HEAD_BYTES: Final = 64 * KIB
_SNIFFED_BYTES: Final = 64 * MIB
_BOM: Final = b"\xef\xbb\xbf"


def kind_of(path: Path) -> Kind:
    """Return the format of a file by its name."""
    return _KINDS.get(path.suffix.lower(), Kind.TEXT)


def packed_records(path: Path) -> bool:
    """Return whether a file name is that of compressed records."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return bool(suffixes) and suffixes[-1] in _PACKED and any(suffix in _KINDS for suffix in suffixes[:-1])


def split_of(name: str) -> str:
    """Return the split that a file's or its folder's name states: "train", "validation" or "test", else nothing."""
    names = _SPLIT.findall(name.lower())
    return _SPLITS[names[-1]] if names else ""


def is_about_records(path: Path) -> bool:
    """Return whether a file beside records is metadata: a data card, a licence, a cache."""
    name = path.name.lower()
    return _ABOUT.match(name) is not None or _CACHE.fullmatch(name) is not None


def is_json_text(path: Path) -> bool:
    """Return whether a text file of any name contains JSON: an object, a list, or several concatenated objects."""
    with os.fdopen(open_plain(path), "rb") as file:
        begin = b""
        while not begin and (head := file.read(_HEAD_BYTES)):
            begin = head.removeprefix(_BOM).lstrip()
        if begin[:1] not in {b"{", b"["}:
            return False
        file.seek(0)
        lines = (line.strip() for line in iter(lambda: file.readline(_SNIFFED_BYTES), b""))
        first = next(filter(None, lines)).removeprefix(_BOM)
        if isinstance(_parsed(first), dict):
            return next(filter(None, lines), b"{")[:1] == b"{"
        file.seek(0)
        content = file.read(_SNIFFED_BYTES)
        is_whole = not file.read(1)
    text = content.removeprefix(_BOM).decode(errors="ignore").lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        return not is_whole and (error.pos > len(text) - MIB or error.msg.startswith("Unterminated"))
    except (RecursionError, ValueError):
        return False
    rest = text[end:].lstrip()
    elements = value if isinstance(value, list) else [value]
    return not rest or (rest[0] in "{[," and any(isinstance(element, dict) and element for element in elements))


def json_kind(path: Path) -> Kind | str:
    """Return the document layout of a .json file, or why it has none; raises ``DataError`` if it is too large."""
    try:
        value = _json_value(path)
    except (RecursionError, ValueError) as error:
        is_lines = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and is_json_text(path)
        return Kind.LINES if is_lines else f"{NO_JSON} ({error})"
    if isinstance(value, list):
        has_documents = any(isinstance(element, dict) for element in value)
    else:
        has_documents = isinstance(value, dict) and any(key in value for key in DOCUMENT_KEYS)
    return Kind.JSON if has_documents else "JSON without documents"


def read_records(path: Path, kind: Kind) -> Iterator[tuple[str, Record]]:
    """Yield each record's location, in words, and its content; raises ``DataError``: table damaged, or no pyarrow."""
    if kind is Kind.LINES:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if content := (line.removeprefix(_BOM) if number == 1 else line).strip():
                    yield f"line {number}", content
    elif kind is Kind.JSON:
        value = _json_value(path)
        for number, element in enumerate(value if isinstance(value, list) else [value], 1):
            yield f"element {number}", element
    else:
        for number, row in enumerate(_rows(path, kind), 1):
            yield f"row {number}", row


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except (RecursionError, ValueError):
        return None


def _json_value(path: Path) -> object:
    size = path.stat().st_size
    if size > _MOST_JSON_BYTES:
        raise DataError(
            f"{path} has {size} bytes of JSON; at most {_MOST_JSON_BYTES} are allowed, because .json is loaded at "
            f"once: convert it to .jsonl, one document per line"
        )
    return json.loads(path.read_bytes().removeprefix(_BOM))


def _rows(path: Path, kind: Kind) -> Iterator[object]:
    """Yield the rows of a table, without the columns that no document has and without what is null in them."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path} needs the package pyarrow, which is not installed; python3 -m pip install 'hybridtrain[arrow]', "
            "or write the data set as .jsonl (to_json)"
        ) from None
    try:
        with pyarrow.OSFile(str(path)) as file:
            batches: Any
            if kind is Kind.PARQUET:
                table = parquet.ParquetFile(file)
                batches = table.iter_batches(256, columns=_wanted(table.schema_arrow.names))
            else:
                try:
                    batches = pyarrow.ipc.open_stream(file)
                except pyarrow.ArrowInvalid:  # the other of Arrow's two formats
                    table = pyarrow.ipc.open_file(file)
                    batches = (table.get_batch(number) for number in range(table.num_record_batches))
            for batch in batches:
                yield from map(_without_nulls, batch.select(_wanted(batch.schema.names)).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{path} is not a complete {kind} file ({why}); copy it again") from error


def _wanted(names: Sequence[str]) -> list[str]:
    """Return the columns that documents have; all, if there are none, for the error to name them."""
    return [name for name in names if name in _COLUMNS] or list(names)


def _without_nulls(value: object) -> object:
    """Return a value without the keys that a table writes for all rows and this one has not."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value

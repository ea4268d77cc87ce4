"""What a [data] table stands for: text encoded once into files that are memory-mapped, a part of it held out.

The files lie in a folder named by the digest of everything that decides the tokens: contents, tokenizer, template,
options. So a resumed run finds the same tokens, and changed data or a changed tokenizer makes others. Tokens are raw
uint16 or uint32, as in token files; ``counts`` says which of them, as targets, count.
"""

import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from hashlib import file_digest, sha256
from itertools import repeat
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
import numpy.typing as npt

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import JsonMapping, to_json
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.data.chat import BUILTIN_TEMPLATES, ChatTemplate
from hybridtrain.data.corpus import MIN_TOKENS, open_corpus
from hybridtrain.data.data_config import BYTES, DataConfig, Packing
from hybridtrain.data.documents import Passage, TextSource, open_source, read_documents
from hybridtrain.data.file_array import open_array
from hybridtrain.data.packing import EncodedDocuments
from hybridtrain.data.token_file import open_token_file
from hybridtrain.data.tokenizer import Encoded, Tokenizer, named_template, open_tokenizer
from hybridtrain.errors import ConfigError, DataError

Say = Callable[[str], None]

_FORMAT: Final = 1
"""Of the files and of what they hold: another number makes them anew."""
_INDEX: Final = "index.json"
_BATCH_CHARACTERS: Final = 2**21  # encoded at a time, on all cores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextData:
    """Documents to train and to validate on."""

    name: str
    """Of the file or folder."""
    train: EncodedDocuments
    validation: EncodedDocuments | None
    """None: nothing is held out."""
    tokenizer: Tokenizer
    packing: Packing
    settings: JsonMapping
    """What a resumed run must share, by dotted name."""
    source: str
    """One sentence on where the tokens come from."""


def open_text(config: DataConfig, *, vocab_size: int, folder: Path, say: Say) -> TextData:
    """Return the data of a run; text is encoded unless ``folder`` holds its tokens already.

    Args:
        config: The [data] table.
        vocab_size: Of the model.
        folder: Where encoded tokens are kept; nobody else may be writing there.
        say: Is told what is encoded, and how answers are found.

    Raises:
        DataError: a path is missing, a line has a fault, a package is not installed, the vocabulary is too small.
    """
    name = config.tokenizer or BYTES
    tokenizer = open_tokenizer(name, vocab_size=vocab_size, eos_token=config.eos_token)
    if config.path.suffix == ".bin" or (config.path / "train.bin").exists() or (config.path / "val.bin").exists():
        return _token_files(config, tokenizer, vocab_size)
    source = open_source(config.path)
    other = None if config.validation is None else open_source(config.validation)
    packing = config.packing or ("documents" if source.has_jsonl else "stream")
    if packing == "stream" and source.has_jsonl and config.loss_on == "answers":
        raise DataError(
            f"{config.path}: packing = 'stream' takes windows wherever they fall, and some hold no answer; set "
            "packing = 'documents', or loss_on = 'all'"
        )
    encoding = _Encoding(config, tokenizer, source, other)
    parts = encoding.open(folder, say)
    settings: JsonMapping = {"data.digest": encoding.key, "data.name": config.path.resolve().name}
    if tokenizer.digest != BYTES:
        settings["data.tokenizer"] = tokenizer.digest
    if packing != "stream":
        settings["data.packing"] = packing
    skipped = f", {source.num_skipped_files} other files skipped" if source.num_skipped_files else ""
    return TextData(
        name=config.path.resolve().name, train=parts[0], validation=parts[1], tokenizer=tokenizer, packing=packing,
        settings=settings,
        source=f"{len(source.files)} files at {config.path}{skipped}, tokenizer {name}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartFacts:
    """What a part's files hold."""

    num_tokens: int
    num_documents: int
    is_masked: bool
    """Some tokens do not count as targets."""
    digests: tuple[str, ...]
    """SHA-256 of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Written last: files without it are not whole."""

    dtype: Literal["<u2", "<u4"]
    train: _PartFacts
    validation: _PartFacts


class _Encoding:
    """How the tokens of a [data] table are made, and which files hold them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, source: TextSource, other: TextSource | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._source = source
        self._other = other
        self._num_split = 0
        """Conversations that became several documents."""
        self._template = cache(self._open_template)
        self._dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
        template = ""
        if config.chat_template or "default" in tokenizer.templates:
            template = named_template(tokenizer, config.chat_template, BUILTIN_TEMPLATES)
        decides = [
            _FORMAT, source.digest, "" if other is None else other.digest, tokenizer.digest, template, config.loss_on,
            config.held_out_percent,
        ]  # fmt: skip
        self.key = sha256(json.dumps(decides).encode("ascii")).hexdigest()

    def _open_template(self) -> ChatTemplate:
        text = named_template(self._tokenizer, self._config.chat_template, BUILTIN_TEMPLATES)
        return ChatTemplate(text, self._tokenizer.special_tokens)

    def open(self, folder: Path, say: Say) -> tuple[EncodedDocuments, EncodedDocuments | None]:
        """Return what is to train and to validate on."""
        place = folder / self.key[:16]
        found = _read_parts(place)
        if found is None:
            shutil.rmtree(place, ignore_errors=True)
            say(f"encoding {self._config.path} with tokenizer {self._config.tokenizer or BYTES} into {place}")
            place.mkdir(parents=True, exist_ok=True)
            self._write(place, say)
            found = _read_parts(place)
            assert found is not None, "just written"
        train, validation = found
        if self._config.held_out_percent and validation.num_documents == 0 and not self._source.has_jsonl:
            train, validation = _split_tail(train, self._config.held_out_percent, str(self._config.path))
        return train, validation if validation.num_documents else None

    def _write(self, place: Path, say: Say) -> None:
        is_masked = self._config.loss_on == "answers"
        with ExitStack() as stack:
            train = stack.enter_context(
                _PartWriter(place, "train", self._dtype, is_masked=is_masked and self._source.has_jsonl)
            )
            held_out = self._other or self._source
            validation = stack.enter_context(
                _PartWriter(place, "validation", self._dtype, is_masked=is_masked and held_out.has_jsonl)
            )
            is_held_out = _held_out(self._source, 0 if self._other else self._config.held_out_percent)
            self._encode(self._source, (validation if is_out else train for is_out in is_held_out))
            if self._other is not None:
                self._encode(self._other, repeat(validation))
        if self._template.cache_info().currsize and is_masked:
            split = ""
            if self._num_split:
                split = (
                    f"; it writes earlier answers of {self._num_split} conversations otherwise when more follows, so "
                    "each answer of these ends a document of its own"
                )
            say(f"answers are found by {self._template().method} of the chat template{split}")
        index = _Index(dtype=self._dtype, train=train.facts(), validation=validation.facts())
        replace_file(place / _INDEX, to_json(index).encode("ascii"))

    def _encode(self, source: TextSource, writers: Iterator["_PartWriter"]) -> None:
        """Write each document to the next of ``writers``."""
        waiting: list[tuple[Passage, _PartWriter]] = []
        num_characters = 0
        for document in read_documents(source, self._template, counts_all=self._config.loss_on == "all"):
            writer = next(writers)
            self._num_split += isinstance(document, list) and len(document) > 1
            for passage in document:
                waiting.append((passage, writer))
                num_characters += len(passage.text)
                if num_characters >= _BATCH_CHARACTERS:
                    self._flush(waiting)
                    num_characters = 0
        self._flush(waiting)

    def _flush(self, waiting: list[tuple[Passage, "_PartWriter"]]) -> None:
        encoded = self._tokenizer.encode([passage.text for passage, _ in waiting])
        for (passage, writer), found in zip(waiting, encoded, strict=True):
            opening = self._tokenizer.bos_ids if passage.opens else ()
            closing = self._tokenizer.eos_ids if passage.closes else ()
            ids = np.concatenate([
                np.array(part, dtype=self._dtype) for part in (opening, found.ids, closing)
            ])  # fmt: skip
            counted = np.ones(ids.size, dtype=np.uint8)
            counted[: len(opening)] = 0
            if passage.counted is not None:
                counted[len(opening) : len(opening) + found.ids.size] = _counted(found, passage.counted)
            writer.add(ids, counted, ends=passage.ends)
        waiting.clear()


def _counted(encoded: Encoded, spans: Iterable[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which tokens stand for at least one character of the spans."""
    counts = np.zeros(encoded.ids.size, dtype=np.bool_)
    for first, last in spans:
        counts |= (encoded.spans[:, 0] < last) & (encoded.spans[:, 1] > first)
    return counts


def _held_out(source: TextSource, percent: int) -> Iterator[bool]:
    """Yield for each document whether it is held out: never none of several, and never all; as in a corpus."""
    if not percent:
        yield from repeat(False)
    share = np.fromiter(source.ranks(), dtype=np.uint64) % np.uint64(100)
    chosen = np.zeros(share.size, dtype=np.bool_)
    if share.size > 1:
        count = min(int((share < percent).sum()), share.size - 1)
        chosen[np.argsort(share, kind="stable")[: max(1, count)]] = True
    yield from chosen.tolist()


def _split_tail(documents: EncodedDocuments, percent: int, what: str) -> tuple[EncodedDocuments, EncodedDocuments]:
    """Return one text without its tail, and the tail."""
    size = documents.tokens.size
    if size < MIN_TOKENS:
        raise DataError(
            f"{what}: {size} tokens to train and to validate on are too few; at least {MIN_TOKENS} are needed, and "
            "thousands to learn from"
        )
    first = size - max(1, size * percent // 100)
    return _one_document(documents.tokens[:first]), _one_document(documents.tokens[first:])


def _one_document(tokens: TokenArray) -> EncodedDocuments:
    return EncodedDocuments(tokens=tokens, ends=np.array([tokens.size], dtype=np.int64))


def _token_files(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> TextData:
    """Return token files as they are."""
    if config.packing not in {None, "stream"}:
        raise DataError(
            f"{config.path}: token files do not say where documents end; packing = '{config.packing}' needs text or "
            ".jsonl files, so leave packing out or set it to 'stream'"
        )
    settings: JsonMapping = {"data.name": config.path.resolve().name}
    if config.path.is_dir():
        corpus = open_corpus(config.path, vocab_size=vocab_size)
        train, validation, digest = corpus.train, corpus.validation, corpus.digest
    else:
        file = open_token_file(config.path, vocab_size=vocab_size)
        first = file.tokens.size - file.tokens.size * config.held_out_percent // 100
        train, validation, digest = file.tokens[:first], file.tokens[first:], file.digest
    if config.validation is not None:
        validation = open_token_file(config.validation, vocab_size=vocab_size).tokens
    settings |= {"data.digest": digest}
    return TextData(
        name=config.path.resolve().name, train=_one_document(train),
        validation=_one_document(validation) if validation.size else None, tokenizer=tokenizer, packing="stream",
        settings=settings, source=f"token files at {config.path}",
    )  # fmt: skip


class _PartWriter:
    """Writes documents of one part to its files, as they come."""

    def __init__(self, place: Path, name: str, dtype: str, *, is_masked: bool) -> None:
        self._paths = _paths(place, name)
        self._dtype = dtype
        self._tokens = self._paths[0].open("wb")
        self._counts = self._paths[1].open("wb")
        self._is_masked = is_masked
        self._ends = array("q")
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._counts.close()
        self._paths[2].write_bytes(np.array(self._ends, dtype="<i8").tobytes())

    def add(self, ids: npt.NDArray[np.integer], counted: npt.NDArray[np.uint8], *, ends: bool) -> None:
        """Write the tokens of a document, or of its next piece."""
        self._tokens.write(ids.astype(self._dtype).tobytes())
        if self._is_masked:
            self._counts.write(counted.tobytes())
        self._size += ids.size
        if ends:
            self._ends.append(self._size)

    def facts(self) -> _PartFacts:
        """Return what the index keeps of this part, once its files are closed."""
        return _PartFacts(
            num_tokens=self._size, num_documents=len(self._ends), is_masked=self._is_masked,
            digests=tuple(_digest(path) for path in self._paths),
        )  # fmt: skip


def _paths(place: Path, name: str) -> tuple[Path, Path, Path]:
    """Return where tokens, counts and ends of a part lie."""
    return place / f"{name}.tokens", place / f"{name}.counts", place / f"{name}.ends"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _read_parts(place: Path) -> tuple[EncodedDocuments, EncodedDocuments] | None:
    """Return both parts, or None unless all is there as it was written."""
    try:
        index = decode(_Index, json.loads((place / _INDEX).read_bytes()), source=str(place))
        return _read_part(place, "train", index.train, index.dtype), _read_part(
            place, "validation", index.validation, index.dtype
        )
    except (OSError, ValueError, ConfigError):
        return None


def _read_part(place: Path, name: str, facts: _PartFacts, dtype: str) -> EncodedDocuments:
    """Return a part, memory-mapped.

    Raises:
        OSError, ValueError: a file is missing, or is not as it was written.
    """
    paths = _paths(place, name)
    if tuple(_digest(path) for path in paths) != facts.digests:
        raise ValueError("damaged")
    tokens, counts, ends = (open_array(path, kind) for path, kind in zip(paths, (dtype, "u1", "<i8"), strict=True))
    return EncodedDocuments(tokens=tokens, ends=np.array(ends), counted=counts if facts.is_masked else None)

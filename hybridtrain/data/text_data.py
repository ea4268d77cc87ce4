"""The data of a [data] table: text encoded once into memory-mapped files, with a held-out part.

The folder's name is a digest of everything that affects the tokens: contents, tokenizer, template, options. So a
resumed run finds its tokens, and changed data are encoded again. Tokens are raw uint16 or uint32, as in token files;
``counts`` marks those that count as targets.
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
from hybridtrain.data.chat import ChatTemplate
from hybridtrain.data.corpus import held_out, is_token_path, split_tail, token_corpus
from hybridtrain.data.data_config import BYTES, DataConfig, Packing
from hybridtrain.data.documents import Passage, TextSource, open_source, read_documents
from hybridtrain.data.file_array import open_array
from hybridtrain.data.packing import EncodedDocuments
from hybridtrain.data.token_file import open_token_file
from hybridtrain.data.tokenizer import EncodedText, Tokenizer, named_template, open_tokenizer
from hybridtrain.errors import ConfigError, DataError

Say = Callable[[str], None]

_FORMAT: Final = 2
"""Version of the encoded files; another number re-encodes."""
_INDEX: Final = "index.json"
_BATCH_CHARACTERS: Final = 2**21  # encoded at a time, on all cores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextData:
    """Documents for training and validation."""

    name: str
    """Name of the file or folder."""
    train: EncodedDocuments
    validation: EncodedDocuments | None
    """Held-out documents; None: there are none."""
    tokenizer: Tokenizer
    packing: Packing
    settings: JsonMapping
    """Settings that must be equal on resume, by dotted name."""
    source: str
    """One sentence on where the tokens come from."""
    template: str = ""
    """The chat template, if it is not the tokenizer's own."""
    is_tokens: bool = False
    """Whether the source is a token file, whose tokenizer is unknown."""


def open_text(config: DataConfig, *, vocab_size: int, folder: Path, say: Say) -> TextData:
    """Open the data of a run; text is encoded unless ``folder`` holds its tokens already.

    No other process may write to the folder. ``say`` receives progress and how answers are located. Raises
    ``DataError``: a path is missing, a record is invalid, a package is not installed, or the vocabulary is too small.
    """
    name = config.tokenizer or BYTES
    tokenizer = open_tokenizer(name, vocab_size=vocab_size, eos_token=config.eos_token)
    if tokenizer.remark:
        say(tokenizer.remark)
    if is_token_path(config.path):
        return _token_files(config, tokenizer, vocab_size)
    source = open_source(config.path)
    other = None if config.validation is None else open_source(config.validation, part="validation")
    for texts in (source, other):
        if texts is not None and texts.path.is_dir():
            say(texts.as_text())
    if config.chat_template and not (source.has_records or (other is not None and other.has_records)):
        raise DataError(_unused_template(config))
    packing = config.packing or ("documents" if source.has_records else "stream")
    if packing == "stream" and source.has_records and config.loss_on == "answers":
        raise DataError(
            f"{config.path}: packing = 'stream' draws windows at random, and some contain no answer; set "
            "packing = 'documents', or loss_on = 'all'"
        )
    encoding = _Encoding(config, tokenizer, source, other, vocab_size)
    parts = encoding.open(folder, say)
    _report_share(config, *parts, say)
    settings: JsonMapping = {"data.digest": encoding.key, "data.name": config.path.resolve().name}
    if tokenizer.digest != BYTES:
        settings["data.tokenizer"] = tokenizer.digest
    if packing != "stream":
        settings["data.packing"] = packing
    skipped = f", {len(source.left_out)} others ignored" if source.left_out else ""
    return TextData(
        name=config.path.resolve().name, train=parts[0], validation=parts[1], tokenizer=tokenizer, packing=packing,
        settings=settings,
        source=f"{len(source.files)} files at {config.path}{skipped}, tokenizer {name}",
        template=named_template(tokenizer, config.chat_template) if config.chat_template else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartFacts:
    """Facts about a part's files."""

    num_tokens: int
    num_documents: int
    is_masked: bool
    """Whether some tokens do not count as targets."""
    largest_token: int
    """Id of the padding token; -1 where there is none."""
    digests: tuple[str, ...]
    """SHA-256 of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The index, written last: files without it are incomplete."""

    dtype: Literal["<u2", "<u4"]
    train: _PartFacts
    validation: _PartFacts


class _Encoding:
    """Encodes the text of a [data] table, and finds the files of its tokens."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, source: TextSource, other: TextSource | None, vocab_size: int
    ) -> None:
        self._config, self._tokenizer, self._vocab_size = config, tokenizer, vocab_size
        self._source, self._other = source, other
        self._num_split = 0
        """Conversations that were split into several documents."""
        self._template = cache(lambda: ChatTemplate(self._template_text(), tokenizer.special_tokens))
        self._dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
        decides = [
            _FORMAT, source.digest, "" if other is None else other.digest, tokenizer.digest,
            self._template_text() if config.chat_template or "default" in tokenizer.templates else "", config.loss_on,
            config.held_out_percent,
        ]  # fmt: skip
        self.key = sha256(json.dumps(decides).encode("ascii")).hexdigest()

    def _template_text(self) -> str:
        return named_template(self._tokenizer, self._config.chat_template)

    def open(self, folder: Path, say: Say) -> tuple[EncodedDocuments, EncodedDocuments | None]:
        """Return the train and validation parts."""
        place = folder / self.key[:16]
        stored = _read_parts(place)
        if stored is None:
            shutil.rmtree(place, ignore_errors=True)
            say(f"encoding {self._config.path} with tokenizer {self._config.tokenizer or BYTES} into {place}")
            place.mkdir(parents=True, exist_ok=True)
            self._write(place, say)
            stored = _read_parts(place)
            assert stored is not None, "just written"
        (train, validation), largest = stored
        self._require_known(largest)
        percent = 0 if self._other else self._config.held_out_percent
        if percent and train.num_documents == 1 and not validation.num_documents and not self._source.has_records:
            parts = split_tail(train.tokens, str(self._config.path), percent)
            train, validation = map(_one_document, parts)
        return train, validation if validation.num_documents else None

    def _write(self, place: Path, say: Say) -> None:
        is_masked = self._config.loss_on == "answers"
        validates = self._other or self._source
        with ExitStack() as stack:
            train = stack.enter_context(_PartWriter(place, "train", is_masked=is_masked and self._source.has_records))
            validation = stack.enter_context(
                _PartWriter(place, "validation", is_masked=is_masked and validates.has_records)
            )
            is_held_out = held_out(self._source.ranks(), 0 if self._other else self._config.held_out_percent)
            self._encode(self._source, (validation if is_out else train for is_out in is_held_out.tolist()))
            if self._other is not None:
                self._encode(self._other, repeat(validation))
                common = np.isin(self._other.contents(), self._source.contents())
                if common.any():
                    say(
                        f"warning: {common.sum()} of {common.size} documents of {self._other.path} are also in "
                        f"{self._source.path}, so the validation loss is too low; remove them from one of the two"
                    )
        facts = train.facts(), validation.facts()
        for source, part in ((self._source, facts[0]), (self._other, facts[1])):
            if source is not None and not part.num_tokens:
                raise DataError(f"{source.path} contains no text; give files with text")
        if self._template.cache_info().currsize and is_masked:
            split = ""
            if self._num_split:
                split = (
                    f"; it renders earlier answers of {self._num_split} conversations differently, so each of their "
                    f"answers ends a document of its own"
                )
            say(f"answers are located by {self._template().method} of the chat template{split}")
        elif self._config.chat_template and not self._template.cache_info().currsize:
            raise DataError(_unused_template(self._config))
        index = _Index(dtype=self._dtype, train=facts[0], validation=facts[1])
        replace_file(place / _INDEX, to_json(index).encode("ascii"))

    def _require_known(self, token: int) -> None:
        if token >= self._vocab_size:
            raise DataError(
                f"{self._config.path}: token {token}, {self._tokenizer.decode([token])!r}, occurs in the text, but "
                f"the model's vocab_size is {self._vocab_size}; use the model's own tokenizer, a larger vocab_size, "
                f"or text without this token"
            )

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
        self._require_known(max((int(encoding.ids.max(initial=0)) for encoding in encoded), default=0))
        for (passage, writer), tokens in zip(waiting, encoded, strict=True):
            opening = self._tokenizer.bos_ids if passage.opens else ()
            closing = self._tokenizer.eos_ids if passage.closes else ()
            parts = [np.array(part, dtype=self._dtype) for part in (opening, tokens.ids, closing)]
            ids = np.concatenate(parts)
            counted = np.ones(ids.size, dtype=np.uint8)
            counted[: len(opening)] = 0
            if passage.counted is not None:
                counted[len(opening) : len(opening) + tokens.ids.size] = _counted(tokens, passage.counted)
            writer.add(ids, counted, ends=passage.ends)
        waiting.clear()


def _counted(encoded: EncodedText, spans: Iterable[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return whether each token covers a character of the spans."""
    counts = np.zeros(encoded.ids.size, dtype=np.bool_)
    for first, last in spans:
        counts |= (encoded.spans[:, 0] < last) & (encoded.spans[:, 1] > first)
    return counts


def _report_share(
    config: DataConfig, train: EncodedDocuments, validation: EncodedDocuments | None, say: Say
) -> None:  # fmt: skip
    """Report a held-out share that differs from the requested one by more than half of it."""
    percent = config.held_out_percent
    if config.validation is not None or not percent:
        return
    if validation is None:
        if train.num_documents > 1:
            say(
                f"warning: nothing is held out: all {train.num_documents} documents have the same content; set "
                f"data.validation to other text"
            )
        return
    pairs = (validation.num_documents, train.num_documents), (validation.tokens.size, train.tokens.size)
    shares = [100 * apart / (apart + rest) for apart, rest in pairs]
    if max(abs(share - percent) for share in shares) > percent / 2:
        say(
            f"warning: validation_percent is {percent}, and {shares[0]:.1f} % of the documents with {shares[1]:.1f} % "
            "of the tokens are held out: documents are few, of very different lengths, or often equal"
        )


def _unused_template(config: DataConfig) -> str:
    return (
        f"chat_template: '{config.chat_template}' has no effect: {config.path} contains no messages; "
        'remove chat_template, or give records with "messages"'
    )


def _one_document(tokens: TokenArray) -> EncodedDocuments:
    return EncodedDocuments(tokens=tokens, ends=np.array([tokens.size], dtype=np.int64))


def _token_files(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> TextData:
    if config.chat_template:
        raise DataError(_unused_template(config))
    if config.packing not in {None, "stream"}:
        raise DataError(
            f"{config.path}: token files do not say where documents end; packing = '{config.packing}' needs text or "
            f".jsonl files: remove packing, or set it to 'stream'"
        )
    if config.path.is_dir() and config.validation_percent is not None:
        raise DataError(
            f"validation_percent: {config.validation_percent} has no effect: {config.path}/val.bin is held out; "
            f"remove validation_percent, or give train.bin alone"
        )
    corpus = token_corpus(config.path, vocab_size=vocab_size, percent=config.held_out_percent)
    validation = corpus.validation
    if config.validation is not None:
        validation = open_token_file(config.validation, vocab_size=vocab_size).tokens
    name = config.path.resolve().name
    return TextData(
        name=name, train=_one_document(corpus.train),
        validation=_one_document(validation) if validation.size else None, tokenizer=tokenizer, packing="stream",
        settings={"data.name": name, "data.digest": corpus.digest}, source=f"token files at {config.path}",
        is_tokens=True,
    )  # fmt: skip


class _PartWriter:
    """Writes documents of one part to its files, as they come."""

    def __init__(self, place: Path, name: str, *, is_masked: bool) -> None:
        self._paths = _paths(place, name)
        self._tokens = self._paths[0].open("wb")
        self._counts = self._paths[1].open("wb")
        self._is_masked = is_masked
        self._ends = array("q")
        self._size = 0
        self._largest = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._counts.close()
        self._paths[2].write_bytes(np.array(self._ends, dtype="<i8").tobytes())

    def add(self, ids: npt.NDArray[np.integer], counted: npt.NDArray[np.uint8], *, ends: bool) -> None:
        """Write the tokens of a passage."""
        self._tokens.write(ids.tobytes())
        if self._is_masked:
            self._counts.write(counted.tobytes())
        self._size += ids.size
        self._largest = max(self._largest, int(ids.max(initial=0)))
        if ends:
            self._ends.append(self._size)

    def facts(self) -> _PartFacts:
        """Return the index entry of this part, once its files are closed."""
        return _PartFacts(
            num_tokens=self._size, num_documents=len(self._ends), is_masked=self._is_masked,
            largest_token=self._largest, digests=tuple(_digest(path) for path in self._paths),
        )  # fmt: skip


def _paths(place: Path, name: str) -> list[Path]:
    """Return the paths of a part's tokens, counts and ends."""
    return [place / f"{name}.{kind}" for kind in ("tokens", "counts", "ends")]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _read_parts(place: Path) -> tuple[list[EncodedDocuments], int] | None:
    """Return both parts and their largest token, or None unless all files are intact."""
    try:
        index = decode(_Index, json.loads((place / _INDEX).read_bytes()), source=str(place))
        parts = []
        for name, facts in (("train", index.train), ("validation", index.validation)):
            paths = _paths(place, name)
            if tuple(_digest(path) for path in paths) != facts.digests:
                return None
            kinds = (index.dtype, "u1", "<i8")
            tokens, counts, ends = (open_array(path, kind) for path, kind in zip(paths, kinds, strict=True))
            counted = counts if facts.is_masked else None
            parts.append(EncodedDocuments(tokens=tokens, ends=np.array(ends), counted=counted))
        return parts, max(index.train.largest_token, index.validation.largest_token)
    except (OSError, ValueError, ConfigError):
        return None

"""Text to token ids and back: bytes, or any tokenizer of the ``tokenizers`` library with its special tokens.

A folder is read as transformers reads it: tokenizer.json, special tokens in tokenizer_config.json or
special_tokens_map.json, chat templates there, in chat_template.jinja or in additional_chat_templates/. If transformers
is installed, its AutoTokenizer is used: some of its classes (Llama's) produce other ids than the library ``tokenizers``
alone, and it supports folders without tokenizer.json.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import numpy.typing as npt

from hybridtrain.config.decode import missing_path
from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS, decode_tokens, encode_bytes
from hybridtrain.data.chat import BUILTIN_TEMPLATES
from hybridtrain.data.data_config import BYTES
from hybridtrain.errors import DataError, unknown_name
from hybridtrain.plain_file import read_plain

if TYPE_CHECKING:
    import tokenizers

_TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_FILES: Final = (_TOKENIZER, _CONFIG, "tokenizer.model", "vocab.json")
"""A folder with any of these files contains a tokenizer."""
_AS_THE_FILE_SAYS: Final = {None, "PreTrainedTokenizerFast", "TokenizersBackend"}
"""transformers' classes that use a tokenizer.json unmodified."""
_DECIDES: Final = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder", "added_tokens")
"""Parts of a tokenizer.json that affect encoding and decoding."""
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """The tokens of one text."""

    ids: npt.NDArray[np.uint32]
    spans: npt.NDArray[np.int64]
    """(N, 2): character range of each token, end exclusive. Tokens that are parts of one character share its range."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer(ABC):
    """Encodes text to tokens, and decodes tokens to text."""

    vocab_size: int
    """Size of the vocabulary: every token is below it."""
    bos_ids: tuple[int, ...] = ()
    """Tokens before each document."""
    eos_ids: tuple[int, ...]
    """Tokens after each document; empty where no end-of-text token is known."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a sampled text."""
    pad_id: int = 0
    """Padding token; any token will do, as its prediction never counts."""
    special_tokens: Mapping[str, str]
    """Special tokens that chat templates may use: bos_token, eos_token, ..."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; "default" is the tokenizer's default."""
    digest: str
    """SHA-256 in hex of everything that affects encoding."""
    remark: str = ""
    """Warning on how the tokenizer was read; empty: exactly as its files state."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return the tokens of each text, without document tokens around it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, special ones included."""

    @abstractmethod
    def special_ids(self) -> dict[str, int | None]:
        """Return the ids of special tokens by their config.json keys; None for absent ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte; NUL ends a document."""

    vocab_size: int = NUM_BYTE_TOKENS
    eos_ids: tuple[int, ...] = (int(encode_bytes(b"\0")[0]),)
    special_tokens: Mapping[str, str] = field(default_factory=lambda: {"bos_token": "", "eos_token": "\0"})
    digest: str = BYTES

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return the bytes of each text as tokens."""
        encoded = []
        for content in (text.encode() for text in texts):
            # Every byte that does not continue a character begins one.
            characters = np.cumsum((np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80) - 1
            spans = np.stack([characters, characters + 1], axis=1)
            encoded.append(EncodedText(encode_bytes(content).astype(np.uint32), spans))
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes to text; invalid bytes are replaced."""
        return decode_tokens(np.array(ids, dtype=np.int64)).decode(errors="replace")

    def special_ids(self) -> dict[str, int | None]:
        """Return the id of NUL, which ends a document."""
        return {"bos_token_id": None, "eos_token_id": self.eos_ids[0], "pad_token_id": None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileTokenizer(Tokenizer):
    """A tokenizer of the library ``tokenizers``."""

    backend: "tokenizers.Tokenizer"

    @classmethod
    def of(cls, read: "_Read", templates: Mapping[str, str], eos_token: str, source: str) -> Self:
        """Wrap a backend whose truncation, padding and special tokens are switched off.

        ``eos_token`` overrides the one in its files. Raises ``DataError`` if it is not in the vocabulary.
        """
        backend, special_tokens = read.backend, dict(read.special_tokens)
        backend.no_truncation()
        backend.no_padding()
        opening, closing = _added_around(backend)
        # A processor that adds nothing and leaves a token the white space it stands for; most models' own strips it.
        backend.post_processor = import_module("tokenizers.processors").ByteLevel(trim_offsets=False)
        if eos_token and backend.token_to_id(eos_token) is None:
            raise DataError(
                f"eos_token: '{eos_token}' is not a token of {source}; use one of its vocabulary, for example "
                f"eos_token in tokenizer_config.json"
            )
        if eos_token:
            special_tokens["eos_token"] = eos_token
        eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        eos_ids = (eos_id,) if eos_id is not None else closing
        pad_id = backend.token_to_id(special_tokens.get("pad_token", ""))
        decides = [sha256(read.content.encode()).hexdigest(), opening, eos_ids, special_tokens]
        return cls(
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1, bos_ids=opening,
            eos_ids=eos_ids, stop_ids=eos_ids, pad_id=pad_id if pad_id is not None else (*eos_ids, 0)[0],
            special_tokens=special_tokens, templates=templates, remark=read.remark, backend=backend,
            digest=sha256(json.dumps(decides, sort_keys=True).encode("ascii")).hexdigest(),
        )  # fmt: skip

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return the tokens of each text, using all cores; special tokens inside a text are recognised."""
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        pairs = ((encoding.ids, encoding.offsets) for encoding in encodings)
        return [EncodedText(np.array(ids, np.uint32), np.array(spans, np.int64).reshape(-1, 2)) for ids, spans in pairs]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def special_ids(self) -> dict[str, int | None]:
        """Return the ids of the special tokens that its files name."""
        ids = {name: self.backend.token_to_id(self.special_tokens.get(name, "")) for name in _SPECIAL_TOKENS[:3]}
        return {f"{name}_id": token for name, token in ids.items()} | {"eos_token_id": next(iter(self.eos_ids), None)}


def open_tokenizer(name: str, *, vocab_size: int, eos_token: str = "") -> Tokenizer:
    """Return the tokenizer that a training file names: "bytes", a tokenizer.json, or the folder that holds one.

    Tokens of ``vocab_size`` or more may exist, but none of them may start or end documents. ``eos_token`` ends
    each document instead of the tokenizer's own.
    Raises ``DataError``: it is missing or damaged, a package is missing, or the model's vocabulary is too small.
    """
    if name == BYTES and eos_token:
        raise DataError(
            f"eos_token: '{eos_token}' has no effect: the byte tokenizer ends documents with NUL; remove it, or set "
            f"data.tokenizer"
        )
    tokenizer: Tokenizer = ByteTokenizer() if name == BYTES else _open(Path(name), eos_token)
    around = (*tokenizer.bos_ids, *tokenizer.eos_ids)
    if max(around, default=0) >= vocab_size:
        raise DataError(
            f"tokenizer '{name}' adds token {max(around)} to each document, but the model's vocab_size is "
            f"{vocab_size}; use the model's own tokenizer, or a larger vocab_size"
        )
    return tokenizer if tokenizer.pad_id < vocab_size else replace(tokenizer, pad_id=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Read:
    """A tokenizer's files."""

    backend: "tokenizers.Tokenizer"
    content: str
    """Content of an equivalent tokenizer.json."""
    special_tokens: Mapping[str, str]
    remark: str = ""


def _open(path: Path, eos_token: str) -> Tokenizer:
    if not path.exists():
        raise DataError(f"tokenizer {path} {missing_path(path)}; allowed: '{BYTES}', a tokenizer.json or its folder")
    folder = path if path.is_dir() else path.parent
    file = path / _TOKENIZER if path.is_dir() else path
    settings = _json(folder / "special_tokens_map.json") | _json(folder / _CONFIG)
    read = _read_files(folder, file, settings)
    return FileTokenizer.of(read, dict(_templates(folder, settings)), eos_token, str(path))


def _read_files(folder: Path, file: Path, settings: Mapping[str, object]) -> _Read:
    """Return a tokenizer as transformers reads it, where that is installed, else as its files have it."""
    if find_spec("tokenizers") is None:
        raise DataError(
            "a tokenizer other than 'bytes' needs the package tokenizers, which is not installed; "
            "python3 -m pip install 'hybridtrain[text]'"
        )
    ours = _read_file(file, settings) if file.exists() else None
    if ours is not None and file.name != _TOKENIZER:
        return ours
    if find_spec("transformers") is None:
        if ours is None:
            raise DataError(
                f"{folder} contains no {_TOKENIZER}; save one there (tokenizer.save_pretrained), or install "
                f"transformers, "
                "which opens other formats"
            )
        name = settings.get("tokenizer_class")
        remark = f"warning: tokens are those of {file}; transformers' {name} may differ: install transformers to check"
        return ours if name in _AS_THE_FILE_SAYS else replace(ours, remark=remark)
    try:
        kind, theirs = _read_by_transformers(folder)
    except Exception as error:  # whatever its readers meet
        why = str(error).partition("\n")[0]
        if ours is None:
            raise DataError(
                f"{folder} contains no {_TOKENIZER}, and transformers cannot open it as a fast tokenizer ({why}); "
                f"save a "
                f"{_TOKENIZER} there"
            ) from error
        return replace(ours, remark=f"warning: tokens are those of {file}, which transformers cannot open ({why})")
    if ours is None:
        return theirs
    file_content, their_content = json.loads(ours.backend.to_str()), json.loads(theirs.content)
    differing = [name for name in _DECIDES if file_content[name] != their_content[name]]
    if not differing:
        return replace(ours, special_tokens=theirs.special_tokens)
    return replace(theirs, remark=f"tokens are those of transformers' {kind}, whose {differing[0]} differs from {file}")


def _read_file(file: Path, settings: Mapping[str, object]) -> _Read:
    content = _read(file)
    special_tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        text = settings.get(name)
        text = text.get("content") if isinstance(text, Mapping) else text  # plain, or the content of a table
        special_tokens |= {name: text} if isinstance(text, str) else {}
    try:
        backend = import_module("tokenizers").Tokenizer.from_str(content)
        return _Read(backend=backend, content=content, special_tokens=special_tokens)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is not a tokenizer of the library 'tokenizers' ({error}); copy it again") from error


def _read_by_transformers(folder: Path) -> tuple[str, _Read]:
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    texts = {name: getattr(tokenizer, name) for name in _SPECIAL_TOKENS}
    special_tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
    content = tokenizer.backend_tokenizer.to_str()
    backend = import_module("tokenizers").Tokenizer.from_str(content)  # a copy: it is changed here
    return type(tokenizer).__name__, _Read(backend=backend, content=content, special_tokens=special_tokens)


def _added_around(backend: "tokenizers.Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before and after each text of its own accord."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for first in range(len(whole) - len(bare) + 1):
        if whole[first : first + len(bare)] == bare:
            return tuple(whole[:first]), tuple(whole[first + len(bare) :])
    return (), ()


def _templates(folder: Path, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the chat templates of a folder; a file of its own goes before tokenizer_config.json."""
    templates = settings.get("chat_template")
    if isinstance(templates, str):
        yield "default", templates
    for entry in templates if isinstance(templates, list) else []:
        if isinstance(entry, dict) and {type(entry.get("name")), type(entry.get("template"))} == {str}:
            yield entry["name"], entry["template"]
    if (folder / "chat_template.jinja").is_file():
        yield "default", _read(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield file.stem, _read(file)


def _json(path: Path) -> dict[str, object]:
    """Return a JSON object, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path).encode())
        json.dumps(content, ensure_ascii=False).encode()  # half a character (U+D800) is in no text
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object; copy it again")
    return content


def _read(path: Path) -> str:
    try:
        return read_plain(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; copy it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


def named_template(tokenizer: Tokenizer, name: str) -> str:
    """Return a chat template by name, of the tokenizer or built in.

    ``name`` may also be a .jinja file; empty: the tokenizer's default. Raises ``DataError``: there is no such template.
    """
    known = {**BUILTIN_TEMPLATES, **tokenizer.templates}
    if not name and "default" in tokenizer.templates:
        return tokenizer.templates["default"]
    if name.endswith(".jinja") and name not in known:
        path = Path(name)
        if not path.is_file():
            raise DataError(f"chat_template {path} {missing_path(path)}")
        return _read(path)
    if not name:
        raise DataError(
            "messages need a chat template, and the tokenizer has no default; set chat_template to a .jinja file or "
            f"one of: {', '.join(sorted(known))}"
        )
    if name not in known:
        raise DataError(f"chat_template: {unknown_name('template', name, known)} A .jinja file is allowed too.")
    return known[name]

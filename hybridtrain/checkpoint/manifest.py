"""A checkpoint's ``manifest.json``: its tensors, with a checksum for each and one for itself.

Tensors have CRC-32 checksums, the fastest in Python's standard library; they miss damage with a probability of 2^-32.
The manifest has a SHA-256.
"""

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import JsonMapping, encode
from hybridtrain.engine.loss_scale import LossScale
from hybridtrain.errors import ConfigError
from hybridtrain.memory.tier import has_room_for_threads
from hybridtrain.tensor_file import FileTensor, open_tensor_file

SCHEMA = 6
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 24
TENSOR_KEY = "$tensor"
"""Key in the cycle's state whose value is the name of a stored tensor."""
_READERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of tensors."""

    num_bytes: int
    header_crc32: int
    """CRC-32 of the header, which precedes the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of such a file."""

    file: str
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor of optimizer state of one parameter."""

    format: str
    """Name of the format, a key of ``STATE_FORMATS``."""
    tensors: tuple[str, ...]
    """Names of the stored tensors; empty before the first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A trained parameter."""

    shape: tuple[int, ...]
    format: str
    """``WeightFormat.saved_as``."""
    tensors: tuple[str, ...]
    states: dict[str, StateEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All metadata of a checkpoint, except the three free-form mappings beside it."""

    schema: int
    steps_done: int
    saved_at: float
    """Seconds since 1970."""
    born_after: int
    """Step after which the optimizer's state was created."""
    previous_norm: float | None
    loss_scale: LossScale | None
    parameters: dict[str, ParameterEntry]
    files: dict[str, SavedFile]
    tensors: dict[str, TensorEntry]

    def __post_init__(self) -> None:
        if not 0 <= self.born_after <= self.steps_done:
            raise ValueError(
                f"steps_done: {self.steps_done} and born_after: {self.born_after} must be step counts "
                f"from 0, steps_done the larger; use an older checkpoint"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A checkpoint: its folder, and the content of its manifest."""

    folder: Path
    manifest: Manifest
    settings: JsonMapping
    cycle: JsonMapping | None
    """State of the hybrid cycle; tensors are referenced by name."""
    extra: JsonMapping
    """Extra values of the caller."""

    def tensors(self) -> Mapping[str, FileTensor]:
        """Return all tensors; their values are read on demand."""
        return {
            name: tensor
            for file in self.manifest.files
            for name, tensor in open_tensor_file(self.folder / file).tensors.items()
        }


def write_manifest(folder: Path, manifest: Manifest, content: JsonMapping) -> None:
    """Write the manifest, with settings, cycle and extra, into the folder of its tensors."""
    (folder / MANIFEST).write_bytes(_text(content | {"state": encode(manifest)}))


def read_generation(folder: Path) -> Generation:
    """Read a manifest without tensors; raises ``ValueError`` if it is damaged or of another schema."""
    text = (folder / MANIFEST).read_bytes()
    try:
        content = json.loads(text)["content"]
        if _text(content) != text:
            raise ValueError(f"{MANIFEST} has changed since it was written")
        state, settings, cycle, extra = (content[key] for key in ("state", "settings", "cycle", "extra"))
        if state["schema"] != SCHEMA:
            raise ValueError(f"schema {state['schema']}, this version reads {SCHEMA}")
        if not all(isinstance(part, dict) for part in (settings, extra, {} if cycle is None else cycle)):
            raise ValueError(f"{MANIFEST} has no settings")
        manifest = decode(Manifest, state, source=MANIFEST)
    except ConfigError as error:
        raise ValueError("; ".join(error.faults)) from error
    except (KeyError, RecursionError, TypeError, UnicodeError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({type(error).__name__}: {str(error)[:80]})") from error
    return Generation(folder=folder, manifest=manifest, settings=settings, cycle=cycle, extra=extra)


def verify(generation: Generation) -> None:
    """Read every byte of a generation's tensors; raises ``ValueError`` with the name of one that has changed."""
    files, entries = generation.manifest.files, generation.manifest.tensors
    for name, file in files.items():
        path = generation.folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != file.num_bytes:
            raise ValueError(f"{name} has {size} bytes of {file.num_bytes}")
        with path.open("rb") as content:
            length = content.read(8)
            header = length + content.read(min(int.from_bytes(length, "little"), file.num_bytes))
        if zlib.crc32(header) != file.header_crc32:
            raise ValueError(f"the header of {name} has changed since it was written")
    tensors = generation.tensors()
    if tensors.keys() != entries.keys():
        raise ValueError(f"tensors are missing, or too many: {sorted(tensors.keys() ^ entries.keys())[:3]}")
    with ThreadPoolExecutor(_READERS) as readers:
        sums = (readers.map if has_room_for_threads(_READERS) else map)(_crc32, tensors.values())
        damaged = [name for name, crc in zip(tensors, sums, strict=True) if crc != entries[name].crc32]
    if damaged:
        raise ValueError(f"'{damaged[0]}' has changed since it was written")


def _crc32(tensor: FileTensor) -> int:
    total = 0
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        rest = tensor.num_bytes
        while rest:
            content = file.read(min(rest, _CHUNK_BYTES))
            if not content:
                raise ValueError(f"{tensor.path.name} ends within '{tensor.name}'")
            total, rest = zlib.crc32(content, total), rest - len(content)
    return total


def _text(content: JsonMapping) -> bytes:
    """Return the canonical text of the whole file."""
    digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "content": content}, sort_keys=True, indent=1).encode() + b"\n"

"""Files of the safetensors format, read and written range by range. P elements of a flat range.

A file is 8 bytes with the length of a header, the header in JSON (of each tensor: type, shape, range of bytes), the
values (https://github.com/huggingface/safetensors, README, "Format"). The format's own library verifies files, but
memory-maps and writes them whole. So values are read and written here: without mapped memory, and with an error instead
of SIGBUS for a truncated file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, by the format's names."""
_READABLE = DTYPES | {"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I64": torch.int64}
"""Further dtypes of checkpoints: codes, 16-bit halves, random streams."""
NAMES = {dtype: name for name, dtype in _READABLE.items()}
"""The format's name of each dtype."""
_LENGTH_BYTES = 8
_COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file."""

    path: Path
    name: str
    dtype_name: str
    """Name of any dtype in the format; ``read`` supports those in ``NAMES``."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""
    num_bytes: int
    """Bytes of the values."""

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; only for those in ``NAMES``."""
        return _READABLE[self.dtype_name]

    def read(self, part: slice) -> Tensor:
        """Return a flat range of its elements: these bytes of the file are read and no others."""
        with _disable_current_modes():  # host memory is not the ledger's
            values_P = torch.empty(part.stop - part.start, dtype=self.dtype, device="cpu")
            rest = values_P.view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + part.start * values_P.itemsize)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise ConfigError(
                        str(self.path),
                        [f"{self.name}: the file became shorter while it was read; {_COPY_AGAIN}"],
                    )
                rest = rest[count:]
        return values_P


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The header of a file whose length is what the header says."""

    tensors: Mapping[str, FileTensor]
    digest: str
    """SHA-256 of header and file size; values are not looked at."""


def open_tensor_file(path: Path) -> TensorFile:
    """Read a file's header, and no value; raises ``ConfigError``: it is not a complete safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file, safe_open(path, framework="np"):
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(length)
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        fault = f"{size} bytes that are not a complete safetensors file ({why}); {_COPY_AGAIN}"
        raise ConfigError(str(path), [fault]) from error
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read ({error.strerror or error}); {_COPY_AGAIN}"]) from error
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        first, end = entry["data_offsets"]
        place = _LENGTH_BYTES + length + first
        tensors[name] = FileTensor(path, name, entry["dtype"], tuple(entry["shape"]), place, end - first)
    return TensorFile(tensors, sha256(header + size.to_bytes(_LENGTH_BYTES, "little")).hexdigest())


TensorHead = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and type of a tensor of a file."""


class TensorFileWriter:
    """A new file of tensors, in this order and of types of ``NAMES``; values come in any order, range by range."""

    def __init__(self, path: Path, tensors: Sequence[TensorHead]) -> None:
        header = tensor_header(tensors)
        self._dtypes = {name: dtype for name, _, dtype in tensors}
        self._offsets, end = {}, len(header)
        for name, shape, dtype in tensors:
            self._offsets[name], end = end, end + prod(shape) * dtype.itemsize
        self._file = path.open("xb", buffering=0)
        try:
            self._file.truncate(end)
            self._write(0, header)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, first: int, values_P: Tensor) -> None:
        """Write elements from number ``first`` on; ``values_P`` is contiguous, of the tensor's type, on the CPU."""
        assert values_P.dtype == self._dtypes[name], "callers round values"
        self._write(self._offsets[name] + first * values_P.itemsize, values_P.view(torch.uint8).numpy().data)

    def _write(self, offset: int, content: memoryview | bytes) -> None:
        self._file.seek(offset)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; its folder waits for the disk (``new_folder``)."""
        self._file.close()


def tensor_header(tensors: Sequence[TensorHead]) -> bytes:
    """Return the bytes of a file before its values."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, shape, dtype in tensors:
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header

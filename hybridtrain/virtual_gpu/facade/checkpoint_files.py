"""Tensor files without values: ``torch.save``, ``torch.load`` and safetensors under a virtual card.

A virtual tensor is saved as shape, dtype and place, with known values. A safetensors file gets its real header and
length, but as a sparse file without data. So scripts can save and load checkpoints of any size; existing files with
values are never overwritten. Not modelled: host memory of writing, and shared storages in a file.
"""

import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from sys import modules
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_MARK = "hybridtrain_virtual"
"""Marker of a file without values."""
_TRUE_DEVICE = torch.device
Locate = Callable[[str], torch.device]
_locators: list[Locate] = []
"""map_location stack: saved device -> target of a file's tensors. Empty: no virtual card."""


def hybridtrain_virtual(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], values: Tensor | None
) -> Tensor:
    """Restore a tensor saved under a virtual card; files refer to this function by name.

    Raises:
        RuntimeError: There is no virtual card.
    """
    if not _locators:
        raise RuntimeError(
            "torch.load: the file was saved under a virtual GPU and holds shapes without values; load it under one "
            "(hybridtrain virtual, VirtualGpu), or train for real."
        )
    target = _locators[-1](device)
    if values is not None:
        return values.to(target)
    return torch.empty_strided(shape, stride, dtype=dtype, device=target)


@contextmanager
def checkpoint_files(
    is_virtual: Callable[[Tensor], bool], known: Callable[[Tensor], Tensor | None], note_save: Callable[[], None]
) -> Iterator[None]:
    """Replace reading and writing of tensor files inside the block."""
    true_reduce: Callable[[Tensor, int], Any] = torch.Tensor._reduce_ex_internal
    true_save: Callable[..., None] = torch.save
    true_load: Callable[..., Any] = torch.load

    def reduce(tensor: Tensor, protocol: int) -> Any:
        if not is_virtual(tensor):
            return true_reduce(tensor, protocol)
        stride = tuple(tensor.stride())
        return hybridtrain_virtual, (str(tensor.device), tensor.dtype, tuple(tensor.shape), stride, known(tensor))

    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        note_save()
        if _is_kept(f):
            return
        with mock.patch.object(torch, "device", _TRUE_DEVICE):  # pickle asks whether a device's type is what it is
            true_save(obj, f, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        tags: dict[int, str] = {}

        def note(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
            tags[storage._cdata] = tag
            return storage

        def move(tensor: Tensor) -> Tensor:
            tag = tags.get(tensor.untyped_storage()._cdata) if not is_virtual(tensor) else None
            return tensor if tag is None else tensor.to(locate(tag))

        path = f if isinstance(f, str | PathLike) else _path_of(f)
        if path is not None and zipfile.is_zipfile(path):
            f = path
            kwargs.setdefault("mmap", True)  # bytes that are never read stay on the disk
        locate = _locator(map_location)
        _locators.append(locate)
        try:
            with torch.serialization.safe_globals([hybridtrain_virtual]):
                return tree_map_only(Tensor, move, true_load(f, note, *args, **kwargs))
        finally:
            _locators.pop()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "_reduce_ex_internal", reduce))
        stack.enter_context(mock.patch.object(torch, "save", save))
        stack.enter_context(mock.patch.object(torch, "load", load))
        if find_spec("safetensors") is not None:  # a script may import it later: its true save reads addresses
            import_module("safetensors.torch")
            stack.enter_context(_safetensors(is_virtual, note_save))
        _locators.append(torch.device)
        try:
            yield
        finally:
            _locators.pop()


@contextmanager
def _safetensors(is_virtual: Callable[[Tensor], bool], note_save: Callable[[], None]) -> Iterator[None]:
    """Replace the body of ``save_file``, which others import by name, and ``safe_open`` wherever it was imported."""
    function: FunctionType = modules["safetensors.torch"].save_file
    true_open: Callable[..., Any] = modules["safetensors"].safe_open

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        # A card by name is written to past torch; one by its number is not.
        kind, _, index = str(device).partition(":")
        return true_open(filename, framework, device=int(index or 0) if kind == "cuda" else device, **kwargs)

    true_code = function.__code__
    true_save = FunctionType(true_code, function.__globals__, argdefs=function.__defaults__)

    def save(tensors: Mapping[str, Tensor], filename: str | PathLike[str], metadata: Mapping[str, str] | None) -> None:
        note_save()
        if _is_kept(filename):
            return
        if any(is_virtual(tensor) for tensor in tensors.values()):
            _write_hole(tensors, Path(filename), metadata)
        else:
            true_save(tensors, filename, metadata)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        return __hybridtrain_save__(tensors, filename, metadata)  # type: ignore[name-defined]  # noqa: F821

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(function.__globals__, {"__hybridtrain_save__": save}))
        for module in [*modules.values()]:
            if getattr(module, "__dict__", {}).get("safe_open") is true_open:
                stack.enter_context(mock.patch.object(module, "safe_open", safe_open))
        function.__code__ = save_file.__code__
        try:
            yield
        finally:
            function.__code__ = true_code


def _write_hole(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None) -> None:
    """Write a safetensors file with its header, and a hole where the data would be."""
    header: dict[str, object] = {"__metadata__": {**(metadata or {}), _MARK: "shapes without values"}}
    kinds = {dtype: kind for kind, dtype in modules["safetensors.torch"]._TYPES.items()}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):  # aligned, as the format asks
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _is_kept(file: object) -> bool:
    """Return whether a file holds values, so that nothing is saved there; warn if it does."""
    if not isinstance(file, str | PathLike):
        return False
    path = Path(file)
    keeps = path.is_file() and path.stat().st_size > 0 and not _has_mark(path)
    if keeps:
        warnings.warn(f"{path} holds values: the virtual card keeps it and saves nothing there", stacklevel=3)
    return keeps


def _path_of(file: Any) -> str | None:
    """Return the path of an open file that was not read yet."""
    name = getattr(file, "name", None)
    return name if isinstance(name, str) and Path(name).is_file() and not file.tell() else None


def _has_mark(path: Path) -> bool:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(_MARK.encode() in archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    with path.open("rb") as file:
        size = file.read(8)
        return len(size) == 8 and _MARK.encode() in file.read(min(struct.unpack("<Q", size)[0], 2**27))


class _MovedStorage(NamedTuple):
    """A storage of a file, as a function for ``map_location`` sees it."""

    device: torch.device = torch.device("cpu")

    def to(self, device: Any, *_args: Any, **_kwargs: Any) -> "_MovedStorage":
        return _MovedStorage(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))

    def cuda(self, device: Any = None, **_kwargs: Any) -> "_MovedStorage":
        return self.to("cuda" if device is None else device)

    def cpu(self) -> "_MovedStorage":
        return _MovedStorage()


def _locator(map_location: Any) -> Locate:
    """Return a tensor's target for ``torch.load``'s ``map_location``."""
    if map_location is None:
        return torch.device
    if isinstance(map_location, Mapping):
        return lambda tag: torch.device(map_location.get(tag, tag))
    if callable(map_location):
        return lambda tag: torch.device(tag) if (to := map_location(_MovedStorage(), tag)) is None else to.device
    target = torch.device(map_location)
    return lambda _tag: target

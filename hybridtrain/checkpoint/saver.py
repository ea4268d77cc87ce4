"""Saving: a copy at the end of a step, written in the background; without memory for a copy, written at once."""

import errno
import math
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from hybridtrain.atomic_write import new_folder
from hybridtrain.checkpoint.generations import generation_folder, generations, remove_generation, require_room, thin_out
from hybridtrain.checkpoint.identity import settings_of
from hybridtrain.checkpoint.manifest import SCHEMA, TENSOR_KEY, Manifest, SavedFile, TensorEntry, write_manifest
from hybridtrain.checkpoint.parts import HostCopies, SavedTensor, saved_parameters, state_bytes
from hybridtrain.config.encode import JsonMapping, JsonValue
from hybridtrain.errors import DiskSpaceError, DivergenceError, StateError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.tier import available_host_bytes, has_room_for_threads
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Placement
from hybridtrain.tensor_file import TensorFileWriter, TensorHead, tensor_header
from hybridtrain.trainer import Trainer
from hybridtrain.units import GIB

_SHARD_BYTES = 4 * GIB
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ADVICE = "earlier checkpoints are unchanged. Free disk space, or choose an --out on a larger disk."


class CheckpointSaver:
    """Saves checkpoints of a run in the background; leaving a ``with`` block waits until the last one is on disk.

    Args:
        folder: The folder of all checkpoints.
        keep_last: Number of newest checkpoints to keep.
        keep_hourly: Number of further hours of which one checkpoint each is kept.
        copies_to_host: Whether to copy the state to host memory and write from there. None: copy if the state fits in
        half of the free host memory. Otherwise ``save`` writes slice by slice before it returns; only the disk's flush
        overlaps the next steps.
        clock: Seconds since 1970.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, keep_hourly: int = 0, copies_to_host: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.saved_step = -1
        """Step of the last call of ``save``."""
        self._keep_last = keep_last
        self._keep_hourly = keep_hourly
        self._copies_to_host = copies_to_host
        self._copies = HostCopies()
        self._clock = clock
        self._last: Future[None] = _completed()
        """Result of the last save."""
        self._gives_up = False

    def require_room(self, trainer: Trainer, num_there: int) -> None:
        """Raise ``DiskSpaceError`` unless the disk has room for all kept checkpoints and one more.

        All ranks must call it; the first one checks. ``num_there`` checkpoints exist already.

        All ranks ask, the first one looks; the folder has ``num_there`` generations already.
        """
        num_bytes = state_bytes(trainer)
        if trainer.group.rank:
            return
        count = max(self._keep_last + 1 - num_there, 1)
        need = f"{count} checkpoints ({self._keep_last} kept, one being written)"
        advice = "training has not started. Free disk space, choose an --out on a larger disk, or lower keep_last."
        require_room(self.folder, count * num_bytes, need, advice)

    def save(
        self,
        trainer: Trainer,
        hybrid: HybridTrainer | None = None,
        data: Mapping[str, JsonValue] | None = None,
        extra: JsonMapping | None = None,
    ) -> None:
        """Save everything that the next step depends on; waits for the previous save.

        Args:
            trainer: The trainer to save.
            hybrid: The cycle around the trainer, if there is one.
            data: Settings that identify the batches, by dotted name; they must be equal on resume.
            extra: Further values of the caller; ``load_checkpoint`` returns them as ``extra``.

        Raises:
            DivergenceError: a value is not finite; nothing was written.
            DiskSpaceError: the disk is full; earlier checkpoints are unchanged.
            StateError: the disk failed.
        """
        self.finish()
        trainer.enter_phase(Phase.FULL)  # state that waits elsewhere through PREDICT comes back
        trainer.transfer.finish()
        on_host = self._fits_host(trainer) if self._copies_to_host is None else self._copies_to_host
        on_host = trainer.group.gather_numbers([float(on_host)])[0] > 0
        self.saved_step = trainer.steps_done
        tensors, parameters = saved_parameters(trainer)
        if trainer.group.rank:  # the first rank writes; it reads in this order
            for tensor in tensors:
                for part in tensor.parts() if tensor.is_shared else ():
                    tensor.read(part, None)
            return
        if on_host:
            tensors = [self._copies.keep(tensor) for tensor in tensors]
        cycle = None if hybrid is None else _without_tensors(hybrid.state_dict(), "cycle", tensors)
        norm = None if trainer.previous_norm is None else trainer.transfer.read(trainer.previous_norm)
        manifest = Manifest(
            schema=SCHEMA, steps_done=trainer.steps_done, saved_at=self._clock(), born_after=trainer.states.born_after,
            previous_norm=norm,
            loss_scale=None if trainer.loss_scale is None else replace(trainer.loss_scale),
            parameters=parameters, files={}, tensors={},
        )  # fmt: skip
        content: JsonMapping = {
            "settings": settings_of(trainer, hybrid, data),
            "cycle": cycle,
            "extra": dict(extra or {}),
        }
        self._make_room(sum(tensor.num_bytes for tensor in tensors))
        write = self._written(tensors, manifest, content, trainer.config.optimizer.lr)
        if not on_host:
            next(write)
        self._last = Future()
        if has_room_for_threads():
            threading.Thread(target=_exhaust, args=(write, self._last), name="saving", daemon=True).start()
        else:
            _exhaust(write, self._last)  # no step is done meanwhile

    @property
    def is_empty(self) -> bool:
        """Whether the folder holds no checkpoint yet."""
        return not generations(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        """Wait for the write in progress; a ``KeyboardInterrupt`` abandons it."""
        self._gives_up = kind is not None and not issubclass(kind, Exception)
        if kind is None:
            self.finish()
        else:
            self.forget_fault()  # the error before is the one to raise

    def poll(self) -> None:
        """Raise the error of a background save since the last call, without waiting."""
        if self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is on disk; raises the errors of ``save``."""
        last, self._last = self._last, _completed()
        last.result()

    @property
    def fault(self) -> BaseException | None:
        """The error of the last save; waits for its end."""
        return self._last.exception()

    def forget_fault(self) -> None:
        """Wait for the last save and clear its error, before an older checkpoint is loaded."""
        wait([self._last])
        self._last = _completed()

    def _written(
        self, tensors: Sequence[SavedTensor], manifest: Manifest, content: JsonMapping, lr: float
    ) -> Iterator[None]:
        """Write a generation; yield once between its last byte and waiting for the disk."""
        target = generation_folder(self.folder, manifest.steps_done)
        try:
            with new_folder(target) as partial:
                files, entries = self._write_tensors(partial, tensors, manifest.steps_done, lr)
                write_manifest(partial, replace(manifest, files=files, tensors=entries), content)
                yield
                if target.exists():  # saved again after the same step
                    remove_generation(target)
        except OSError as error:
            kind = DiskSpaceError if error.errno in _NO_SPACE else StateError
            fault = f"the checkpoint could not be written ({error.strerror or error})"
            raise kind(f"{self.folder}: {fault}; {_ADVICE}") from error
        spare_bytes = 2 * sum(tensor.num_bytes for tensor in tensors)
        thin_out(self.folder, keep_last=self._keep_last, keep_hourly=self._keep_hourly, spare_bytes=spare_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Remove old checkpoints where the disk lacks room; raise ``DiskSpaceError`` if it still does."""
        if self.folder.exists() and shutil.disk_usage(self.folder).free < num_bytes:
            thin_out(self.folder, keep_last=self._keep_last, keep_hourly=0, spare_bytes=0)
        require_room(self.folder, num_bytes, "the checkpoint", _ADVICE)

    def _fits_host(self, trainer: Trainer) -> bool:
        """Return whether half of what is free on the host, or half of what the run may still take, holds a copy."""
        account, needed = trainer.transfer.tiers, state_bytes(trainer)
        free = [available_host_bytes() or 0]
        if account.host_limit_bytes is not None:
            free.append(account.host_limit_bytes - sum(account.by_class(Placement.HOST).values()))
        return self._copies.num_bytes >= needed or needed <= min(free) // 2

    def _write_tensors(
        self, folder: Path, tensors: Sequence[SavedTensor], step: int, lr: float
    ) -> tuple[dict[str, SavedFile], dict[str, TensorEntry]]:
        """Write files of at most 4 GiB, or one tensor; return their entries of the manifest."""
        files: dict[str, SavedFile] = {}
        entries: dict[str, TensorEntry] = {}
        for number, shard in enumerate(_shards(tensors)):
            name = f"tensors-{number:05d}.safetensors"
            heads: list[TensorHead] = [(tensor.name, tensor.shape, tensor.dtype) for tensor in shard]
            with closing(TensorFileWriter(folder / name, heads)) as writer:
                for tensor in shard:
                    total, is_checked = 0, tensor.must_be_finite and tensor.dtype.is_floating_point
                    for part in tensor.parts():
                        if self._gives_up:  # its result is abandoned
                            raise KeyboardInterrupt
                        values_P = tensor.read(part, None).contiguous()
                        if is_checked and not all(map(math.isfinite, torch.aminmax(values_P))):
                            raise DivergenceError(
                                f"step {step}: {tensor.name} holds NaN or infinity; all saved values must be finite. "
                                f"Earlier checkpoints in {folder.parent} are unchanged. Lower optimizer.lr ({lr}), "
                                f"set optimizer.max_grad_norm or check the data.",
                                layers=[tensor.name], is_applied=True, step=step,
                            )  # fmt: skip
                        total = zlib.crc32(values_P.view(torch.uint8).numpy().data, total)
                        writer.write(tensor.name, part.start, values_P)
                    entries[tensor.name] = TensorEntry(file=name, crc32=total)
            header = tensor_header(heads)
            size = len(header) + sum(tensor.num_bytes for tensor in shard)
            files[name] = SavedFile(num_bytes=size, header_crc32=zlib.crc32(header))
        return files, entries


def _completed() -> Future[None]:
    """Return a future that is already completed."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _exhaust(work: Iterator[None], end: Future[None]) -> None:
    try:
        for _ in work:
            pass
        end.set_result(None)
    except BaseException as error:  # noqa: BLE001  raised where the result is read
        end.set_exception(error)


def _shards(tensors: Sequence[SavedTensor]) -> Iterator[list[SavedTensor]]:
    shard: list[SavedTensor] = []
    for tensor in tensors:
        if shard and sum(held.num_bytes for held in shard) + tensor.num_bytes > _SHARD_BYTES:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _without_tensors(value: object, path: str, tensors: list[SavedTensor]) -> JsonValue:
    """Return a state as JSON values; each tensor moves to ``tensors`` and leaves its name."""
    if isinstance(value, Tensor):
        flat, shape = value.detach().cpu().contiguous().view(-1), tuple(value.shape)
        tensors.append(
            SavedTensor(
                name=path, shape=shape, dtype=value.dtype, read=lambda part, _: flat[part], must_be_finite=False
            )
        )
        return {TENSOR_KEY: path}
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]
    assert value is None or isinstance(value, bool | int | float | str), (
        f"{path}: {type(value)} is not a type that a state can hold"
    )
    return value

"""Files of the disk tier: what is read is what was written, clear errors, and nothing is ever left behind."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from faults.runs import ended, forked, is_running
from hybridtrain.errors import DiskSpaceError, DiskTierError, HybridTrainError
from hybridtrain.memory import disk_tier
from hybridtrain.memory.disk_tier import DiskArena, DiskFile

FORKS = """
import os, sys
from pathlib import Path
import torch
from hybridtrain.memory.disk_tier import DiskArena

arena = DiskArena(Path(sys.argv[1]))
file = arena.allocate(100_000, "weights")
file.write(0, torch.frombuffer(bytearray(b"x" * 100_000), dtype=torch.uint8))
child = os.fork()
if child == 0:
    arena.close()
    sys.exit(0)  # runs atexit, as a child of multiprocessing does not
assert os.waitpid(child, 0)[1] == 0
target = torch.empty(3, dtype=torch.uint8)
file.read(0, target)
assert target.tolist() == [120] * 3
"""


def random_bytes(num_bytes: int) -> bytes:
    return np.random.default_rng(num_bytes).bytes(num_bytes)


def tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def read_back(file: DiskFile, offset: int, num_bytes: int) -> bytes:
    target = torch.full((num_bytes,), 63, dtype=torch.uint8)
    file.read(offset, target)
    return target.numpy().tobytes()


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def descriptor_of(file: DiskFile) -> int:
    return file._file.fileno()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[DiskArena]:
    with closing(DiskArena(tmp_path)) as arena:
        yield arena


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the system move at most 7 bytes a call; gives the offsets of all calls."""
    starts: list[int] = []

    def limited(call: Callable[..., int]) -> Callable[..., int]:
        def run(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            starts.append(offset)
            return call(descriptor, [buffers[0][:7]], offset)

        return run

    monkeypatch.setattr(os, "preadv", limited(os.preadv))
    monkeypatch.setattr(os, "pwritev", limited(os.pwritev))
    return starts


def failing(code: int) -> Callable[..., int]:
    def fail(*_arguments: object, **_settings: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


# Content


def test_a_new_file_is_zero(arena: DiskArena) -> None:
    assert read_back(arena.allocate(10_000, "zeros"), 0, 10_000) == bytes(10_000)


def test_what_was_written_is_read_and_the_rest_stays(arena: DiskArena) -> None:
    file = arena.allocate(10_000, "weights")
    data = random_bytes(3000)
    file.write(0, tensor(data))
    file.write(7000, tensor(data))
    file.write(1000, tensor(b"new"))
    expected = data[:1000] + b"new" + data[1003:] + bytes(4000) + data
    assert read_back(file, 0, 10_000) == expected
    assert read_back(file, 998, 7) == expected[998:1005]


@pytest.mark.usefixtures("short_calls")
def test_short_reads_and_writes_are_continued(arena: DiskArena) -> None:
    file = arena.allocate(1000, "weights")
    data = random_bytes(900)
    file.write(50, tensor(data))
    assert read_back(file, 50, 900) == data
    assert read_back(file, 0, 1000) == bytes(50) + data + bytes(50)


def test_large_spans_are_moved_in_chunks(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch, short_calls: list[int]
) -> None:
    monkeypatch.setattr(disk_tier, "_CHUNK_BYTES", 4)
    file = arena.allocate(100, "weights")
    file.write(10, tensor(b"0123456789"))
    assert short_calls == [10, 14, 18]
    assert read_back(file, 10, 10) == b"0123456789"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_tensors_are_moved_without_a_copy(arena: DiskArena, dtype: torch.dtype) -> None:
    source = torch.randn(40, 50).mul(50).to(dtype)
    target = torch.empty_like(source)
    file = arena.allocate(source.nbytes, "weights")
    file.write(0, source)
    file.read(0, target)
    assert torch.equal(target, source)


def test_threads_may_use_disjoint_ranges(arena: DiskArena) -> None:
    part_bytes = 50_000
    file = arena.allocate(8 * part_bytes, "shared")
    parts = [np.random.default_rng(index).bytes(part_bytes) for index in range(8)]
    threads = [
        threading.Thread(target=file.write, args=(index * part_bytes, tensor(part))) for index, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_back(file, 0, file.num_bytes) == b"".join(parts)


# Names


def test_space_is_really_reserved(arena: DiskArena) -> None:
    file = arena.allocate(3_000_000, "weights")
    status = os.fstat(descriptor_of(file))
    assert status.st_size == 3_000_000
    assert status.st_blocks * 512 >= 3_000_000


def test_a_closed_file_is_gone_and_says_so(arena: DiskArena) -> None:
    file = arena.allocate(1000, "weights")
    file.close()
    for use in (lambda: read_back(file, 0, 1), lambda: file.write(0, tensor(b"x"))):
        with pytest.raises(DiskTierError, match="closed"):
            use()


def test_no_file_has_a_name(arena: DiskArena, tmp_path: Path) -> None:
    for name in ("weights", "weights", "../../block 3/\u00fc", "", "x" * 1000):
        assert os.fstat(descriptor_of(arena.allocate(10, name))).st_nlink == 0
    assert names_in(tmp_path) == []


def test_no_file_keeps_its_name_where_the_file_system_wants_one(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    file = arena.allocate(100, "weights")
    file.write(0, tensor(b"there"))
    assert names_in(tmp_path) == []
    assert read_back(file, 0, 5) == b"there"


def test_an_empty_file_is_allowed(arena: DiskArena) -> None:
    file = arena.allocate(0, "nothing")
    file.write(0, torch.empty(0))
    file.read(0, torch.empty(0, 3))


# Wrong use


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (100, 1), (99, 2), (0, 101), (1000, 10)])
def test_a_range_beyond_the_file_is_refused(arena: DiskArena, offset: int, num_bytes: int) -> None:
    file = arena.allocate(100, "weights")
    for use in (file.read, file.write):
        with pytest.raises(ValueError, match=r"allowed: 0 to 100"):
            use(offset, torch.zeros(num_bytes, dtype=torch.uint8))
    assert os.fstat(descriptor_of(file)).st_size == 100


def test_a_negative_size_is_refused(arena: DiskArena) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        arena.allocate(-1, "weights")


def test_a_closed_arena_allocates_nothing(tmp_path: Path) -> None:
    arena = DiskArena(tmp_path)
    arena.close()
    arena.close()
    with pytest.raises(DiskTierError, match="closed"):
        arena.allocate(1, "late")
    assert names_in(tmp_path) == []


# The disk's faults


def test_a_file_that_ends_early_is_told_with_the_byte(arena: DiskArena, tmp_path: Path) -> None:
    file = arena.allocate(5000, "weights")
    os.truncate(descriptor_of(file), 3000)
    message = f"{re.escape(str(tmp_path))}: 'weights': reading at byte 3000 failed: the file ends there, 5000 bytes"
    with pytest.raises(DiskTierError, match=message):
        read_back(file, 2000, 2000)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_failing_disk_is_reported(arena: DiskArena, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = arena.allocate(100, "weights")
    monkeypatch.setattr(os, name, failing(errno.EIO))
    use = file.read if name == "preadv" else file.write
    with pytest.raises(DiskTierError, match=r"at byte 20 failed: Input/output error; check the disk"):
        use(20, torch.zeros(10, dtype=torch.uint8))


def test_a_disk_that_fills_up_while_writing_is_reported(arena: DiskArena, monkeypatch: pytest.MonkeyPatch) -> None:
    file = arena.allocate(100, "weights")
    monkeypatch.setattr(os, "pwritev", failing(errno.ENOSPC))
    with pytest.raises(DiskSpaceError, match="writing at byte 0 failed: No space left"):
        file.write(0, tensor(b"x"))


def test_a_disk_too_small_is_refused_before_anything_is_written(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10_000, 4096, 5904))
    monkeypatch.setattr(tempfile, "TemporaryFile", failing(errno.EIO))  # nothing is even tried
    with pytest.raises(DiskSpaceError) as caught:
        arena.allocate(5905, "grads")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: 'grads' needs 5.77 KiB (5905 bytes), 5.77 KiB (5904 bytes) are free; ")
    assert "larger disk" in message


def test_the_free_space_is_that_of_the_real_disk(arena: DiskArena) -> None:
    with pytest.raises(DiskSpaceError, match="bytes\\) are free"):
        arena.allocate(2**62, "everything")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_refused_reservation_leaves_no_file(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch, code: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(code))
    with pytest.raises(DiskSpaceError, match=re.escape(os.strerror(code))):
        arena.allocate(100, "weights")
    assert names_in(tmp_path) == []


def test_a_limit_on_the_size_of_files_is_reported(arena: DiskArena) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskSpaceError, match="File too large"):
            arena.allocate(200_000, "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert arena.allocate(200_000, "weights").num_bytes == 200_000


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    with pytest.raises(DiskTierError, match="making files in this folder failed"):
        DiskArena(path)
    with pytest.raises(DiskTierError, match="Not a directory"):
        DiskArena(path / "below")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", failing(errno.EROFS))
    with pytest.raises(DiskTierError, match=f"{re.escape(str(tmp_path))}: .*Read-only file system.*another folder"):
        DiskArena(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DiskTierError, match="Permission denied"):
            DiskArena(tmp_path)
    finally:
        tmp_path.chmod(0o700)


# The end of a run


def test_a_missing_folder_is_made_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with closing(DiskArena(folder)) as arena:
        arena.allocate(100, "weights")
    assert names_in(folder) == []


def test_an_error_inside_closes_everything(tmp_path: Path) -> None:
    files: list[DiskFile] = []

    def fail_inside() -> None:
        with closing(DiskArena(tmp_path)) as arena:
            files.append(arena.allocate(100, "weights"))
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    with pytest.raises(DiskTierError, match="closed"):
        read_back(files[0], 0, 1)


def test_arenas_made_at_once_by_threads_share_a_folder(tmp_path: Path) -> None:
    arenas: list[DiskArena] = []
    threads = [threading.Thread(target=lambda: arenas.append(DiskArena(tmp_path))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [arena.allocate(10, "weights") for arena in arenas]
    for number, file in enumerate(files):
        file.write(0, tensor(bytes([number])))
    assert [read_back(file, 0, 1)[0] for file in files] == list(range(12))
    for arena in arenas:
        arena.close()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_leaves_nothing_whatever_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    folder, ready = tmp_path / "tier", tmp_path / "ready"

    def wait() -> None:
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        arena = DiskArena(folder)
        arena.allocate(100_000, "weights").write(0, tensor(b"x" * 100_000))
        ready.touch()
        time.sleep(30)

    with forked(wait) as process:
        while not ready.exists():
            assert is_running(process)
            time.sleep(0.01)
        assert names_in(folder) == []  # nothing to leave behind, at no time
        os.kill(process, number)
        assert ended(process) == -number
    assert names_in(folder) == []


def test_no_signal_handler_is_touched(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with closing(DiskArena(tmp_path)):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_child_leaves_the_file_to_its_parent_which_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path) == []


def test_both_errors_are_the_users_to_mend() -> None:
    assert issubclass(DiskSpaceError, HybridTrainError)
    assert issubclass(DiskTierError, HybridTrainError)

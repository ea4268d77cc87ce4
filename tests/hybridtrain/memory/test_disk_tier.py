"""Files of the disk tier: what is read is what was written, clear errors, and nothing is ever left behind."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridtrain.errors import DiskSpaceError, DiskTierError, HybridTrainError
from hybridtrain.memory import disk_tier
from hybridtrain.memory.disk_tier import DiskArena, DiskFile
from hybridtrain.memory.run_folder import RunFolder

AWAIT_PARENT = "sys.stdin.readline()"
SCRIPT = """
import os, signal, sys
from pathlib import Path
from hybridtrain.memory.disk_tier import DiskArena

arena = DiskArena(Path(sys.argv[1]))
file = arena.allocate(100_000, "weights")
file.write(0, memoryview(b"x" * 100_000))
print(os.getpid(), flush=True)
"""


def random_bytes(num_bytes: int) -> bytes:
    return np.random.default_rng(num_bytes).bytes(num_bytes)


def read_back(file: DiskFile, offset: int, num_bytes: int) -> bytes:
    target = bytearray(b"?" * num_bytes)
    file.read(offset, memoryview(target))
    return bytes(target)


def run_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[DiskArena]:
    with DiskArena(tmp_path) as arena:
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
    def fail(*_arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def started(folder: Path, then: str) -> "subprocess.Popen[str]":
    """Start a process that has an arena with one file, and runs ``then``."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + then, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A suite started in the background of a script ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  no threads here
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(process.pid)
    return process


@contextmanager
def waiting_process(folder: Path, then: str = AWAIT_PARENT) -> "Iterator[subprocess.Popen[str]]":
    """Hold such a process while it waits, and kill it at the end if it still runs."""
    process = started(folder, then)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# Content


def test_a_new_file_is_zero(arena: DiskArena) -> None:
    assert read_back(arena.allocate(10_000, "zeros"), 0, 10_000) == bytes(10_000)


def test_what_was_written_is_read_and_the_rest_stays(arena: DiskArena) -> None:
    file = arena.allocate(10_000, "weights")
    data = random_bytes(3000)
    file.write(0, memoryview(data))
    file.write(7000, memoryview(data))
    file.write(1000, memoryview(b"new"))
    expected = data[:1000] + b"new" + data[1003:] + bytes(4000) + data
    assert read_back(file, 0, 10_000) == expected
    assert read_back(file, 998, 7) == expected[998:1005]


@pytest.mark.usefixtures("short_calls")
def test_short_reads_and_writes_are_continued(arena: DiskArena) -> None:
    file = arena.allocate(1000, "weights")
    data = random_bytes(900)
    file.write(50, memoryview(data))
    assert read_back(file, 50, 900) == data
    assert read_back(file, 0, 1000) == bytes(50) + data + bytes(50)


def test_large_spans_are_moved_in_chunks(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch, short_calls: list[int]
) -> None:
    monkeypatch.setattr(disk_tier, "_CHUNK_BYTES", 4)
    file = arena.allocate(100, "weights")
    file.write(10, memoryview(b"0123456789"))
    assert short_calls == [10, 14, 18]
    assert read_back(file, 10, 10) == b"0123456789"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_tensors_are_moved_without_a_copy(arena: DiskArena, dtype: torch.dtype) -> None:
    source = torch.randn(40, 50).mul(50).to(dtype)
    target = torch.empty_like(source)
    file = arena.allocate(source.nbytes, "weights")
    file.write(0, memoryview(source.view(-1).view(torch.uint8).numpy()))
    file.read(0, memoryview(target.view(-1).view(torch.uint8).numpy()))
    assert torch.equal(target, source)


def test_memory_of_any_item_type_and_shape_is_taken(arena: DiskArena) -> None:
    source, target = np.arange(12.0).reshape(3, 4), np.empty((3, 4))
    file = arena.allocate(source.nbytes, "matrix")
    file.write(0, memoryview(source))
    file.read(0, memoryview(target))
    np.testing.assert_array_equal(target, source)


def test_threads_may_use_disjoint_ranges(arena: DiskArena) -> None:
    part_bytes = 50_000
    file = arena.allocate(8 * part_bytes, "shared")
    parts = [np.random.default_rng(index).bytes(part_bytes) for index in range(8)]
    threads = [
        threading.Thread(target=file.write, args=(index * part_bytes, memoryview(part)))
        for index, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_back(file, 0, file.nbytes) == b"".join(parts)


def test_flushing_waits_for_the_disk_and_tells_of_its_failure(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = arena.allocate(100, "weights")
    file.write(0, memoryview(b"x" * 100))
    file.flush()
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    with pytest.raises(DiskTierError, match="flushing failed"):
        file.flush()


# Accounts and names


def test_bytes_are_counted(arena: DiskArena) -> None:
    first, second = arena.allocate(1000, "a"), arena.allocate(500, "b")
    assert (arena.live_bytes, arena.peak_bytes) == (1500, 1500)
    first.close()
    first.close()
    assert (arena.live_bytes, arena.peak_bytes) == (500, 1500)
    arena.allocate(200, "c")
    assert (arena.live_bytes, arena.peak_bytes) == (700, 1500)
    second.close()
    arena.close()
    assert (arena.live_bytes, arena.peak_bytes) == (0, 1500)


def test_space_is_really_reserved(arena: DiskArena) -> None:
    file = arena.allocate(3_000_000, "weights")
    assert file.path.stat().st_size == 3_000_000
    assert file.path.stat().st_blocks * 512 >= 3_000_000


def test_a_closed_file_is_gone_and_says_so(arena: DiskArena) -> None:
    file = arena.allocate(1000, "weights")
    file.close()
    assert not file.path.exists()
    for use in (lambda: read_back(file, 0, 1), lambda: file.write(0, memoryview(b"x")), file.flush):
        with pytest.raises(DiskTierError, match="closed"):
            use()


def test_names_need_not_be_unique_or_file_names(arena: DiskArena, tmp_path: Path) -> None:
    names = ["weights", "weights", "../../block 3/\u00fc", "", "x" * 1000]
    files = [arena.allocate(10, name) for name in names]
    assert len({file.path for file in files}) == len(names)
    assert {file.path.parent.parent for file in files} == {tmp_path}


def test_an_empty_file_is_allowed(arena: DiskArena) -> None:
    file = arena.allocate(0, "nothing")
    file.write(0, memoryview(b""))
    file.read(0, memoryview(bytearray()))
    file.read(0, memoryview(np.empty((0, 3))))
    assert arena.peak_bytes == 0


# Wrong use


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (100, 1), (99, 2), (0, 101), (1000, 10)])
def test_a_range_beyond_the_file_is_refused(arena: DiskArena, offset: int, num_bytes: int) -> None:
    file = arena.allocate(100, "weights")
    for use in (file.read, file.write):
        with pytest.raises(ValueError, match=r"allowed: 0 to 100"):
            use(offset, memoryview(bytearray(num_bytes)))
    assert file.path.stat().st_size == 100


def test_memory_that_cannot_be_used_is_refused(arena: DiskArena) -> None:
    file = arena.allocate(100, "weights")
    with pytest.raises(ValueError, match="read-only"):
        file.read(0, memoryview(b"fixed"))
    strided = memoryview(np.zeros(20, dtype=np.uint8)[::2])
    for use in (file.read, file.write):
        with pytest.raises(ValueError, match="strided"):
            use(0, strided)


def test_a_negative_size_is_refused(arena: DiskArena) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        arena.allocate(-1, "weights")


def test_a_closed_arena_allocates_nothing(tmp_path: Path) -> None:
    arena = DiskArena(tmp_path)
    arena.close()
    arena.close()
    with pytest.raises(DiskTierError, match="closed"):
        arena.allocate(1, "late")
    assert run_folders(tmp_path) == []


# The disk's faults


@pytest.mark.parametrize("left_bytes", [0, 100, 2999, 3000])
def test_a_file_cut_short_is_named_with_the_byte_where_it_ends(arena: DiskArena, left_bytes: int) -> None:
    file = arena.allocate(5000, "weights")
    os.truncate(file.path, left_bytes)
    message = f"{re.escape(str(file.path))}: the file ends at byte {left_bytes}, 5000 were reserved"
    with pytest.raises(DiskTierError, match=message):
        read_back(file, 2000, 2000)
    with pytest.raises(DiskTierError, match=message):
        file.write(4000, memoryview(b"x"))
    assert file.path.stat().st_size == left_bytes


def test_a_file_removed_by_someone_else_stays_usable(arena: DiskArena) -> None:
    file = arena.allocate(100, "weights")
    file.path.unlink()
    file.write(0, memoryview(b"still here"))
    assert read_back(file, 0, 10) == b"still here"


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_failing_disk_is_reported(arena: DiskArena, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = arena.allocate(100, "weights")
    monkeypatch.setattr(os, name, failing(errno.EIO))
    use = file.read if name == "preadv" else file.write
    with pytest.raises(DiskTierError, match=r"at byte 20 failed: Input/output error; the disk may be failing"):
        use(20, memoryview(bytearray(10)))


def test_a_disk_that_fills_up_while_writing_is_reported(arena: DiskArena, monkeypatch: pytest.MonkeyPatch) -> None:
    file = arena.allocate(100, "weights")
    monkeypatch.setattr(os, "pwritev", failing(errno.ENOSPC))
    with pytest.raises(DiskSpaceError, match="writing at byte 0 failed: No space left"):
        file.write(0, memoryview(b"x"))


def test_a_disk_too_small_is_refused_before_anything_is_written(
    arena: DiskArena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10_000, 4096, 5904))
    monkeypatch.setattr(os, "open", failing(errno.EIO))  # nothing is even tried
    with pytest.raises(DiskSpaceError) as caught:
        arena.allocate(5905, "grads")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: 'grads' needs 5.77 KiB (5905 bytes), 5.77 KiB (5904 bytes) are free; ")
    assert "larger disk" in message
    assert arena.live_bytes == arena.peak_bytes == 0


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
    assert [path.name for path in tmp_path.glob("*/*")] == ["lock"]
    assert arena.live_bytes == arena.peak_bytes == 0


def test_a_limit_on_the_size_of_files_is_reported(arena: DiskArena) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskSpaceError, match="File too large"):
            arena.allocate(200_000, "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert arena.allocate(200_000, "weights").nbytes == 200_000


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    with pytest.raises(DiskTierError, match="making a folder for this run failed"):
        DiskArena(path)
    with pytest.raises(DiskTierError, match="Not a directory"):
        DiskArena(path / "below")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", failing(errno.EROFS))
    with pytest.raises(DiskTierError, match=f"{re.escape(str(tmp_path))}: .*Read-only file system.*another folder"):
        DiskArena(tmp_path)
    assert run_folders(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DiskTierError, match="Permission denied"):
            DiskArena(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_without_locks_is_refused_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    with pytest.raises(DiskTierError, match="No locks available"):
        DiskArena(tmp_path)
    assert run_folders(tmp_path) == []


def test_an_arena_that_cannot_be_removed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = DiskArena(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", failing(errno.EBUSY))
        with pytest.raises(DiskTierError, match="remove it by hand"):
            arena.close()


# The end of a run


def test_a_missing_folder_is_made_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with DiskArena(folder) as arena:
        arena.allocate(100, "weights")
        (name,) = run_folders(folder)
        assert re.fullmatch(rf"hybridtrain-{os.getpid()}-[0-9a-f]{{8}}", name)
    assert run_folders(folder) == []


def test_an_error_inside_removes_everything(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with DiskArena(tmp_path) as arena:
            arena.allocate(100, "weights")
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert run_folders(tmp_path) == []


def test_arenas_share_a_folder(tmp_path: Path) -> None:
    with DiskArena(tmp_path) as first:
        file = first.allocate(100, "weights")
        with DiskArena(tmp_path) as second:
            second.allocate(100, "weights").write(0, memoryview(b"second"))
            file.write(0, memoryview(b"first"))
            assert len(run_folders(tmp_path)) == 2
        assert read_back(file, 0, 5) == b"first"
        assert len(run_folders(tmp_path)) == 1
    assert run_folders(tmp_path) == []


def test_arenas_made_at_once_by_threads_all_live(tmp_path: Path) -> None:
    arenas: list[DiskArena] = []
    threads = [threading.Thread(target=lambda: arenas.append(DiskArena(tmp_path))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run_folders(tmp_path)) == len(arenas) == 12
    for arena in arenas:
        arena.allocate(10, "weights")
        arena.close()
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise MemoryError", 1),
        ("arena.close()", 0),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_process_leaves_nothing_however_it_ends(tmp_path: Path, then: str, code: int) -> None:
    process = started(tmp_path, then)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert run_folders(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_leaves_nothing_and_is_the_exit_status(tmp_path: Path, number: signal.Signals) -> None:
    with waiting_process(tmp_path) as process:
        assert len(run_folders(tmp_path)) == 1
        process.send_signal(number)
        assert process.wait(timeout=60) == -number
    assert run_folders(tmp_path) == []


def test_sigterm_during_writes_of_threads_leaves_nothing(tmp_path: Path) -> None:
    busy = """
import threading
def work():
    while True:
        arena.allocate(1000, "more").write(0, memoryview(b"y" * 1000))
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("busy", flush=True)
while True:
    file.write(0, memoryview(b"x" * 100_000))
"""
    with waiting_process(tmp_path, busy) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.terminate()
        assert process.wait(timeout=60) == -signal.SIGTERM
    assert run_folders(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next_arena(tmp_path: Path) -> None:
    with waiting_process(tmp_path) as alive:
        with waiting_process(tmp_path) as killed:
            killed.kill()
            assert killed.wait(timeout=60) == -signal.SIGKILL
        assert len(run_folders(tmp_path)) == 2
        assert (next(tmp_path.glob(f"hybridtrain-{killed.pid}-*/*-weights"))).stat().st_size == 100_000
        with DiskArena(tmp_path):
            owners = sorted(int(name.split("-")[1]) for name in run_folders(tmp_path))
            assert owners == sorted([alive.pid, os.getpid()])
        assert next(tmp_path.glob("*/*-weights")).stat().st_size == 100_000
        alive.communicate(input="\n", timeout=60)
        assert alive.returncode == 0
    assert run_folders(tmp_path) == []


def test_a_forked_child_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    fork = """
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with arena:
        pass
    sys.exit(0)  # runs atexit, as a child of multiprocessing does not
assert os.waitpid(child, 0)[1] == 0
assert file.path.exists()
target = bytearray(3)
file.read(0, memoryview(target))
assert target == b"xxx"
"""
    process = started(tmp_path, fork)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert run_folders(tmp_path) == []


def test_a_surviving_child_does_not_keep_the_folder_of_a_killed_parent(tmp_path: Path) -> None:
    fork = f"""
child = os.fork()
if child:
    print(child, flush=True)
{AWAIT_PARENT}
"""
    with waiting_process(tmp_path, fork) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait(timeout=60)
        os.kill(child, 0)
        deadline = time.monotonic() + 60
        while run_folders(tmp_path) and time.monotonic() < deadline:  # the child drops its copy of the lock
            DiskArena(tmp_path).close()
        assert run_folders(tmp_path) == []


@pytest.mark.parametrize("has_lock", [False, True])
@pytest.mark.parametrize("is_alive", [False, True])
def test_a_folder_that_is_just_being_made_is_kept_while_its_maker_lives(
    tmp_path: Path, *, is_alive: bool, has_lock: bool
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = tmp_path / f"hybridtrain-{os.getpid() if is_alive else dead.pid}-01234567"
    folder.mkdir()
    if has_lock:
        (folder / "lock").touch()
    with DiskArena(tmp_path):
        assert folder.exists() == is_alive


def test_what_is_not_a_run_folder_is_never_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lock").write_text("1\n")
    folder = tmp_path / "disk"
    folder.mkdir()
    for name in ("hybridtrain", "hybridtrain-12", "hybridtrain-12-0123456z", "my-hybridtrain-12-01234567"):
        (folder / name).mkdir()
    (folder / "hybridtrain-999999999-01234567").write_text("a file")
    (folder / "hybridtrain-999999999-76543210").symlink_to(outside)
    before = run_folders(folder)
    DiskArena(folder).close()
    assert run_folders(folder) == before
    assert run_folders(outside) == ["lock"]


# Signal handlers


def test_the_handler_is_installed_while_an_arena_is_open(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with DiskArena(tmp_path):
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        with DiskArena(tmp_path):
            pass
        assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_programs_own_handler_is_left_alone(tmp_path: Path) -> None:
    received: list[int] = []

    def own(number: int, _frame: object) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with DiskArena(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is own
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
            assert len(run_folders(tmp_path)) == 1
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_installs_no_handler(tmp_path: Path) -> None:
    seen: list[object] = []

    def use() -> None:
        with DiskArena(tmp_path):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_run_folder_removed_twice_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.is_open
    assert folder.remove()
    assert folder.remove()
    assert not folder.is_open


def test_both_errors_are_the_users_to_mend() -> None:
    assert issubclass(DiskSpaceError, HybridTrainError)
    assert issubclass(DiskTierError, HybridTrainError)

"""Building the CPU kernel: compilers that are missing or broken, and what is left in the cache folder."""

import shutil
from pathlib import Path

import pytest

from hybridkernels.adamw_int8.cpu_build import KernelBuildError, find_compiler, load_cpu_kernel

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: nothing is compiled")
pytestmark = pytest.mark.usefixtures("fresh_kernel")


def write_compiler(folder: Path, script: str) -> Path:
    """Put a program called gcc into a folder of its own."""
    program = folder / "bin" / "gcc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybridtrain"


def only_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))


def test_no_compiler_means_no_kernel_and_no_file(cache: Path, no_compiler: None) -> None:  # noqa: ARG001
    assert load_cpu_kernel() is None
    assert not cache.exists()


def test_a_compiler_that_fails_is_named_with_its_first_lines(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints = "; ".join(f"echo complaint {number} >&2" for number in range(1, 8))
    program = write_compiler(tmp_path, f"{complaints}; exit 1")
    only_program(program, monkeypatch)
    with pytest.raises(KernelBuildError) as raised:
        load_cpu_kernel()
    head, *lines = str(raised.value).splitlines()
    assert head == f"{program} cannot build cpu_kernel.c; install gcc, or fix this:"
    assert lines == [f"complaint {number}" for number in range(1, 6)]
    assert list(cache.iterdir()) == []


def test_a_failed_build_is_tried_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_compiler()
    if real is None:
        pytest.skip("no C compiler: nothing is compiled")
    monkeypatch.setattr(shutil, "which", lambda _name: str(tmp_path / "bin" / "gcc"))
    program = write_compiler(tmp_path, "exit 1")
    with pytest.raises(KernelBuildError):
        load_cpu_kernel()
    program.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    assert load_cpu_kernel() is not None
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_the_library_appears_in_the_cache_folder_in_one_move(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    look = f'while [ "$1" != -o ]; do shift; done; ls -i "$2" > {log}'
    program = write_compiler(tmp_path, f'{find_compiler()} "$@" || exit 1; {look}')
    monkeypatch.setattr(shutil, "which", lambda _name: str(program))
    assert load_cpu_kernel() is not None
    (library,) = cache.iterdir()  # nothing temporary is left
    inode, written = log.read_text().split()
    assert Path(written) != library  # no reader ever sees a half-written file:
    assert library.stat().st_ino == int(inode)  # the whole one was renamed, not copied


@needs_compiler
def test_a_library_in_the_cache_is_not_built_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    program = write_compiler(tmp_path, f'echo built >> {log}; exec {find_compiler()} "$@"')
    monkeypatch.setattr(shutil, "which", lambda _name: str(program))
    load_cpu_kernel()
    load_cpu_kernel.cache_clear()
    assert load_cpu_kernel() is not None
    assert log.read_text() == "built\n"
    assert len(list(cache.iterdir())) == 1


def test_an_empty_cache_variable_means_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # XDG Base Directory Specification: "if $XDG_CACHE_HOME is either not set or empty".
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    only_program(write_compiler(tmp_path, "exit 1"), monkeypatch)
    with pytest.raises(KernelBuildError):
        load_cpu_kernel()
    assert (tmp_path / ".cache" / "hybridtrain").is_dir()
    assert not (tmp_path / "hybridtrain").exists()


@needs_compiler
@pytest.mark.parametrize("num_bytes", [0, 1000, 9000])
def test_a_library_that_was_cut_short_is_built_again(cache: Path, num_bytes: int) -> None:
    load_cpu_kernel()
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.unlink()  # this process has mapped the whole one
    library.write_bytes(whole[:num_bytes])
    load_cpu_kernel.cache_clear()
    assert load_cpu_kernel() is not None
    assert library.stat().st_size == len(whole)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named_with_what_to_set(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KernelBuildError, match=r"Not a directory; .*XDG_CACHE_HOME"):
        load_cpu_kernel()
    assert not cache.exists()

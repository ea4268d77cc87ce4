"""What the command writes to: any encoding, closed, or without a reader."""

import io
import os
import subprocess
import sys

import pytest

from hybridtrain.cli.streams import LastingFile, make_streams_last


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_ends_nothing(closed: str) -> None:
    command = f"exec {sys.executable} -m hybridtrain list cards {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)  # noqa: S607
    assert (done.returncode, done.stderr) == (0, "")
    assert ("rtx-4090" in done.stdout) == (closed == "2>&-")


def test_a_writer_outlives_its_reader() -> None:
    source, target = os.pipe()
    file = LastingFile(target, "w")
    stream = io.TextIOWrapper(io.BufferedWriter(file), encoding="ascii", errors="backslashreplace", line_buffering=True)
    stream.write("read\n")
    assert (os.read(source, 10), file.is_gone) == (b"read\n", False)
    os.close(source)
    stream.write("step 1\n")
    stream.write("step 2 \u00e9\n")
    assert file.is_gone
    stream.close()


def test_a_full_disk_is_told() -> None:
    with LastingFile("/dev/full", "w") as file, pytest.raises(OSError, match="No space left"):
        file.write(b"an answer")


def test_any_character_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    make_streams_last()
    sys.stdout.write("caf\u00e9 \ud800")
    stream.seek(0)
    assert stream.read() == r"caf\xe9 \ud800"

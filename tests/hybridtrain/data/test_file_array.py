"""Files that change, end or never end while they are used: a message, no signal and no hang."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridtrain.config.decode import load_toml
from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import open_corpus
from hybridtrain.data.documents import open_source
from hybridtrain.data.file_array import open_array
from hybridtrain.data.token_file import TokenFormat, open_token_file, write_token_file
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.models.model_config import Workload

_LARGE = 2**25 + 2**20  # items: more than is read at once, so that it stays mapped


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    write_token_file(path, np.arange(50_000) % 50_000, TokenFormat.RAW_UINT16)
    return path


@pytest.mark.parametrize("key", [slice(None), slice(3, 9), slice(-5, None), slice(7, 7), 0, -1, 11, slice(2, 40, 3)])
def test_parts_are_those_of_the_array(tokens: Path, key: slice | int) -> None:
    values = np.arange(50_000, dtype=np.uint16)
    np.testing.assert_array_equal(open_array(tokens, "<u2")[key], values[key])
    np.testing.assert_array_equal(open_array(tokens, "<u2", offset=20)[key], values[10:][key])


def test_a_large_file_stays_on_the_disk_and_parts_of_its_parts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(_LARGE * 2)
        file.seek(2 * (_LARGE - 100))
        file.write(np.arange(100, dtype="<u2").tobytes())
    array = open_array(path, "<u2")
    assert isinstance(array, np.memmap)
    tail = array[2**20 :][-100:]
    assert not isinstance(tail, np.memmap)
    np.testing.assert_array_equal(tail, np.arange(100))


# In a process of its own: the failure that is tested against is the end of it.
_TRAINING = """
import sys; from pathlib import Path
import numpy as np
from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.token_file import open_token_file
from hybridtrain.errors import DataError
path = Path(sys.argv[1])
sampler = BatchSampler(open_token_file(path, vocab_size=50257).tokens, micro_batch_size=2, seq_len=8, seed=0)
exec(sys.argv[2])
try:
    for step in range(50):
        sampler.batch(step, 0)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "change",
    ["__import__('os').truncate(path, 4096)", "path.write_bytes(np.full(33_600_000, 65535, dtype='<u2').tobytes())"],
    ids=["cut", "overwritten"],
)
def test_a_token_file_that_changes_under_a_run_is_named(tmp_path: Path, change: str) -> None:
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(2 * 33_600_000)
    command = [sys.executable, "-c", _TRAINING, str(path), change]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "changed or shrank while in use" in done.stdout


def test_a_small_token_file_is_held_in_memory(tokens: Path) -> None:
    sampler = BatchSampler(open_token_file(tokens, vocab_size=50257).tokens, micro_batch_size=1, seq_len=8, seed=0)
    before = sampler.batch(0, 0).token_ids_BT
    os.truncate(tokens, 16)
    np.testing.assert_array_equal(sampler.batch(0, 0).token_ids_BT, before)


def test_a_pipe_or_device_is_no_data(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(DataError, match="pipe or a device"):
            open_corpus(path, vocab_size=50257)
        with pytest.raises(DataError, match="pipe or a device"):
            open_source(path)
        with pytest.raises(ConfigError, match="pipe or a device"):
            load_toml(Workload, path)

"""``hybridtrain train``: which rows a resumed run sees whose batches are of another size, or whose rows are others."""

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.data.batches import TokenBatch
from hybridtrain.data.byte_tokens import decode_tokens
from hybridtrain.data.packing import PackedRows
from hybridtrain.errors import DivergenceError
from hybridtrain.run.train_guard import RunGuard
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import GuardConfig
from tiny_files import shape_file
from tiny_tokenizers import write_lines

NUM_ROWS = 48
TRAIN = """\
num_steps = {steps}
sample_tokens = 0
{top}
[data]
path = "lines.jsonl"
packing = "none"
validation_percent = 0
[model.shape]
{shape}
[workload]
batch_size = {batch_size}
seq_len = {seq_len}
[schedule]
warmup_steps = 0
total_steps = 100
{more}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    write_lines(Path("lines.jsonl"), *[{"text": f"{n:03} fox"} for n in range(NUM_ROWS)])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def number_of(row_T: npt.NDArray[np.int64]) -> int:
    """Return the number that a row begins with."""
    return int(decode_tokens(row_T[:3]))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the rows that were loaded, in order; of the probe split those that begin with it."""
    seen: list[int] = []
    load = PackedRows.batch

    def noted(packed: PackedRows, numbers: npt.NDArray[np.int64]) -> TokenBatch:
        found = load(packed, numbers)
        seen.extend(number_of(row) for row in found.token_ids_BT)
        return found

    monkeypatch.setattr(PackedRows, "batch", noted)
    return seen


def train(steps: int, batch_size: int, *arguments: str, seq_len: int = 8, top: str = "", more: str = "") -> int:
    text = TRAIN.format(
        steps=steps, batch_size=batch_size, seq_len=seq_len, top=top, more=more,
        shape=shape_file(num_blocks=1, tied=True),
    )  # fmt: skip
    Path("train.toml").write_text(text)
    return main(["train", "train.toml", *arguments])


def forget_rows(step: int) -> None:
    """Let a checkpoint be one of before rows were counted."""
    path = Path(f"run/checkpoints/step-{step:08}/manifest.json")
    content = json.loads(path.read_bytes())["content"]
    del content["extra"]["rows_seen"]
    digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_bytes(json.dumps({"sha256": digest, "content": content}, sort_keys=True, indent=1).encode() + b"\n")


ACCUMULATION = '[[optimizations]]\nkind = "grad_accumulation"\ngrad_accum_steps = 2\n'


@pytest.mark.parametrize("is_old", [False, True])
def test_every_row_is_seen_once_an_epoch_whatever_the_size_of_batches(is_old: bool, rows: list[int]) -> None:
    change = ("--resume", "--change", "workload.batch_size")
    assert train(2, 8) == 0
    if is_old:
        forget_rows(2)
    assert train(5, 4, *change, more=ACCUMULATION) == 0
    assert train(7, 10, *change) == 0
    assert len(rows) == NUM_ROWS
    assert Counter(rows) == Counter(range(NUM_ROWS))
    assert train(11, 12, *change) == 0
    assert Counter(rows) == Counter(2 * list(range(NUM_ROWS)))
    assert rows[:NUM_ROWS] != rows[NUM_ROWS:]


def test_a_run_stopped_in_between_sees_the_rows_of_one_that_was_not(rows: list[int]) -> None:
    assert train(3, 8, "--out", "whole") == 0
    whole = rows.copy()
    rows.clear()
    assert train(1, 8) == 0
    assert train(3, 8, "--resume") == 0
    assert rows == whole


@pytest.mark.parametrize("change", ["workload.seq_len", "seed"])
def test_rows_that_are_packed_anew_begin_an_epoch(
    change: str, rows: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(2, 8) == 0
    rows.clear()
    changed = train(
        4, 8, "--resume", "--change", change, seq_len=12 if "seq" in change else 8, top="seed = 3" * (change == "seed")
    )
    assert changed == 0
    assert f"rows were packed anew: a new epoch of {NUM_ROWS} begins" in capsys.readouterr().out
    assert train(8, 8, "--resume", seq_len=12 if "seq" in change else 8, top="seed = 3" * (change == "seed")) == 0
    assert Counter(rows) == Counter(range(NUM_ROWS))


def test_other_data_begins_an_epoch(rows: list[int]) -> None:
    assert train(2, 8) == 0
    rows.clear()
    write_lines(Path("lines.jsonl"), *[{"text": f"{n:03} hen"} for n in range(100, 100 + NUM_ROWS // 2)])
    assert train(5, 8, "--resume", "--allow-data-change") == 0
    assert Counter(rows) == Counter(range(100, 100 + NUM_ROWS // 2))


def test_rows_left_out_stay_so_when_batches_are_of_another_size(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def fails(trainer: Trainer, batches: list[TokenBatch], **how: object) -> object:
        if any(number_of(batch.token_ids_BT[0]) == first for batch in batches):
            raise DivergenceError("step: no number")
        return step(trainer, batches, **how)  # type: ignore[arg-type]

    guard = '[guard]\non_nan = "skip"\n'
    assert train(2, 8, more=guard) == 0
    first = rows[8]  # of the second batch
    rows.clear()
    monkeypatch.setattr(Trainer, "step", fails)
    assert train(2, 8, "--out", "skips", more=guard) == 0
    assert train(8, 4, "--out", "skips", "--resume", "--change", "workload.batch_size", more=guard) == 0
    assert Counter(rows) == Counter(range(NUM_ROWS)) + Counter(rows[8:16])  # loaded once more for the report


def test_a_batch_left_out_ahead_is_met_again_when_its_number_means_other_rows() -> None:
    said: list[str] = []
    guard = RunGuard(GuardConfig(), Path("faults.jsonl"), said.append)
    guard.load({"skipped_batches": [1, 2, 6], "losses": []})
    assert [guard.batch_of(step) for step in range(5)] == [0, 3, 4, 5, 7]
    guard.forget_ahead(1)
    assert [guard.batch_of(step) for step in range(5)] == [0, 3, 4, 5, 6]
    assert len(said) == 1
    guard.forget_ahead(1)
    assert len(said) == 1

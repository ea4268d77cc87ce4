"""The longest rows in every batch, and the peaks of phases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.virtual_gpu.facade.worst_case import WorstCase, phase_peaks


class _Rows(Dataset[dict[str, list[int]]]):
    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [1] * self._lengths[index]}


def _padded(rows: list[dict[str, list[int]]]) -> torch.Tensor:
    longest = max(len(row["input_ids"]) for row in rows)
    return torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])


def _run(gpu: VirtualGpu, lengths: list[int], folder: Path) -> list[tuple[int, ...]]:
    shapes = []
    with gpu:
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in DataLoader(_Rows(lengths), batch_size=2, shuffle=True, collate_fn=_padded):
            shapes.append(tuple(batch.shape))
            model(batch.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.int64, device="cuda"))
        torch.save(model.state_dict(), folder / "model.pt")
    return shapes


def test_every_batch_has_the_longest_rows(tmp_path: Path) -> None:
    gpu = VirtualGpu("rtx-4090", worst=True)
    assert _run(gpu, [5, 9, 700, 6, 8], tmp_path) == [(2, 700), (2, 700), (1, 700)]
    worst = gpu.ledger.worst
    assert worst is not None
    rows = worst.rows(gpu.report().trace)
    assert [*rows] == ["step", "longest row", "evaluation", "saving", "resuming"]
    assert rows["longest row"] == "row 2 of 5, 700 elements: every batch has the longest rows"
    assert rows["resuming"].startswith("not seen")
    peaks = phase_peaks(gpu.report().trace, worst.marks)
    assert [*peaks] == ["step", "evaluation", "saving"]
    assert peaks["step"] - peaks["evaluation"] > 2 * 700 * 512 * 4  # activations of two rows
    assert peaks["evaluation"] > peaks["saving"]


def test_without_the_wish_rows_stay_as_they_are(tmp_path: Path) -> None:
    gpu = VirtualGpu("rtx-4090")
    shapes = _run(gpu, [5, 9, 700, 6, 8], tmp_path)
    assert sum(shape[1] == 700 for shape in shapes) == 1
    assert gpu.ledger.worst is None


def test_a_loaded_state_is_a_phase_of_resuming() -> None:
    with VirtualGpu("rtx-4090", worst=True) as gpu:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for again in (False, True):
            model(torch.zeros(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not again:
                optimizer.load_state_dict(optimizer.state_dict())
    worst = gpu.ledger.worst
    assert worst is not None
    assert [phase for _, phase in worst.marks] == ["step", "resuming", "step"]
    assert worst.rows(gpu.report().trace)["evaluation"].startswith("not seen")


@pytest.mark.parametrize(
    ("batches", "dataset", "told"),
    [
        ([[0], [1]], [[1, 2], [3, 4]], "rows are alike, in 2 elements"),
        ([0, 1], [[1], [2, 3]], "not tried: a loader has no batches of rows, or more than 20,000 rows"),
    ],
)
def test_rows_that_can_not_be_chosen_are_said(batches: list[Any], dataset: list[Any], told: str) -> None:
    worst = WorstCase()
    assert [*worst.of_longest(iter(batches), dataset)] == batches
    assert worst.longest == [told]

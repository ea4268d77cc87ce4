"""Folders of transformers, read and written: every value to the bit, and the same logits."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from hf_folders import FAMILY_MODELS, load_model, save_model, transformers_model
from hybridtrain.errors import DiskSpaceError, DivergenceError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.hf_config import model_config_from_hf
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import FusedUpdate
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.tensor_file import FileTensor, TensorFileWriter
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.weights.export import export_folder
from hybridtrain.weights.hf_source import open_folder
from lazy_transfer import ComputeWatch, LazyTransfer
from stacks import ACCUM_STEPS, BASE, GPT2, PLACES, STORAGE
from tiny_models import GPT2_ODD, LLAMA_ODD, random_steps

CPU = torch.device("cpu")
SETTINGS = TrainerConfig(optimizer=AdamWConfig(lr=1e-2), schedule=LrSchedule(kind="constant", warmup_steps=0))
TOKENS_BT = torch.arange(34).view(2, 17)
RESIDENT = {"updated-on-host-weights": [], "fused-all": [FusedUpdate()]}
"""What stays of a place's stack where everything is on the device."""


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Read with the format's own library."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def logits_of(model: PreTrainedModel, config: ModelConfig) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS_BT % config.vocab_size).logits  # type: ignore[no-any-return]


def assert_same_files(expected: Path, actual: Path) -> None:
    before, after = tensors_of(expected), tensors_of(actual)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert torch.equal(after[name], values), name


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_folder_goes_in_and_out_to_the_bit(name: str, shard: str, tmp_path: Path) -> None:
    config = FAMILY_MODELS[name]
    source = save_model(transformers_model(config), tmp_path / "source", max_shard_size=shard)
    assert model_config_from_hf(source) == config
    assert (len(list(source.glob("*.safetensors"))) > 1) is (shard == "20KB")
    trainer = Trainer(config, compose([]), TrainerConfig(), DirectTransfer(CPU), source=open_folder(source, config))
    export_folder(
        trainer,
        tmp_path / "out",
        dtype=torch.float32,
        source_folder=source,
        max_shard_bytes=5_000_000 if shard == "5GB" else 20_000,
    )
    assert_same_files(source, tmp_path / "out")
    theirs = load_model(source, config)
    ours = load_model(tmp_path / "out", config)
    assert torch.equal(logits_of(ours, config), logits_of(theirs, config))


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_trained_model_has_the_same_logits_in_transformers(name: str, tmp_path: Path) -> None:
    config = FAMILY_MODELS[name]
    source = save_model(transformers_model(config), tmp_path / "source")
    trainer = Trainer(config, compose([]), SETTINGS, DirectTransfer(CPU), source=open_folder(source, config))
    for batches in random_steps(config, 6):
        trainer.step(batches)
    export_folder(trainer, tmp_path / "out", dtype=torch.float32)
    theirs = logits_of(load_model(tmp_path / "out", config), config)
    trainer.model.eval()
    ours = trainer.executor.forward(TOKENS_BT % config.vocab_size).detach()
    before = logits_of(load_model(source, config), config)
    largest = before.abs().max().item()
    # The same values; sums in another order, up to 20 roundings (6e-8) of the largest element were seen.
    assert (ours - theirs).abs().max() < 5e-6 * largest
    assert (before - theirs).abs().max() > 1e-2 * largest


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("place", ["weights", "weights-disk", "state", "updated-on-host-weights", "fused-all"])
@pytest.mark.parametrize("storage", ["bf16-master", "bf16-split16", "int8-weights-master"])
def test_exact_values_are_written_wherever_they_are(storage: str, place: str, tmp_path: Path) -> None:
    source = save_model(transformers_model(GPT2), tmp_path / "source")
    stack, resident = [*BASE, *STORAGE[storage]], RESIDENT.get(place, [])
    transfer = LazyTransfer(disk_folder=tmp_path)  # copies come as late as they may
    with ComputeWatch(transfer):
        placed = start_and_end([*stack, *PLACES[place]], source, tmp_path / "placed", transfer)
    assert transfer.hazards == []
    expected = start_and_end([*stack, *resident], source, tmp_path / "resident", DirectTransfer(CPU))
    assert_same_files(source, placed[0])  # a master has every bit of the first values
    assert_same_files(expected[1], placed[1])
    with pytest.raises(AssertionError):
        assert_same_files(placed[0], placed[1])


def start_and_end(stack: list[Optimization], source: Path, folder: Path, transfer: DirectTransfer) -> tuple[Path, Path]:
    """Export before and after two steps."""
    trainer = Trainer(GPT2, compose(stack), SETTINGS, transfer, source=open_folder(source, GPT2))
    export_folder(trainer, folder / "start", dtype=torch.float32)
    for batches in random_steps(GPT2, 2, ACCUM_STEPS):
        trainer.step(batches)
    export_folder(trainer, folder / "end", dtype=torch.float32)
    transfer.close()
    return folder / "start", folder / "end"


def test_16_bits_are_the_nearest(tmp_path: Path) -> None:
    source = save_model(transformers_model(GPT2_ODD), tmp_path / "source")
    trainer = Trainer(GPT2_ODD, compose([]), SETTINGS, DirectTransfer(CPU), source=open_folder(source, GPT2_ODD))
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        export_folder(trainer, folder, dtype=dtype)
        for name, values in tensors_of(source).items():
            assert torch.equal(tensors_of(folder)[name], values.to(dtype))
        again = Trainer(GPT2_ODD, compose([]), SETTINGS, DirectTransfer(CPU), source=open_folder(folder, GPT2_ODD))
        export_folder(again, tmp_path / f"{dtype} again", dtype=dtype)
        assert_same_files(folder, tmp_path / f"{dtype} again")


def test_a_value_that_a_type_cannot_hold_leaves_no_folder(tmp_path: Path) -> None:
    trainer = Trainer(GPT2_ODD, compose([]), SETTINGS, DirectTransfer(CPU))
    with torch.no_grad():
        trainer.model.head.norm.bias[3] = 1e6
    export_folder(trainer, tmp_path / "wide", dtype=torch.bfloat16)
    with pytest.raises(DivergenceError, match="has values that are not finite"):
        export_folder(trainer, tmp_path / "narrow", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


def test_a_write_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(GPT2_ODD, compose([]), SETTINGS, DirectTransfer(CPU))
    write, num_writes = TensorFileWriter.write, 0

    def fail(writer: TensorFileWriter, name: str, first: int, values_P: Tensor) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 7:
            raise OSError(errno.EIO, "the disk fails")
        write(writer, name, first, values_P)

    monkeypatch.setattr(TensorFileWriter, "write", fail)
    with pytest.raises(OSError, match="the disk fails"):
        export_folder(trainer, tmp_path / "out", dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_disk_too_small_is_told_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(GPT2_ODD, compose([]), SETTINGS, DirectTransfer(CPU))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1))  # type: ignore[attr-defined]
    with pytest.raises(DiskSpaceError, match="the weights need"):
        export_folder(trainer, tmp_path / "deep" / "out", dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_only_what_a_slice_needs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_folder(save_model(transformers_model(LLAMA_ODD), tmp_path / "source"), LLAMA_ODD)
    read: list[slice] = []
    monkeypatch.setattr(FileTensor, "read", lambda _, part: read.append(part) or torch.empty(part.stop - part.start))
    for part in (slice(0, 5), slice(35, 1000), slice(3600, 3636)):
        source.read("embedding.token", part)
    assert read == [slice(0, 5), slice(35, 1000), slice(3600, 3636)]

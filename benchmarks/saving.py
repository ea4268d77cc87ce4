"""What saving costs: steps with a state saved every N of them against steps alone, interleaved, medians."""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hybridtrain.checkpoint import CheckpointSaver, load_checkpoint
from hybridtrain.checkpoint.parts import HostCopies, saved_parameters, state_bytes
from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.optimizations import MixedPrecision
from hybridtrain.plan.compose import compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import format_bytes


def main() -> None:
    """Time rounds of N steps, in turn without saving and with, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="on the disk in question; default: a temporary folder")
    asked = parser.parse_args()
    model = replace(
        model_preset("gpt2-small"), num_blocks=asked.blocks, width=asked.width, ffn_width=4 * asked.width,
        vocab_size=8192, num_heads=asked.width // 64, num_kv_heads=asked.width // 64, max_seq_len=128,
    )  # fmt: skip
    trainer = Trainer(model, compose([MixedPrecision()]), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    rng = np.random.default_rng(0)
    token_ids_BT, target_ids_BT = (rng.integers(0, 8192, (asked.batch, 128)) for _ in range(2))
    batch = TokenBatch(token_ids_BT=token_ids_BT, target_ids_BT=target_ids_BT)
    trainer.step([batch])
    size = state_bytes(trainer)
    print(f"{model.num_params:,} parameters, a state of {format_bytes(size)}, saved every {asked.save_every} steps")
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        for name, on_host in (("copied to host memory", True), ("written at once", False)):
            saver = CheckpointSaver(Path(place), copies_to_host=on_host)
            _report(name, trainer, batch, saver, asked.rounds, asked.save_every)
        copies = HostCopies()

        def copy() -> None:
            for tensor in saved_parameters(trainer)[0]:
                copies.keep(tensor)

        copy()
        copy_s = median(_seconds(copy) for _ in range(5))
        print(f"one copy of the state in host memory: {copy_s:.3f} s")
        load_s = median(_seconds(lambda: load_checkpoint(trainer, Path(place))) for _ in range(3))
        print(f"loading, every byte checked: {load_s:.3f} s ({size / load_s / 2**30:.2f} GiB/s)")
        shutil.rmtree(place, ignore_errors=True)
        Path(place).mkdir()


def _report(
    name: str, trainer: Trainer, batch: TokenBatch, saver: CheckpointSaver, rounds: int, save_every: int
) -> None:
    plain, saving, blocked = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        for with_save in (False, True) if number % 2 else (True, False):
            saver.finish()
            begin = time.perf_counter()
            if with_save:  # its writing goes on beside the steps
                blocked.append(_seconds(lambda: saver.save(trainer)))
            for _ in range(save_every):
                trainer.step([batch])
            if number:  # the first round warms up
                (saving if with_save else plain).append(time.perf_counter() - begin)
    saver.finish()
    alone, beside = median(plain), median(saving)
    print(
        f"{name}: {save_every} steps {alone:.3f} s alone, {beside:.3f} s with a save "
        f"({100 * (beside / alone - 1):+.1f} %, rounds "
        f"{', '.join(f'{100 * (b / a - 1):+.1f}' for a, b in zip(plain, saving, strict=True))}); "
        f"it blocked for {median(blocked[1:]):.3f} s, a step takes {alone / save_every:.3f} s",
        flush=True,
    )


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

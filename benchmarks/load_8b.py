"""What loading an 8B model takes: bf16 weights of a folder into the disk tier, on the processor.

``python benchmarks/load_8b.py [--disk FOLDER]`` makes a folder of Llama 3.1 8B's shape whose values are holes (16 GB
that take no disk) and lets a fresh process load it: embedding and head onto the device, blocks into files of the disk
tier (14 GB, freed at the end). Reading holes takes no disk: the seconds are those of checking, copying and writing.

Prints the largest resident memory of the process, how much of it stands for a card's memory here (the ledger's device
bytes), and the rest, which is what a machine with a card needs. Marks at both ends of every tensor must arrive.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.build import build_model
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import MixedPrecision, WeightStreaming
from hybridtrain.plan.compose import compose
from hybridtrain.plan.placement import Placement
from hybridtrain.tensor_file import TensorFileWriter
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.weights.disk_names import disk_weights
from hybridtrain.weights.exact_values import exact_values
from hybridtrain.weights.hf_source import INDEX, open_folder

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, max_seq_len=8192, num_blocks=32, width=4096, num_heads=32, num_kv_heads=8,
    ffn_width=14336, rope_theta=500000.0,
)  # fmt: skip
STACK = (MixedPrecision(master="absent"), WeightStreaming(tier="disk", max_active_layers=1, prefetch_distance=0))
"""One slot: what loading needs at least. A second one, as training has it, is another 0.44 GB of the device."""
MARK = 3.0


def make_folder(folder: Path, shape: ModelConfig) -> None:
    """Write headers and marks; the rest of each file is a hole."""
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for ours, weight in disk_weights(build_model(shape, torch.bfloat16, torch.device("meta"))).items():
        block = ours.split(".")[1] if ours.startswith("block.") else "ends"
        shards.setdefault(f"model-{block}.safetensors", []).extend((name, weight.shape) for name in weight.names)
    mark = torch.full((1,), MARK, dtype=torch.bfloat16)
    for shard, tensors in shards.items():
        entries = [(name, size, torch.bfloat16) for name, size in tensors]
        with closing(TensorFileWriter(folder / shard, entries)) as writer:
            for name, size in tensors:
                for place in (0, torch.Size(size).numel() - 1):
                    writer.write(name, place, mark)
    index = {"weight_map": {name: shard for shard, tensors in shards.items() for name, _ in tensors}}
    (folder / INDEX).write_text(json.dumps(index))


def load(folder: Path, disk: Path, shape: ModelConfig) -> None:
    """Load, and print what it took as JSON; then look for the marks."""
    imported_bytes = _peak_rss_bytes()
    ledger = StorageLedger(record=False)
    start = time.perf_counter()
    source = open_folder(folder, shape)
    checked_s = time.perf_counter() - start
    with closing(DirectTransfer(torch.device("cpu"), disk_folder=disk)) as transfer, torch.no_grad():
        with ledger:
            trainer = Trainer(shape, compose(STACK), TrainerConfig(), transfer, ledger, source=source)
        loaded_s = time.perf_counter() - start
        peak_bytes, disk_bytes = _peak_rss_bytes(), transfer.tiers.peak_bytes(Placement.DISK)
        marks = _marks(trainer)
    found = {
        "peak_rss_bytes": peak_bytes, "device_bytes": ledger.peak_bytes, "rest_bytes": peak_bytes - ledger.peak_bytes,
        "imported_bytes": imported_bytes, "disk_tier_bytes": disk_bytes, "checked_s": round(checked_s, 1),
        "loaded_s": round(loaded_s, 1), "marks": marks,
    }  # fmt: skip
    print(json.dumps(found, indent=2))


def _marks(trainer: Trainer) -> float:
    """Return the share of the planted values that the trainer holds."""
    total = sum(float(value_P.sum()) for _, _, value_P in exact_values(trainer))
    return total / (2 * MARK * sum(1 for _ in trainer.model.named_unit_parameters()))


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Make the folder, load it in a process of its own, tell what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=LLAMA_8B.num_blocks)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = replace(LLAMA_8B, num_blocks=arguments.blocks)
    if arguments.load is not None:
        load(arguments.load, arguments.disk, shape)
        return
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        make_folder(Path(folder), shape)
        command = [
            sys.executable,
            __file__,
            "--load",
            folder,
            "--disk",
            str(arguments.disk),
            "--blocks",
            str(shape.num_blocks),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    print(done.stdout)


if __name__ == "__main__":
    main()

"""One checkpoint, written at once."""

from pathlib import Path

from hybridtrain.checkpoint import CheckpointSaver
from hybridtrain.config.encode import JsonMapping
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.trainer import Trainer


def save_checkpoint(
    trainer: Trainer, folder: Path, hybrid: HybridTrainer | None = None, data: JsonMapping | None = None
) -> None:
    """Save a trainer, and wait until the disk has it."""
    with CheckpointSaver(folder) as saver:
        saver.save(trainer, hybrid, data)

"""Saving and resuming a run: a folder of checkpoints, each a manifest with tensor files, written atomically."""

from hybridtrain.checkpoint.load import load_checkpoint
from hybridtrain.checkpoint.saver import CheckpointSaver

__all__ = ["CheckpointSaver", "load_checkpoint"]

"""Saving and resuming a run: a folder of checkpoints, each a manifest beside files of tensors, complete or absent."""

from hybridtrain.checkpoint.load import load_checkpoint
from hybridtrain.checkpoint.saver import CheckpointSaver

__all__ = ["CheckpointSaver", "load_checkpoint"]

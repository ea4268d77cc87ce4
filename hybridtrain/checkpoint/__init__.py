"""Saving and resuming a run: a folder of generations, each a manifest beside files of tensors, whole or not there."""

from hybridtrain.checkpoint.load import load_checkpoint
from hybridtrain.checkpoint.saver import CheckpointSaver

__all__ = ["CheckpointSaver", "load_checkpoint"]

"""Saving and resuming a run: a folder of generations, each a manifest beside files of tensors, whole or not there."""

from hybridtrain.checkpoint.load import load_checkpoint
from hybridtrain.checkpoint.saver import CheckpointSaver, save_checkpoint

__all__ = ["CheckpointSaver", "load_checkpoint", "save_checkpoint"]

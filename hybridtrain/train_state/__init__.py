"""Saving and resuming a run: a folder of generations, each a manifest beside files of tensors, whole or not there.

Two functions: ``save_train_state`` and ``load_train_state``; ``StateSaver`` is the first one done beside the training.
"""

from hybridtrain.train_state.load import load_train_state
from hybridtrain.train_state.saver import StateSaver, save_train_state

__all__ = ["StateSaver", "load_train_state", "save_train_state"]

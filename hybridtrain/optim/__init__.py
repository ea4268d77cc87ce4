"""Optimizers: one file each. A setting of training; how their state is stored is a setting of memory."""

from collections.abc import Mapping

from hybridtrain.optim.adafactor import Adafactor
from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.ademamix import AdEMAMix
from hybridtrain.optim.lion import Lion
from hybridtrain.optim.muon import Muon
from hybridtrain.optim.optimizer import Optimizer

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    optimizer.kind: optimizer for optimizer in (AdamWConfig, AdEMAMix, Adafactor, Lion, Muon)
}
"""By ``kind``; ``adamw`` where a file names none."""

__all__ = ["OPTIMIZERS", "AdEMAMix", "Adafactor", "AdamWConfig", "Lion", "Muon", "Optimizer"]

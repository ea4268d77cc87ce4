"""hybridtrain: train 1B to 50B models on one consumer card, and know before the run whether it fits.

    compose           a stack of optimizations becomes a checked memory plan
    dry_run           plan one training step on a virtual card: bytes, seconds, does it fit
    fit               find training options for a model and a card: which fit, how fast
    recommend         find the fastest stack that fits a card and a machine
    estimate_memory   plan a training step of any torch model: memory, does it fit, largest batch
    VirtualGpu        run unmodified training code on a virtual card
    Trainer           the reference trainer: real steps under the same plan
    load_config       a training file: model, stack, optimizer, schedule
    find_model        return a model's shape by preset, file, Hugging Face folder or hub id
    open_folder       the weights of such a folder, a Trainer's ``source``; export_folder writes one

>>> from hybridtrain import Workload, compose, dry_run, find_card, model_preset
>>> from hybridtrain.optimizations import GradientCheckpointing, Int8Optimizer
>>> plan = compose([GradientCheckpointing(recompute_every=1), Int8Optimizer()])
>>> run = dry_run(
...     model_preset("gpt2-small"), plan, find_card("rtx-4090"), Workload(micro_batch_size=1, seq_len=128), num_steps=1
... )
>>> run.fits
True

Imports are lazy. examples/ has a script for each name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridtrain.memory.transfer import DirectTransfer as DirectTransfer
    from hybridtrain.models.find_model import find_model as find_model
    from hybridtrain.models.model_config import ModelConfig as ModelConfig
    from hybridtrain.models.model_config import Workload as Workload
    from hybridtrain.models.model_config import model_preset as model_preset
    from hybridtrain.plan.compose import compose as compose
    from hybridtrain.plan.memory_plan import MemoryPlan as MemoryPlan
    from hybridtrain.planning.candidates import FitRequest as FitRequest
    from hybridtrain.planning.dry_runs import DryRun as DryRun
    from hybridtrain.planning.dry_runs import dry_run as dry_run
    from hybridtrain.planning.fitting import TrainingOption as TrainingOption
    from hybridtrain.planning.fitting import fit as fit
    from hybridtrain.planning.fitting import recommend as recommend
    from hybridtrain.trainer import Trainer as Trainer
    from hybridtrain.trainer_config import TrainerConfig as TrainerConfig
    from hybridtrain.training_file import TrainFile as TrainFile
    from hybridtrain.training_file import load_config as load_config
    from hybridtrain.virtual_gpu import VirtualGpu as VirtualGpu
    from hybridtrain.virtual_gpu import estimate_memory as estimate_memory
    from hybridtrain.virtual_gpu import find_card as find_card
    from hybridtrain.weights.export import export_folder as export_folder
    from hybridtrain.weights.hf_source import open_folder as open_folder

_NAMES = {
    "planning.candidates": ("FitRequest",),
    "planning.dry_runs": ("DryRun", "dry_run"),
    "planning.fitting": ("TrainingOption", "fit", "recommend"),
    "memory.transfer": ("DirectTransfer",),
    "models.find_model": ("find_model",),
    "models.model_config": ("ModelConfig", "Workload", "model_preset"),
    "plan.compose": ("compose",),
    "plan.memory_plan": ("MemoryPlan",),
    "trainer": ("Trainer",),
    "trainer_config": ("TrainerConfig",),
    "training_file": ("TrainFile", "load_config"),
    "virtual_gpu": ("VirtualGpu", "estimate_memory", "find_card"),
    "weights.export": ("export_folder",),
    "weights.hf_source": ("open_folder",),
}
_OLD_NAMES = {"Question": "FitRequest", "Way": "TrainingOption"}
"""Still there for a version."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    name = _OLD_NAMES.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)

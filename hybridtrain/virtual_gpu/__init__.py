"""A card that need not exist: what PyTorch code takes of it, and how long a step lasts. It knows of no trainer.

    VirtualGpu         PyTorch code that believes it has CUDA, unmodified; ``report()`` says what the card would do
    estimate_memory    the same for a model and a batch, in one call
    StorageLedger      counts every storage, from its allocation to its release: a LedgerTrace
    replay_on_card     a trace through a model of torch's caching allocator: allocated, active, reserved, out of memory
    estimate_step      the time of a step, by a roofline with lanes for copies, processor and disk
    CachingAllocator   that model by itself: malloc and free
    find_card, Card    the catalogue (hardware.toml: a table for each card), or any card in a TOML file
    build_snapshot     a memory snapshot for https://pytorch.org/memory_viz; ``build_trace`` one for Perfetto

Nothing here is imported before it is asked for: what a tensor is for (``TensorClass``) can be said without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridtrain.virtual_gpu.allocator import AllocatorOutOfMemory as AllocatorOutOfMemory
    from hybridtrain.virtual_gpu.allocator import CachingAllocator as CachingAllocator
    from hybridtrain.virtual_gpu.allocator_config import AllocatorConfig as AllocatorConfig
    from hybridtrain.virtual_gpu.card import Card as Card
    from hybridtrain.virtual_gpu.card import FitVerdict as FitVerdict
    from hybridtrain.virtual_gpu.card import Host as Host
    from hybridtrain.virtual_gpu.card import card_catalogue as card_catalogue
    from hybridtrain.virtual_gpu.card import find_card as find_card
    from hybridtrain.virtual_gpu.card_run import CardRun as CardRun
    from hybridtrain.virtual_gpu.estimate import MemoryEstimate as MemoryEstimate
    from hybridtrain.virtual_gpu.estimate import estimate_memory as estimate_memory
    from hybridtrain.virtual_gpu.ledger import LedgerTrace as LedgerTrace
    from hybridtrain.virtual_gpu.ledger import StorageLedger as StorageLedger
    from hybridtrain.virtual_gpu.ledger import find_peak as find_peak
    from hybridtrain.virtual_gpu.links import Collective as Collective
    from hybridtrain.virtual_gpu.links import Link as Link
    from hybridtrain.virtual_gpu.links import find_link as find_link
    from hybridtrain.virtual_gpu.op_rules import register_scratch as register_scratch
    from hybridtrain.virtual_gpu.replay import Replay as Replay
    from hybridtrain.virtual_gpu.replay import StepMemory as StepMemory
    from hybridtrain.virtual_gpu.replay import replay_on_card as replay_on_card
    from hybridtrain.virtual_gpu.replay import replay_trace as replay_trace
    from hybridtrain.virtual_gpu.roofline import StepTime as StepTime
    from hybridtrain.virtual_gpu.roofline import estimate_step as estimate_step
    from hybridtrain.virtual_gpu.snapshot import build_snapshot as build_snapshot
    from hybridtrain.virtual_gpu.snapshot import write_snapshot as write_snapshot
    from hybridtrain.virtual_gpu.stand_in import DataDependentError as DataDependentError
    from hybridtrain.virtual_gpu.stand_in import StandIn as StandIn
    from hybridtrain.virtual_gpu.tensor_class import TensorClass as TensorClass
    from hybridtrain.virtual_gpu.trace import build_trace as build_trace
    from hybridtrain.virtual_gpu.trace import write_trace as write_trace
    from hybridtrain.virtual_gpu.virtual_gpu import VirtualGpu as VirtualGpu

_NAMES = {
    "allocator": ("AllocatorOutOfMemory", "CachingAllocator"),
    "allocator_config": ("AllocatorConfig",),
    "card": ("Card", "Host", "FitVerdict", "card_catalogue", "find_card"),
    "card_run": ("CardRun",),
    "estimate": ("MemoryEstimate", "estimate_memory"),
    "ledger": ("LedgerTrace", "StorageLedger", "find_peak"),
    "links": ("Collective", "Link", "find_link"),
    "op_rules": ("register_scratch",),
    "replay": ("Replay", "StepMemory", "replay_on_card", "replay_trace"),
    "roofline": ("StepTime", "estimate_step"),
    "snapshot": ("build_snapshot", "write_snapshot"),
    "stand_in": ("DataDependentError", "StandIn"),
    "tensor_class": ("TensorClass",),
    "trace": ("build_trace", "write_trace"),
    "virtual_gpu": ("VirtualGpu",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)

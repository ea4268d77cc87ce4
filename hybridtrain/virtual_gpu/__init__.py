"""A virtual card: memory and step time of any PyTorch code. Independent of the trainer.

    VirtualGpu         runs unmodified CUDA code of PyTorch; ``report()`` returns the card's memory and time
    estimate_memory    the same for a model and a batch, in one call
    StorageLedger      counts every storage, from its allocation to its release: a LedgerTrace
    replay_on_card     replays a trace in a model of torch's caching allocator: allocated, active, reserved, out of
    memory estimate_step      the time of a step, by a roofline with lanes for copies, processor and disk
    CachingAllocator   that model by itself: malloc and free find_card, Card    the catalogue (hardware.toml: a table
    for each card), or any card in a TOML file build_snapshot     a memory snapshot for https://pytorch.org/memory_viz;
    ``build_trace`` one for Perfetto

Imports are lazy; ``TensorClass`` does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridtrain.virtual_gpu.account.ledger import LedgerTrace as LedgerTrace
    from hybridtrain.virtual_gpu.account.ledger import StorageLedger as StorageLedger
    from hybridtrain.virtual_gpu.account.ledger import find_peak as find_peak
    from hybridtrain.virtual_gpu.account.op_rules import register_scratch as register_scratch
    from hybridtrain.virtual_gpu.account.tensor_class import TensorClass as TensorClass
    from hybridtrain.virtual_gpu.account.trace import build_trace as build_trace
    from hybridtrain.virtual_gpu.account.trace import write_trace as write_trace
    from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory as AllocatorOutOfMemory
    from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator as CachingAllocator
    from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig as AllocatorConfig
    from hybridtrain.virtual_gpu.allocator.replay import Replay as Replay
    from hybridtrain.virtual_gpu.allocator.replay import StepMemory as StepMemory
    from hybridtrain.virtual_gpu.allocator.replay import replay_on_card as replay_on_card
    from hybridtrain.virtual_gpu.allocator.replay import replay_trace as replay_trace
    from hybridtrain.virtual_gpu.allocator.snapshot import build_snapshot as build_snapshot
    from hybridtrain.virtual_gpu.allocator.snapshot import write_snapshot as write_snapshot
    from hybridtrain.virtual_gpu.cards.card import Card as Card
    from hybridtrain.virtual_gpu.cards.card import FitVerdict as FitVerdict
    from hybridtrain.virtual_gpu.cards.card import Host as Host
    from hybridtrain.virtual_gpu.cards.card import card_catalogue as card_catalogue
    from hybridtrain.virtual_gpu.cards.card import find_card as find_card
    from hybridtrain.virtual_gpu.cards.links import Collective as Collective
    from hybridtrain.virtual_gpu.cards.links import Link as Link
    from hybridtrain.virtual_gpu.cards.links import find_link as find_link
    from hybridtrain.virtual_gpu.cards.roofline import StepTime as StepTime
    from hybridtrain.virtual_gpu.cards.roofline import estimate_step as estimate_step
    from hybridtrain.virtual_gpu.facade.card_run import CardRun as CardRun
    from hybridtrain.virtual_gpu.facade.estimate import MemoryEstimate as MemoryEstimate
    from hybridtrain.virtual_gpu.facade.estimate import estimate_memory as estimate_memory
    from hybridtrain.virtual_gpu.facade.placeholders import DataDependentError as DataDependentError
    from hybridtrain.virtual_gpu.facade.placeholders import PlaceholderUse as PlaceholderUse
    from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu as VirtualGpu

_NAMES = {
    "allocator.allocator": ("AllocatorOutOfMemory", "CachingAllocator"),
    "allocator.allocator_config": ("AllocatorConfig",),
    "cards.card": ("Card", "Host", "FitVerdict", "card_catalogue", "find_card"),
    "facade.card_run": ("CardRun",),
    "facade.estimate": ("MemoryEstimate", "estimate_memory"),
    "account.ledger": ("LedgerTrace", "StorageLedger", "find_peak"),
    "cards.links": ("Collective", "Link", "find_link"),
    "account.op_rules": ("register_scratch",),
    "allocator.replay": ("Replay", "StepMemory", "replay_on_card", "replay_trace"),
    "cards.roofline": ("StepTime", "estimate_step"),
    "allocator.snapshot": ("build_snapshot", "write_snapshot"),
    "facade.placeholders": ("DataDependentError", "PlaceholderUse"),
    "account.tensor_class": ("TensorClass",),
    "account.trace": ("build_trace", "write_trace"),
    "facade.virtual_gpu": ("VirtualGpu",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)

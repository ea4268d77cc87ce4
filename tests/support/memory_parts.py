"""What the stores of the memory layer are built from in tests of one of them alone."""

from collections.abc import Sequence

import torch

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.transfer import DirectTransfer, Transfer
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.virtual_gpu.account.observer import MemoryObserver, NullObserver


def direct() -> DirectTransfer:
    """Return the CPU as device."""
    return DirectTransfer(torch.device("cpu"))


def new_copies(transfer: Transfer | None = None, observer: MemoryObserver | None = None) -> CopyEngine:
    """Return a copy engine on the CPU that nobody watches, unless told otherwise."""
    return CopyEngine(transfer or direct(), observer or NullObserver())


def plan_of(stack: Sequence[Optimization]) -> PhasePlan:
    """Return the table of ordinary training."""
    return compose(stack).for_phase(Phase.FULL)

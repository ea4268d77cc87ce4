"""A stack of a test that says which optimizer it is trained with, beside its optimizations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hybridtrain.optim import Adafactor, Optimizer
from hybridtrain.plan.claim import Claim
from hybridtrain.plan.compose import Optimization
from hybridtrain.trainer_config import TrainerConfig


@dataclass(frozen=True)
class WithOptimizer:
    """Claims nothing."""

    kind: ClassVar[str] = "with_optimizer"

    optimizer: Optimizer

    def claims(self) -> Iterable[Claim]:
        """Return nothing: how state is stored is another's business."""
        return ()


def settings_of(stack: Sequence[Optimization], settings: TrainerConfig) -> TrainerConfig:
    """Return settings with the stack's optimizer at their learning rate, decay and clipping."""
    for part in stack:
        if isinstance(part, WithOptimizer):
            common = {
                name: getattr(settings.optimizer, name) for name in ("lr", "weight_decay", "max_grad_norm", "clip")
            }
            return replace(settings, optimizer=replace(part.optimizer, **common))
    return settings


ADAFACTOR = WithOptimizer(Adafactor())

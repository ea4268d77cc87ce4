"""torchvision's compiled ops: where its wheel brings none, they are declared, so that its import succeeds."""

import sys
from importlib import import_module

import torch

_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]


def declare_torchvision_ops() -> None:
    """Declare them, where an import shows that they are missing; none of them runs here."""
    try:
        import_module("torchvision")
    except RuntimeError:  # an op that torchvision registers a rule for does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

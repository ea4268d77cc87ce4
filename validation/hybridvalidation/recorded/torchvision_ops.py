"""Declares the operators that torchvision expects of its compiled part, which does not load beside torch for the CPU.

Peers import torchvision for pictures and augmentations; no run that is planned here calls these operators.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]


def declare() -> None:
    """Let ``import torchvision`` succeed."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

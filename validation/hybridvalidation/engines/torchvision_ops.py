"""torchvision's compiled ops, which need CUDA: declared, so that its import succeeds; none of them runs here."""

import torch

_TORCHVISION = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]


def declare_torchvision_ops() -> None:
    """Declare them, where no one has."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

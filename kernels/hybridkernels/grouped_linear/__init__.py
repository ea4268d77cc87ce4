"""One linear layer an expert, over rows sorted by expert."""

from hybridkernels.grouped_linear.op import grouped_linear

__all__ = ["grouped_linear"]

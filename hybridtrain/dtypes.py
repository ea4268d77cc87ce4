"""dtype names as written in configuration files, and their torch counterparts."""

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a configuration name; raises ``KeyError`` for an unknown one."""
    return TORCH_DTYPES[name]

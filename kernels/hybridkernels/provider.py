"""The choice of an op's implementation on this card: the fastest measured one, else a default order.

``choices.toml`` holds one row per op and card, written by ``hybridtrain bench kernels --choose`` from measurements.
Without a row an op uses the first implementation of its default order that can run; established libraries come before
ours, which was not measured.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files

import torch

from hybridkernels.triton_launch import cuda_backend

_forced: dict[str, str] = {}


def chosen_provider(op: str, available: Sequence[str], device: torch.device) -> str:
    """Return the name of the implementation to run.

    Args:
        op: Name of the op, with a class of shapes where the choice depends on it, as ``causal_attention/head64``.
        available: Implementations that can run here, in the order to take without a measurement; not empty.
        device: A CUDA device.

    Raises:
        ValueError: the forced implementation cannot run here.
    """
    forced = _forced.get(op)
    if forced is not None:
        if forced not in available:
            raise ValueError(f"{op}: '{forced}' cannot run here; allowed: {', '.join(available)}")
        return forced
    measured = _choices().get((op, torch.cuda.get_device_name(device)))
    return measured if measured is not None and measured in available else available[0]


def takes_triton(op: str, device: torch.device, *, fits: bool = True) -> bool:
    """Return whether an op with a Triton kernel and a version in torch's own ops runs the former on a CUDA device.

    ``fits`` says whether the kernel takes these inputs at all.
    """
    available = ("triton", "torch") if fits and cuda_backend() == "triton" else ("torch",)
    return chosen_provider(op, available, device) == "triton"


@contextmanager
def use_provider(op: str, provider: str) -> Iterator[None]:
    """Force one implementation of an op within a ``with`` block, for benchmarks and tests; not for threads."""
    before = _forced.get(op)
    _forced[op] = provider
    try:
        yield
    finally:
        del _forced[op]
        if before is not None:
            _forced[op] = before


@cache
def _choices() -> dict[tuple[str, str], str]:
    """Return the provider by op and card name."""
    text = files("hybridkernels").joinpath("choices.toml").read_text(encoding="utf-8")
    return {(row["op"], row["card"]): row["provider"] for row in tomllib.loads(text).get("choice", [])}

"""Registration of ops with torch.library, and of their CUDA versions."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybridkernels.provider import takes_triton

Function = Callable[..., Any]


def define_op(
    name: str,
    plain: Function,
    *,
    cuda: Function | None = None,
    fake: Function = lambda *_: None,
    mutates: Sequence[str] = (),
    schema: str | None = None,
    flops: Function | None = None,
) -> Any:
    """Register ``hybridkernels::{name}`` and return it, a ``CustomOpDef`` of torch.

    Args:
        name: Name of the op.
        plain: Implementation for the CPU, and for all devices without ``cuda``.
        cuda: Implementation for CUDA.
        fake: Returns empty outputs of the right sizes; default: for in-place ops.
        mutates: Arguments that it modifies.
        schema: Types in torch's syntax; None: from the annotations of ``plain``.
        flops: FLOP formula of shapes, for torch's counter.
    """
    devices, full_name = None if cuda is None else "cpu", f"hybridkernels::{name}"
    op = torch.library.custom_op(full_name, plain, mutates_args=mutates, device_types=devices, schema=schema)
    op.register_fake(fake)
    if cuda is not None:
        op.register_kernel("cuda", cuda)
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula  # noqa: PLC0415  its import takes 0.1 s

        register_flop_formula(getattr(torch.ops.hybridkernels, name))(flops)
    return op


def triton_or_fallback(plain: Function, launcher: str, *, key: str = "", fits: Function = lambda *_: True) -> Function:
    """Return an op's CUDA implementation: its Triton launcher if that runs, else the plain one.

    Args:
        plain: Implementation by torch ops; its first argument is a tensor, or a list of tensors.
        launcher: Folder and function, for example ``nf4.nf4_dequantize_triton``, with the arguments of ``plain``.
        key: Name of the op in choices.toml; empty: the launcher's without ``_triton``.
        fits: Whether the launcher supports the arguments.
    """
    folder, _, function = launcher.partition(".")
    key = key or function.removesuffix("_triton")

    def cuda(*args: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        if not takes_triton(key, first.device, fits=fits(*args)):
            return plain(*args)
        return getattr(import_module(f"hybridkernels.{folder}.triton_kernel"), function)(*args)

    return cuda


def empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return uninitialized contiguous tensors like each input, as outputs of a fake."""
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


def describe(*tensors: Tensor) -> str:
    """Describe dtype, shape and device of tensors, for messages."""
    return ", ".join(f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)

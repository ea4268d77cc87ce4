"""Liger's kernels as providers, where the package is installed."""

from importlib import import_module

import torch
from torch import Tensor

from hybridvalidation.kernel_bench.case import Function, Inputs, Mode, Provider, Run, needs_package, trained


def liger(module: str, function: str, *args: object) -> Tensor:
    """Return what an autograd function of Liger gives; of several outputs the first."""
    found = getattr(import_module(f"liger_kernel.ops.{module}"), function).apply(*args)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def liger_provider(function: Function, mode: Mode, device: torch.device) -> Provider:
    """Return the provider of a function that calls Liger; on copies: its backward passes write over their inputs."""
    setup = trained(function, mode)

    def copied_setup(inputs: Inputs) -> Run:
        args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in inputs.args)
        return setup(Inputs(args, None if inputs.grad is None else inputs.grad.clone()))

    return Provider(name="liger", setup=copied_setup, missing=needs_package("liger_kernel", device))

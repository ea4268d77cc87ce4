"""A benchmark case of a kernel: one op at one shape, by every provider, compared with one definition.

``make_inputs`` allocates on the device. A provider's ``setup`` returns a callable without arguments that runs once and
returns the result: the first call is checked, later ones are timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor

from hybridkernels.provider import use_provider
from hybridkernels.triton_launch import cuda_backend
from hybridtrain.models.model_config import ModelConfig, model_preset

_NOBODY = "nobody"
"""Name of a provider that no op has."""


class Mode(StrEnum):
    """Pass of training in which an op is measured."""

    FORWARD = "forward"
    """Forward pass as in training: what the backward pass needs is saved."""
    BACKWARD = "backward"
    BOTH = "both"


class Clock(StrEnum):
    """Clock of a measurement."""

    DEVICE = "device"
    """From the op's first kernel to its last; launch times are hidden, as in a long queue."""
    WALL = "wall"
    """From the call to the result, launches included: relevant for few small kernels."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of an op, and the gradient of its output."""

    args: tuple[Tensor, ...]
    """Arguments; those that require a gradient get one."""
    grad: Tensor | None = None
    """Gradient of the output; None for a scalar output and for ops without a backward pass."""


Tensors: TypeAlias = tuple[Tensor, ...]
Run: TypeAlias = Callable[[], Tensors]
Setup: TypeAlias = Callable[[Inputs], Run]
Function: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One implementation."""

    name: str
    setup: Setup
    is_ours: bool = False
    """Whether the implementation is this project's."""
    is_choosable: bool = False
    """Whether the op itself can choose it by this name."""
    missing: str = ""
    """Reason why it cannot run here; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One op at one shape in one mode."""

    op: str
    key: str
    """Name of op and shape class in choices.toml."""
    shape: str
    """Source of the shape, for example ``gpt2-1b B4 T1024``."""
    dtype: str
    mode: Mode
    num_bytes: int
    """Least traffic in bytes (arithmetic): inputs read once, outputs written once."""
    flops: int
    """Least arithmetic in FLOP, without recomputation."""
    uses_tensor_cores: bool = False
    """Whether the arithmetic is 16-bit matmuls."""
    clock: Clock = Clock.DEVICE
    make_inputs: Callable[[torch.device], Inputs]
    exact: Setup
    """The definition, in wider arithmetic."""
    same_dtype: Setup
    """The plain torch formula in the case's dtype."""
    checked_calls: int = 1
    """Calls before the check: in-place updates show errors after a few."""
    floor: float | None = None
    """Least tolerance, over the largest value; None: one rounding to the output's dtype."""
    seen: Callable[[Tensors], Tensors] = tuple
    """Selects the judged outputs; each tensor is judged by its own largest value."""
    providers: tuple[Provider, ...]

    @property
    def name(self) -> str:
        """Name of the case in messages."""
        return f"{self.op} {self.shape} {self.dtype} {self.mode}"


def trained(function: Function, mode: Mode) -> Setup:
    """Return the setup of a differentiable op with one output."""

    def setup(inputs: Inputs) -> Run:
        leaves = [arg for arg in inputs.args if arg.requires_grad]
        if mode is Mode.FORWARD:
            return lambda: (function(*inputs.args).detach(),)
        if mode is Mode.BACKWARD:
            kept = function(*inputs.args)
            return lambda: torch.autograd.grad(kept, leaves, inputs.grad, retain_graph=True)

        def both() -> Tensors:
            out = function(*inputs.args)
            return (out.detach(), *torch.autograd.grad(out, leaves, inputs.grad))

        return both

    return setup


def writing(work: Callable[[], object], *outputs: Tensor) -> Run:
    """Return a call of an in-place op, with the tensors that it writes."""

    def run() -> Tensors:
        work()
        return outputs

    return run


def widened(setup: Setup, dtype: torch.dtype) -> Setup:
    """Return a setup that works on copies of the inputs in ``dtype``."""

    def wide(tensor: Tensor) -> Tensor:
        is_exact = not tensor.is_floating_point()
        return tensor if is_exact else tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    def wide_setup(inputs: Inputs) -> Run:
        grad = None if inputs.grad is None else wide(inputs.grad)
        return setup(Inputs(tuple(wide(arg) for arg in inputs.args), grad))

    return wide_setup


def forced(key: str, provider: str, setup: Setup) -> Setup:
    """Return a setup that forces a provider of an op, and checks that the op uses it.

    Raises:
        RuntimeError: (the returned setup) the op made no choice of provider, so another one would be timed.
    """

    def forced_setup(inputs: Inputs) -> Run:
        with use_provider(key, _NOBODY):
            try:
                setup(inputs)()
            except ValueError as error:
                if _NOBODY not in str(error):
                    raise
            else:
                raise RuntimeError(f"the op makes no choice of provider for '{key}', so '{provider}' cannot be forced")
        with use_provider(key, provider):
            run = setup(inputs)

        def forced_run() -> Tensors:
            with use_provider(key, provider):
                return run()

        return forced_run

    return forced_setup


def own_providers(
    key: str, setup: Setup, device: torch.device, *, others: Sequence[str] = ("torch",)
) -> tuple[Provider, ...]:
    """Return the providers that an op chooses from on CUDA, and its only one on the CPU.

    ``key``: the op in choices.toml. ``others``: providers besides ``triton``.
    """
    providers = [
        Provider(name=name, setup=forced(key, name, setup), is_choosable=True, missing=needs_card(device))
        for name in ("triton", *others)
    ]
    if device.type != "cuda":
        return (*providers, Provider(name="cpu", setup=setup, is_ours=True))
    return (replace(providers[0], is_ours=True, missing=needs_triton()), *providers[1:])


def needs_card(device: torch.device) -> str:
    """Return why a CUDA provider cannot run; empty: it can."""
    return "" if device.type == "cuda" else "needs a CUDA card"


def needs_triton() -> str:
    """Return why Triton kernels cannot run here; empty: they can."""
    return "" if cuda_backend() == "triton" else "Triton cannot run kernels here"


def needs_package(package: str, device: torch.device) -> str:
    """Return why a CUDA package's provider cannot run; the package is not imported."""
    try:
        is_there = find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent
        is_there = False
    return needs_card(device) if is_there else f"{package} is not installed"


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """A model with a micro-batch."""

    model: str
    batch: int
    seq_len: int

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return model_preset(self.model)

    @property
    def name(self) -> str:
        """Name, for example ``gpt2-1b B4 T1024``."""
        return f"{self.model} B{self.batch} T{self.seq_len}"

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.batch * self.seq_len


def _full(model: str, batch: int) -> ModelBatch:
    return ModelBatch(model, batch, model_preset(model).max_seq_len)


_CARD = (_full("llama-7b", 2), _full("gpt2-1b", 4), _full("llama-1b", 4), _full("gpt2-small", 8))
"""Workloads by priority: 7B and 1B models of the scenarios, head dims 64 and 128, grouped and not."""
_CPU = (ModelBatch("gpt2-small", 1, 64), ModelBatch("llama-1b", 1, 64))
"""Workloads for a small CPU, the smaller one first."""


def model_batches(device: torch.device, *, family: str = "", quick: bool = False) -> tuple[ModelBatch, ...]:
    """Return the workloads of a device, of one model family if given; ``quick``: only the first."""
    of_device = _CARD if device.type == "cuda" else _CPU
    batches = tuple(workload for workload in of_device if family in {"", workload.config.family})
    return batches[:1] if quick else batches


class InputMaker:
    """Makes random tensors on a device, equal for all providers of a case; ``dtype`` is the default dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(20)

    def normal(self, *shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers."""
        made = torch.randn(shape, generator=self._generator, device=self._device).mul_(scale)
        return made.to(dtype or self._dtype).requires_grad_(grad)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        """Return float32 numbers without a gradient."""
        made = torch.rand(shape, generator=self._generator, device=self._device)
        return made.mul_(high - low).add_(low)

    def integers(self, *shape: int, below: int) -> Tensor:
        """Return int64 numbers from 0."""
        return torch.randint(below, shape, generator=self._generator, device=self._device)

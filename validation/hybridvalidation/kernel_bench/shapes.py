"""Canonical shapes: models of the catalogue with a batch; small ones where there is no card."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridtrain.models.model_config import ModelConfig, model_preset


@dataclass(frozen=True, slots=True)
class Workload:
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
        """As ``gpt2-1b B4 T1024``."""
        return f"{self.model} B{self.batch} T{self.seq_len}"

    @property
    def num_tokens(self) -> int:
        """Of the micro-batch."""
        return self.batch * self.seq_len


def _full(model: str, batch: int) -> Workload:
    return Workload(model, batch, model_preset(model).max_seq_len)


_CARD = (_full("llama-7b", 2), _full("gpt2-1b", 4), _full("llama-1b", 4), _full("gpt2-small", 8))
"""The most valuable first: 7B and 1B models of the scenarios, heads of 64 and 128, grouped and not."""
_CPU = (Workload("gpt2-small", 1, 64), Workload("llama-1b", 1, 64))
"""Small enough for two processors, the smaller one first."""


def workloads(device: torch.device, *, family: str = "", quick: bool = False) -> tuple[Workload, ...]:
    """Return the workloads of a device, of one model family if named; ``quick`` leaves the first."""
    of_device = _CARD if device.type == "cuda" else _CPU
    found = tuple(workload for workload in of_device if family in {"", workload.config.family})
    return found[:1] if quick else found


def block_params(config: ModelConfig) -> int:
    """Return the parameters of one block."""
    return replace(config, num_blocks=2).num_params - replace(config, num_blocks=1).num_params


class Maker:
    """Makes random tensors, the same ones for every provider of a case.

    Args:
        device: Where tensors go.
        dtype: Of those that name none.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(20)

    def normal(self, *shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers."""
        made = torch.randn(shape, generator=self._generator, device=self._device).mul_(scale)
        return made.to(dtype or self._dtype).requires_grad_(grad)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        """Return float32 numbers without a gradient."""
        made = torch.rand(shape, generator=self._generator, device=self._device)
        return made.mul_(high - low).add_(low)

    def integers(self, *shape: int, below: int) -> Tensor:
        """Return int64 numbers from 0."""
        return torch.randint(below, shape, generator=self._generator, device=self._device)

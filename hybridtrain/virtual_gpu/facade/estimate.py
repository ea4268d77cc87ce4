"""Memory and time of any model's training step on a card, in one call (API of pytorch/rfcs#108)."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.reserved_range import ReservedRange, reserved_range
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict, find_card
from hybridtrain.virtual_gpu.facade.card_run import CardRun
from hybridtrain.virtual_gpu.facade.placeholders import PlaceholderUse
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

Batch = Mapping[str, Any] | Tensor | tuple[Any, ...]
Loss = Callable[[nn.Module, Any], Tensor]
_NUM_STEPS = 2
"""Planned steps: the first creates the optimizer's state, the second runs with it."""
_LARGEST = 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory and time of a training step. Bytes are ``planned``, times ``estimated``."""

    card: Card
    batch_size: int
    oom: str
    """The out-of-memory message; empty: the step fits."""
    _plan: Callable[[Card, int], "MemoryEstimate"] = field(repr=False)
    """Plans the same step on another card with another batch size."""
    _gpu: VirtualGpu = field(repr=False)

    @property
    def fits_card(self) -> bool:
        """Whether the step fits the requested card; ``verdict`` also requires the margin."""
        return not self.oom

    @property
    def verdict(self) -> FitVerdict:
        """Whether the step fits with the card's margin."""
        used = self._gpu.ledger.allocator.peak_reserved_bytes + self.card.context_bytes
        return self.card.verdict(used, fits=self.fits_card)

    @cached_property
    def run(self) -> CardRun:
        """Steps, peaks, holders and times; on a card with enough memory if the requested one is too small."""
        return (self._plan(with_unlimited_memory(self.card), self.batch_size)._gpu if self.oom else self._gpu).report()

    @property
    def peak_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated`` of a step."""
        return self.run.peak.allocated_bytes

    def by_class(self) -> dict[TensorClass, int]:
        """Return the peak's bytes by class: weights, gradients, optimizer state, activations, temporaries."""
        return self.run.by_class()

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Return the peak's bytes by module path, the largest first.

        Args:
            depth: Most parts of a path; None: up to the first number, a block's.
        """
        return by_module(self.run, depth)

    def reserved_range(self) -> ReservedRange:
        """Return the range of reserved bytes with other sequence lengths, more steps, or an evaluation first."""
        workspace = self.card.cublas_workspace_bytes
        return reserved_range(self.run.trace, workspace_bytes=workspace, config=self._gpu.config)

    def placeholders(self) -> tuple[PlaceholderUse, ...]:
        """Return the places where the model used placeholder values."""
        return self._gpu.placeholders()

    def fits(self, card: Card | str) -> bool:
        """Return whether the step fits a card with its margin, with that card's kernels."""
        return self._plan(find_card(card), self.batch_size).verdict is FitVerdict.FITS

    def largest_batch(self, card: Card | str | None = None) -> int:
        """Return the largest batch size whose step fits a card with its margin; 0 if none does.

        Each tried size is a dry run; sizes are doubled, then bisected.
        """
        chosen = self.card if card is None else find_card(card)
        low, high = 0, 1
        while high <= _LARGEST and self._plan(chosen, high).verdict is FitVerdict.FITS:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self._plan(chosen, middle).verdict is FitVerdict.FITS:
                low = middle
            else:
                high = middle
        return low

    def summary(self) -> str:
        """Return outcome, peak, holders and time in a few lines, with caveats."""
        caveats = self._gpu.basis().caveats(fits=self.fits_card)
        return "\n".join([*filter(None, [self.oom]), self.run.summary(), *caveats])


def estimate_memory(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    *,
    card: Card | str,
    optimizer: str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "AdamW",
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    micro_batches: int = 1,
    allocator: AllocatorConfig | None = None,
) -> MemoryEstimate:
    """Plan a training step of ``model`` on ``card``, without the card or its memory.

        >>> import torch
        >>> from hybridtrain import estimate_memory
        >>> def build():
        ...     return torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096))
        >>> found = estimate_memory(build, torch.empty(256, 4096), card="rtx-4060-ti-16gb")
        >>> found.fits_card, found.fits("rtx-4090"), found.by_class()["optim_state"]
        (True, True, 1073905664)

    Args:
        model: A module (not changed), or a function that returns one, which needs no memory (a transformers model:
            ``lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)``).
        batch: The model's arguments: a mapping of keyword arguments, a tuple, or one tensor; the first dimension of
        each tensor is the batch. Values matter only if the model reads them (masks, lengths).
        card: The card, its name, or a TOML file that describes it.
        optimizer: Name of a class in ``torch.optim``, with its defaults, or a function from parameters to an optimizer.
        loss: Function of model and batch; None: ``model(batch).loss`` if it exists, else the output's mean.
        autocast: Dtype of ``torch.autocast`` around the forward pass; None: no autocast.
        clip_grad_norm: Largest norm of the gradients; None: no clipping.
        micro_batches: How many batches make one optimizer step.
        allocator: Settings of the caching allocator; None: torch's defaults.

    Raises:
        ConfigError: card or optimizer is unknown, or the batch has no tensor.
        DataDependentError: The model makes a tensor whose size depends on computed values.
    """
    first = next((value for value in _tensors(batch) if value.dim()), None)
    if first is None:
        raise ConfigError(
            "estimate_memory", ["batch: contains no tensor with a batch dimension; give the model's arguments."]
        )
    settings = {
        "optimizer": _optimizer(optimizer), "loss": loss or _default_loss, "autocast": autocast,
        "clip_grad_norm": clip_grad_norm, "micro_batches": micro_batches, "allocator": allocator,
    }  # fmt: skip
    factory: Callable[[], nn.Module] = (lambda: _twin(model)) if isinstance(model, nn.Module) else model
    return _estimate(factory, batch, settings, find_card(card), first.shape[0])


def by_module(run: CardRun, depth: int | None = None) -> dict[str, int]:
    """Return the bytes at a run's peak by module path, the largest first; see ``MemoryEstimate.by_module``."""
    found: dict[str, int] = {}
    for (_, unit), size in run.peak.by_unit.items():
        names = unit.split(".")
        end = next((place + 1 for place, name in enumerate(names) if name.isdecimal()), len(names))
        name = ".".join(names[: end if depth is None else depth])
        found[name] = found.get(name, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _estimate(
    model: Callable[[], nn.Module], batch: Batch, settings: dict[str, Any], card: Card, batch_size: int
) -> MemoryEstimate:
    oom = ""
    gpu = VirtualGpu(card, allocator=settings["allocator"])
    try:
        with gpu:
            built = model().to("cuda").train()
            optimizer = settings["optimizer"](built.parameters())
            for _ in range(_NUM_STEPS):
                _step(built, optimizer, _resized(batch, batch_size), settings)
    except torch.OutOfMemoryError as refusal:
        oom = str(refusal)
    plan = partial(_estimate, model, batch, settings)
    return MemoryEstimate(card=card, batch_size=batch_size, oom=oom, _plan=plan, _gpu=gpu)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, settings: dict[str, Any]) -> None:
    autocast = settings["autocast"]
    for _ in range(settings["micro_batches"]):
        on_card = _map(batch, lambda tensor: tensor.to("cuda"))
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = settings["loss"](model, on_card)
        (loss / settings["micro_batches"]).backward()
    if settings["clip_grad_norm"] is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad_norm"])
    optimizer.step()
    optimizer.zero_grad()


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensor = output if isinstance(output, Tensor) else next(_tensors(output))
    return tensor.float().mean()


def _optimizer(optimizer: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    if not isinstance(optimizer, str):
        return optimizer  # type: ignore[no-any-return]
    classes: dict[str, Any] = {
        name: kind for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }  # fmt: skip
    if optimizer not in classes:
        raise ConfigError("estimate_memory", [unknown_name("optimizer", optimizer, classes)])
    return lambda parameters: classes[optimizer]([p for p in parameters if p.requires_grad])


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters and buffers take no memory; those that were shared are shared."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _resized(batch: Batch, batch_size: int) -> Any:
    def resize(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty(batch_size, *tensor.shape[1:], dtype=tensor.dtype)
        if not tensor.dim() or tensor.shape[0] == batch_size:
            return tensor
        return tensor[:1].expand(batch_size, *tensor.shape[1:])

    return _map(batch, resize)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    _map(value, lambda tensor: (found.append(tensor), tensor)[1])  # type: ignore[func-returns-value]
    return iter(found)


def with_unlimited_memory(card: Card) -> Card:
    """Return the card with unlimited memory."""
    return replace(card, memory_mib=2**40)

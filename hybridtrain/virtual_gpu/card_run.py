"""What a run takes of a card: bytes by class, the peak, the time of a step; and ``watch`` for any PyTorch code.

Bytes are ``planned``, times ``estimated``. ``watch`` needs no labels: autograd says when the backward pass runs, an
optimizer says when it updates and what its parameters, gradients and state are; the rest is an activation, or workspace
when it is made during an update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hybridtrain.units import format_bytes, format_seconds
from hybridtrain.virtual_gpu.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.card import Card, Host, find_card
from hybridtrain.virtual_gpu.ledger import LedgerTrace, StorageLedger
from hybridtrain.virtual_gpu.observer import Lane, Stage
from hybridtrain.virtual_gpu.replay import OutOfMemory, Replay, StepMemory, replay_on_card
from hybridtrain.virtual_gpu.roofline import Bound, StepTime, estimate_step
from hybridtrain.virtual_gpu.tensor_class import TensorClass


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """A run on a card, replayed from its ledger."""

    card: Card
    trace: LedgerTrace
    uncapped: Replay
    """The allocator without a cap: what the run would take."""
    capped: Replay
    """The allocator under the card's cap: what the card would do, cached segments released and retried."""
    time: StepTime
    """Of the last step."""

    @property
    def fits_card(self) -> bool:
        """Whether every step ran under the card's cap."""
        return self.capped.oom is None

    @property
    def oom(self) -> OutOfMemory | None:
        """The refused request, if any."""
        return self.capped.oom

    @property
    def steps(self) -> tuple[StepMemory, ...]:
        """Peaks per step: under the cap where the run fits, without a cap where it does not."""
        return self.capped.steps if self.fits_card else self.uncapped.steps

    @property
    def peak(self) -> StepMemory:
        """The step with the most allocated bytes."""
        return max(self.steps, key=lambda step: step.allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest reserved bytes of any step."""
        return max(step.reserved_bytes for step in self.steps)

    @property
    def device_used_bytes(self) -> int:
        """Reserved bytes plus the CUDA context: what nvidia-smi shows."""
        return self.peak_reserved_bytes + self.card.context_bytes

    @property
    def bound(self) -> Bound:
        """What the estimated time is spent on."""
        return self.time.bound

    def by_class(self) -> dict[TensorClass, int]:
        """Return the holders of the peak's allocated bytes."""
        return self.peak.by_class

    def moments(self) -> Iterator[tuple[float, dict[TensorClass, int]]]:
        """Yield seconds and allocated bytes by class through the last step, once per allocation and release."""
        ops = iter(self.time.ops)
        timed = next(ops, None)
        clock = 0.0
        for event, by_class in self.uncapped.live_by_class:
            while timed is not None and timed.op.event <= event:
                if timed.op.lane is Lane.COMPUTE:
                    clock = timed.start_s
                timed = next(ops, None)
            yield clock, by_class

    def summary(self) -> str:
        """Return peak, holders and time in four lines."""
        peak, used = self.peak, self.device_used_bytes
        outcome = "fits" if self.fits_card else "does not fit"
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.by_class.items() if size)
        return (
            f"{self.card.name}: {outcome}, {format_bytes(used)} of {format_bytes(self.card.memory_bytes)} used\n"
            f"peak in step {peak.step}, {peak.stage}: {format_bytes(peak.allocated_bytes)} allocated, "
            f"{format_bytes(self.peak_reserved_bytes)} reserved\n"
            f"held by {held}\n"
            f"a step takes {format_seconds(self.time.seconds)}, bound by {self.bound}"
        )


class Watch:
    """What ``watch`` yields. The code that it watches says when a step begins; all else it may say, or leave."""

    def __init__(self, card: Card, device: str) -> None:
        self.card = card
        self.ledger = _StagedLedger(device)
        self._units = WeakIdKeyDictionary()

    def begin_step(self) -> None:
        """Say that a training step begins; what came before it, or before the first, belongs to no other step."""
        self.ledger.begin_step()

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str = "") -> None:
        """Say what a tensor is for, from its allocation on; one from before the watch counts from here."""
        self.ledger.enter(tensor)
        self.ledger.label(tensor, tensor_class, unit)

    def label_model(self, model: nn.Module) -> None:
        """Say that a model's parameters and buffers are weights, each by the name of its module.

        Its gradients and optimizer state get that name too. Needed only for names, and where no optimizer runs.
        """
        for name, module in model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._units[tensor] = name
                self.label(tensor, TensorClass.WEIGHT, name)

    def report(
        self, *, allocator: AllocatorConfig | None = None, host: Host | None = None, record_history: bool = False
    ) -> CardRun:
        """Replay what was seen so far on the card.

        Args:
            allocator: Settings of the caching allocator; None: torch's defaults.
            host: The machine around the card; None: one with enough of everything.
            record_history: Keep what snapshots need.

        Raises:
            ValueError: No step was begun.
        """
        trace = self.ledger.trace()
        if not trace.steps:
            raise ValueError("watch: no step was begun, so there is no step to report; call begin_step() before each.")
        uncapped, capped = replay_on_card(trace, self.card, config=allocator, record_history=record_history)
        time = estimate_step(
            trace.step_ops(len(trace.steps) - 1), self.card, upload_bytes=0, first=trace.steps[-1].op, host=host
        )
        return CardRun(card=self.card, trace=trace, uncapped=uncapped, capped=capped, time=time)

    def before_update(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Label what an optimizer is about to update; torch calls this before every ``step``."""
        for parameter in _parameters(optimizer):
            unit = self._unit_of(parameter)
            self.label(parameter, TensorClass.WEIGHT, unit)
            if parameter.grad is not None:
                self.label(parameter.grad, TensorClass.GRAD, unit)
        self.ledger.updates = True

    def after_update(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Label what an optimizer keeps; torch calls this after every ``step``."""
        self.ledger.updates = False
        for parameter in _parameters(optimizer):
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    self.label(value, TensorClass.OPTIM_STATE, self._unit_of(parameter))

    def _unit_of(self, parameter: Tensor) -> str:
        unit: str = self._units.get(parameter, "")  # type: ignore[no-untyped-call]
        return unit


@contextmanager
def watch(card: Card | str, *, device: str = "meta") -> Iterator[Watch]:
    """Watch PyTorch code as if it ran on ``card``: every storage is counted, nothing is changed.

    On the meta device nothing is computed and no memory is taken, whatever the model's size:

        >>> import torch
        >>> from hybridtrain.virtual_gpu import watch
        >>> with watch("rtx-4090") as gpu, torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(8192, 65536), torch.nn.ReLU(), torch.nn.Linear(65536, 8192))
        ...     optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ...     for _ in range(2):  # the first step makes the optimizer's state
        ...         gpu.begin_step()
        ...         model(torch.empty(512, 8192)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> run = gpu.report()
        >>> run.fits_card, run.peak.allocated_bytes, run.by_class()["optim_state"]
        (True, 21493350400, 8590524416)
        >>> print(run.summary())
        NVIDIA GeForce RTX 4090: fits, 20.83 GiB of 23.99 GiB used
        peak in step 1, update: 20.02 GiB allocated, 20.41 GiB reserved
        held by weight 4.00 GiB, grad 4.00 GiB, optim_state 8.00 GiB, workspace 4.02 GiB
        a step takes 151 ms, bound by optimizer

    Args:
        card: A card, its name in the catalogue, or a TOML file that describes one.
        device: Type of device whose tensors stand for the card's: ``meta``, or ``cpu`` to watch a run that computes;
            then whatever the code keeps on the CPU counts.

    Raises:
        ConfigError: The card is not known.
    """
    gpu = Watch(find_card(card) if isinstance(card, str) else card, device)
    hooks = [
        register_optimizer_step_pre_hook(gpu.before_update),
        register_optimizer_step_post_hook(gpu.after_update),
    ]
    try:
        with gpu.ledger:
            yield gpu
    finally:
        for hook in hooks:
            hook.remove()


class _StagedLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Finds out by itself where a step stands."""

    def __init__(self, device: str) -> None:
        super().__init__(device=device)
        self.updates = False
        """Whether an optimizer is at work."""
        self._stage = Stage.FORWARD

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op and enter its new storages."""
        is_backward = torch._C._current_graph_task_id() != -1
        self._stage = Stage.BACKWARD if is_backward else Stage.UPDATE if self.updates else Stage.FORWARD
        return super().__torch_dispatch__(func, types, args, kwargs)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])

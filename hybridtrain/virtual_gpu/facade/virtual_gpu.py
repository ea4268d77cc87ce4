"""A virtual card for unmodified code: ``with VirtualGpu("rtx-4090") as gpu: ...``."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hybridtrain.errors import ConfigError, reasons, short_text
from hybridtrain.virtual_gpu.account.ledger import StepMark
from hybridtrain.virtual_gpu.account.op_rules import tensors_in
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory, replay_trace
from hybridtrain.virtual_gpu.cards.card import Card, Host, find_card
from hybridtrain.virtual_gpu.cards.links import World
from hybridtrain.virtual_gpu.cards.roofline import estimate_step
from hybridtrain.virtual_gpu.facade.assumption import Assumption
from hybridtrain.virtual_gpu.facade.basis import NUM_STEPS_OF_GROWTH, CodeNotes, PlanBasis, find_growth, versions
from hybridtrain.virtual_gpu.facade.card_run import CardRun
from hybridtrain.virtual_gpu.facade.cuda_facade import facade
from hybridtrain.virtual_gpu.facade.cuda_paths import cuda_paths
from hybridtrain.virtual_gpu.facade.generation import generation
from hybridtrain.virtual_gpu.facade.launchers import launchers, running_script
from hybridtrain.virtual_gpu.facade.placeholders import PlaceholderUse, progress_of_lbfgs, where_called
from hybridtrain.virtual_gpu.facade.savings import LEAST_STATE
from hybridtrain.virtual_gpu.facade.tensor_methods import TensorMethods
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger
from hybridtrain.virtual_gpu.facade.virtual_world import virtual_world
from hybridtrain.virtual_gpu.facade.worst_case import EVALUATION, RESUMING, STEP, WorstCase

_BEFORE = ("torch._dynamo", "bitsandbytes")
"""Modules to import before the replacement: one has tables of torch's functions, the other loads CUDA's libraries if it
detects a card."""


_PATIENCE = 8
"""Steps of one optimizer after which another without steps is ignored; and backward passes per requested step after
which the code counts as without optimizer."""


@dataclass(slots=True)
class _Turns:
    """Facts about an optimizer's steps; a reference to the optimizer would keep its state alive."""

    updates: int = 0
    is_done: bool = False
    """Whether it has stepped in this iteration."""
    is_idle: bool = False
    """Whether it is ignored, as it never steps."""
    is_stateless: bool = False


class StepsDone(BaseException):
    """The requested optimizer steps are done. A BaseException, so that scripts do not catch it."""


def _import_before() -> None:
    """Import libraries that must find the real torch, in silence: the script may never use them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _BEFORE:
                if find_spec(name) is not None:
                    import_module(name)
    finally:
        logging.disable(before)


class VirtualGpu:
    """Runs PyTorch code, unmodified, on a card that this machine need not have.

    Inside the block CUDA is available: ``torch.cuda.is_available()``, device "cuda", its allocator, streams, autocast.
    Nothing is computed, so models of any size need no memory. When the card is full, ``torch.OutOfMemoryError`` is
    raised. Imports may be before or inside the block.

        >>> import torch
        >>> from hybridtrain.virtual_gpu import VirtualGpu
        >>> with VirtualGpu("rtx-4090") as gpu:
        ...     model = torch.nn.Sequential(torch.nn.Linear(8192, 65536), torch.nn.Linear(65536, 8192)).cuda()
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     for _ in range(2):  # the first step makes the optimizer's state
        ...         loss = model(torch.randn(512, 8192, device="cuda")).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> run = gpu.report()
        >>> run.fits_card, run.by_class()["optim_state"]
        (True, 8590524416)

    A step is an iteration: it ends when every optimizer has stepped; the next starts with the next forward pass.
    Without an optimizer each backward pass ends a step.

    Args:
        card: A card, its name in the catalogue, or a TOML file that describes one.
        host_memory: Limit of host memory for tensors, in bytes; None: unlimited.
        steps: Iterations after which the code is stopped; None: never.
        allocator: Settings of the caching allocator; None: torch's defaults.
        record_history: Keep what snapshots need.
        world: Number of ranks that torchrun would start; None: the code starts alone, or calls a launcher itself.
        rank: Rank of this card.
        cards_per_machine: Ranks per machine, as torchrun's ``--nproc-per-node``.
        link: Link between cards of one machine: nvlink, pcie or a TOML file.
        network: Link between machines.
        assume: Rules for values that are not computed, as ``keep=0.5,lengths=512`` (``Assumption``); None: none.
        worst: Load the longest rows in every batch, and note the peaks of steps, evaluation, saving and resuming.

    Raises:
        ConfigError: The card is not known.
        ValueError: There is no such rank, or no such assumption.
    """

    def __init__(
        self, card: Card | str, *, host_memory: float | None = None, steps: int | None = None,
        allocator: AllocatorConfig | None = None, record_history: bool = False, world: int | None = None, rank: int = 0,
        cards_per_machine: int = 8, link: str = "pcie", network: str = "ethernet", worst: bool = False,
        assume: str | None = None,
    ) -> None:  # fmt: skip
        self.card = find_card(card)
        self._host_memory = host_memory
        host = Host() if host_memory is None else Host(memory_gib=host_memory / 2**30, reserved_gib=0.0)
        self._is_launched = world is not None
        self.world = World(
            size=1 if world is None else world,
            rank=rank,
            cards_per_machine=cards_per_machine,
            link=link,
            network=network,
        )
        self.config = allocator
        self.ledger = VirtualLedger(self.card, host, CachingAllocator(allocator, self.card.allocator_capacity_bytes))
        self.ledger.card_index, self.ledger.num_cards = self.world.local_rank, self.world.local_size
        self.script = ""
        """The script or module whose forward pass was the first; empty: code that is no script of its own."""
        self.was_stopped = False
        """Whether the code was stopped, after the number of iterations asked for or by Ctrl-C."""
        self._assume = assume
        if assume is not None:
            self.ledger.placeholders.assumed = Assumption.parse(assume)
        self.ledger.worst = WorstCase() if worst else None
        self.ledger.can_see_growth = steps is None or steps >= NUM_STEPS_OF_GROWTH
        self.steps_done = 0
        """Completed iterations: the fewest steps of any active optimizer."""
        self.without_gradient: tuple[str, ...] = ()
        """Trainable parameters without a gradient at the last optimizer step: part of the model did not run."""
        self.num_params = 0
        """Parameters of the largest module that ran, or of the largest optimizer."""
        self.oom: OutOfMemory | None = None
        """The error of the virtual card that ended the code; None: none, or caught by the code."""
        self.error_after_oom = ""
        """Another error that ended the code after it caught ``oom``; a consequence of it or not."""
        self.float32_state: set[int] = set()
        """Storages of optimizer state in float32, of ``LEAST_STATE`` values or more."""
        self.can_fuse = False
        """Whether an optimizer has an argument ``fused`` that is not set."""
        self._steps = steps
        self._record_history = record_history
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._units = WeakIdKeyDictionary()
        self._depth = 0
        self._turns: WeakKeyDictionary[Optimizer, _Turns] = WeakKeyDictionary()
        self._num_unused = 0
        """Optimizers created but never stepped, including deleted ones."""
        self._has_state = False
        self._has_updated = False
        """Whether an optimizer has stepped in this iteration."""
        self._marks: list[StepMark] = []
        """Forward passes after an update in this iteration."""
        self._last_update: StepMark | None = None
        """Where the last update of the last iteration ended."""
        self._backwards_at_begin = 0
        self._begun = False
        self._last_refusal_step = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        _import_before()
        self._methods = TensorMethods(self.ledger)
        with ExitStack() as stack:
            autocast = stack.enter_context(cuda_paths(self.ledger))
            stack.enter_context(facade(self.ledger, self._methods, autocast))
            stack.enter_context(generation(self.ledger))
            stack.enter_context(progress_of_lbfgs(self.ledger.placeholders))
            if self._is_launched:
                stack.enter_context(virtual_world(self.world, self.ledger))
            for owner, name, value in (*launchers(self._enter_world), *self._late_worlds()):
                stack.enter_context(mock.patch.object(owner, name, value))
            for hook in (
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._after_update),
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ):
                stack.callback(hook.remove)
            stack.enter_context(mock.patch.object(Optimizer, "__init__", self._noting(Optimizer.__init__)))
            load = self._resuming(Optimizer.load_state_dict)
            stack.enter_context(mock.patch.object(Optimizer, "load_state_dict", load))
            self.ledger.after_backward, self.ledger.on_refusal = self._after_backward, self._on_refusal
            stack.enter_context(self.ledger)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._open.__exit__(kind, error, trace)
        self.was_stopped = isinstance(error, StepsDone)
        if self.ledger.refusal is not None and not self.was_stopped:
            was_last = self.steps_done == self._last_refusal_step
            is_of_memory = any(isinstance(one, torch.OutOfMemoryError) for one in reasons(error))
            if is_of_memory or (was_last and (error is not None or not self.steps_done)):
                self.oom = self.ledger.refusal
                if not is_of_memory and isinstance(error, Exception):
                    self.error_after_oom = short_text(error)
        return self.was_stopped

    def settings(self) -> dict[str, Any]:
        """Return the arguments that make such a card."""
        world = self.world
        return {
            "card": self.card, "host_memory": self._host_memory, "steps": self._steps, "allocator": self.config,
            "record_history": self._record_history, "world": world.size if self._is_launched else None,
            "rank": world.rank, "cards_per_machine": world.cards_per_machine, "link": world.link,
            "network": world.network, "worst": self.ledger.worst is not None,
            "assume": self._assume,
        }  # fmt: skip

    def without_limit(self, *, steps: int) -> "VirtualGpu":
        """Return the same card before any code ran, but with endless memory; it notes the line of each allocation.

        Args:
            steps: Iterations to stop after, where this card has no such number.
        """
        made = VirtualGpu(**self.settings() | {"steps": self._steps or steps})
        made.ledger.allocator.capacity_bytes = None
        made.ledger.notes_lines = True
        return made

    def begin_step(self) -> None:
        """Mark the start of a training step; automatic at the first forward pass after an iteration."""
        self._begun, self._has_updated = True, False
        for turns in self._turns.values():
            turns.is_done = False
        self._marks.clear()
        self._backwards_at_begin = self.ledger.seen.num_backwards
        self.ledger.begin_step()

    def basis(self) -> PlanBasis:
        """Return the basis of the plan: observations of the code, and differences from a real card."""
        seen = self.ledger.seen
        noted = {item.name: copy(getattr(seen, item.name)) for item in fields(CodeNotes)}
        for name in ("compiled", "captured"):
            noted[name] = [*dict.fromkeys(getattr(seen, name))]
        ended_by = "" if self.oom is None else seen.refusals[-1]
        noted["refusals"] = [text for text in dict.fromkeys(seen.refusals) if text != ended_by]
        growth = find_growth(self.ledger.trace(), seen.made_at)
        return PlanBasis(
            **noted,
            versions=versions(),
            num_steps=self.steps_done,
            has_state=self._has_state,
            growth=growth,
            ended_at=ended_by.partition(": ")[0],
        )

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str = "") -> None:
        """Set the class of a tensor, from its allocation on."""
        self.ledger.label(tensor, tensor_class, unit)

    def placeholders(self) -> tuple[PlaceholderUse, ...]:
        """Return the places where placeholder values were used."""
        return self.ledger.placeholders.uses()

    @property
    def host_peak_bytes(self) -> int:
        """Peak bytes of tensors on the host."""
        return self.ledger.peak_host_bytes

    def report(self) -> CardRun:
        """Replay the run so far on the card, up to its end or an out-of-memory error.

        Code without a training step (a loss, a loaded model) counts as one step.
        """
        if self._num_unused:
            self._split_step()
        trace = self.ledger.trace()
        if not trace.steps:
            trace = replace(trace, steps=(StepMark(0, 0),))
        replay = replay_trace(
            trace, workspace_bytes=0, config=self.config, capacity_bytes=self.ledger.allocator.capacity_bytes,
            record_history=self._record_history,
        )  # fmt: skip
        begin, end = trace.steps[-1].op, len(trace.ops)
        if self._last_update is not None:  # what comes after is no part of a step: evaluation, saving
            end = self._last_update.op
            begin = max((mark.op for mark in trace.steps if mark.op < end), default=0)
        time = estimate_step(trace.ops[begin:end], self.card, upload_bytes=0, first=begin, host=self.ledger.host)
        return CardRun(card=self.card, trace=trace, uncapped=replay, capped=replace(replay, oom=self.oom), time=time)

    # Hooks.

    def _enter_module(self, module: nn.Module, _args: object) -> None:
        if not self._depth:
            # A forward pass inside of a backward pass recomputes, also where an optimizer has stepped in that pass.
            if torch._C._current_graph_task_id() == -1:
                self._begin_forward()
                self._note_checkpointing(module)
            if module not in self._names and not any(map(is_lazy, module.parameters())):  # these get their size now
                self._name(module)
        self._depth += 1
        self.ledger.enter_module(self._names.get(module, ""))

    def _note_checkpointing(self, root: nn.Module) -> None:
        """Note layers that skip their gradient checkpointing (transformers/modeling_layers.py)."""
        if not torch.is_grad_enabled() or self.ledger.seen.inactive_checkpointing:
            return
        for module in root.modules():
            if vars(module).get("gradient_checkpointing") is True and not module.training:
                self.ledger.seen.inactive_checkpointing = where_called(in_script=True)
                return

    def _late_worlds(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield replacements for processes without a launcher: a group alone or of its environment, or spawned ones."""
        dist = import_module("torch.distributed")
        true_init = dist.init_process_group

        @wraps(true_init)
        def init(*args: Any, **kwargs: Any) -> Any:
            size = max(int(kwargs.get("world_size", -1)), int(os.environ.get("WORLD_SIZE", "-1")))
            if size > 0 and not self._is_launched:
                self._enter_world(size, int(os.environ.get("RANK", max(0, int(kwargs.get("rank", 0))))))
            return true_init(*args, **kwargs)

        def spawn(
            fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True,  # noqa: ARG001
            daemon: bool = False, start_method: str = "spawn",  # noqa: ARG001  torch's signature
        ) -> None:  # fmt: skip
            """Run one of the processes that a script would start for its cards: this rank's."""
            if not self._is_launched:
                self._enter_world(nprocs)
            fn(self.world.local_rank, *args)

        for module in (dist, import_module("torch.distributed.distributed_c10d")):
            yield module, "init_process_group", init
        yield import_module("torch.multiprocessing"), "spawn", spawn

    def _enter_world(self, size: int, rank: int = 0) -> None:
        """Become one rank of a launcher's world.

        Raises:
            ConfigError: Another number was asked for.
        """
        if self._is_launched:
            if size != self.world.size:
                fault = f"the launcher starts {size} processes, but --world is {self.world.size}; remove --world."
                raise ConfigError("virtual", [fault])
            return
        self._is_launched, self.world = True, replace(self.world, size=size, rank=rank)
        self.ledger.card_index, self.ledger.num_cards = self.world.local_rank, self.world.local_size
        self._open.enter_context(virtual_world(self.world, self.ledger))

    def _begin_forward(self) -> None:
        self.script = self.script or running_script()
        self.ledger.begin_phase(STEP if torch.is_grad_enabled() else EVALUATION)
        if not torch.is_grad_enabled():
            self.ledger.seen.num_evaluations += 1
        active = self._active()
        if self._has_updated:
            if all(turns.is_done for turns in active):
                self.begin_step()
            else:  # of a network that has a turn of its own, or an optimizer never makes a step
                self._marks.append(self.ledger.step_mark())
        elif not self._begun or (not active and self.ledger.seen.num_backwards > self._backwards_at_begin):
            self.begin_step()

    def _active(self) -> list["_Turns"]:
        return [turns for turns in self._turns.values() if not turns.is_idle]

    def _split_step(self) -> None:
        """Split an iteration at its forward passes after an update: some optimizer never steps."""
        for turns in self._active():
            turns.is_idle = not turns.updates
        self.ledger.add_steps(self._marks)
        self._marks.clear()

    def _after_backward(self) -> None:
        patience = None if self._steps is None else _PATIENCE * self._steps
        if patience is not None and not self._active() and self.ledger.seen.num_backwards >= patience:
            raise StepsDone

    def _on_refusal(self) -> None:
        """Label the state of a refused update; later steps show whether the refusal mattered."""
        self._last_refusal_step = self.steps_done
        for optimizer in self._turns:
            self._label_state(optimizer)

    def _noting(self, true_init: Any) -> Any:
        @wraps(true_init)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._note(optimizer)
            true_init(optimizer, *args, **kwargs)

        return init

    def _resuming(self, true_load: Any) -> Any:
        @wraps(true_load)
        def load(*args: Any, **kwargs: Any) -> Any:
            self.ledger.begin_phase(RESUMING)
            return true_load(*args, **kwargs)

        return load

    def _note(self, optimizer: Optimizer) -> _Turns:
        self._num_unused += optimizer not in self._turns
        return self._turns.setdefault(optimizer, _Turns())

    def _leave_module(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._depth -= 1
        self.ledger.leave_module()

    def _name(self, root: nn.Module) -> None:
        self.num_params = max(self.num_params, sum(parameter.numel() for parameter in root.parameters()))
        plain = [one for one in root.parameters() if type(one) is nn.Parameter and one.requires_grad]
        real = [one for one in plain if not self._methods.is_virtual(one)]
        if torch.is_grad_enabled() and sum(one.nbytes for one in real) > self.ledger.most_real_bytes:
            for parameter in real:  # their gradients will be virtual
                self._methods.become_virtual(parameter)
        for path, module in root.named_modules():
            name = path.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")  # torch.compile's wrapper
            self._names[module] = name
            held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            for tensor in (one for one in held if not is_functorch_wrapped_tensor(one)):
                self._units[tensor] = name
                self.ledger.label(tensor, TensorClass.WEIGHT, name)

    def _before_update(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        missing = []
        self._note(optimizer).is_idle = False
        self.can_fuse = self.can_fuse or optimizer.defaults.get("fused", True) in {None, False}
        self.num_params = max(self.num_params, sum(parameter.numel() for parameter in _parameters(optimizer)))
        for parameter in _parameters(optimizer):
            unit = self._unit_of(parameter)
            self.ledger.label(parameter, TensorClass.WEIGHT, unit)
            if parameter.grad is not None:
                self.ledger.label(parameter.grad, TensorClass.GRAD, unit)
            elif parameter.requires_grad:
                missing.append(unit)
        self.without_gradient = tuple(missing)
        self.ledger.updates = True

    def _after_update(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self.ledger.updates, self._has_updated, self._last_update = False, True, self.ledger.step_mark()
        turns = self._turns[optimizer]
        turns.is_stateless = turns.is_stateless or not self._label_state(optimizer)
        self._num_unused -= not turns.updates
        turns.updates, turns.is_done = turns.updates + 1, True
        if turns.updates >= _PATIENCE and any(not one.updates for one in self._active()):
            self._split_step()
        counts = [one.updates for one in self._active()]
        self.steps_done = max(self.steps_done, min(filter(None, counts)))
        self._has_state = all(one.updates != 1 or one.is_stateless for one in self._active())
        if self._steps is not None and min(counts) >= self._steps:
            raise StepsDone

    def _label_state(self, optimizer: Optimizer) -> bool:
        """Label an optimizer's state; return whether any of it is on the card."""
        found = False
        for parameter in _parameters(optimizer):
            state = optimizer.state.get(parameter, {})
            for value in tensors_in([*state.values()]) if isinstance(state, dict) else ():
                storage = self.ledger.storage_of(value)
                found = found or storage is not None
                if storage is not None and value.dtype is torch.float32 and value.numel() >= LEAST_STATE:
                    self.float32_state.add(storage)
                self.ledger.label(value, TensorClass.OPTIM_STATE, self._unit_of(parameter))
        return found

    def _unit_of(self, parameter: Tensor) -> str:
        unit: str = self._units.get(parameter, "")  # type: ignore[no-untyped-call]
        return unit


def _parameters(optimizer: Optimizer) -> Any:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])

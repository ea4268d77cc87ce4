"""Ranks that train one model together, and their communication: collectives of torch.distributed only.

``Transfer`` moves data between the tiers of a machine, a group between cards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.errors import ConfigError, RankError

T = TypeVar("T")

_ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The all-gather, renamed in torch 2.13."""
TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others before it raises ``RankError``."""


class Group:
    """Group of ranks, each with its own card and the same plan; this base class is a single rank.

    Args:
        rank: Rank of this process, from 0.
        world: Number of ranks.
        shares: Partial sums of gradients, and ranges that a parameter is sharded into: one per rank.
    """

    def __init__(self, rank: int, world: int, shares: int) -> None:
        self.rank = rank
        self.world = world
        self.shares = shares

    def all_to_all(self, target: Tensor, source: Tensor) -> None:
        """Send row i of ``source`` to rank i, and receive row i of ``target`` from it; both (world, n)."""

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        """Fill row i of ``target``, (world, n), with the ``source``, (n,), of rank i."""

    def begin_all_gather(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Start ``all_gather``; return a function that makes the compute queue wait for it."""
        self.all_gather(target, source)
        return lambda: None

    def send(self, source: Tensor, rank: int) -> Callable[[], None]:  # noqa: ARG002
        """Start sending a tensor to another rank; return a function that waits until the tensor may change."""
        return lambda: None

    def receive(self, target: Tensor, rank: int) -> None:
        """Receive a tensor from another rank, in the order of its sends."""

    def gather_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Gather equally many numbers from each rank, in rank order; this base class repeats its own."""
        return list(numbers) * self.world

    def close(self) -> None:
        """Leave the group."""


class DirectGroup(Group):
    """Single process that adds gradients and shards parameters bit-equal to several ranks."""

    def __init__(self, shares: int = 1) -> None:
        super().__init__(0, 1, shares)

    def all_to_all(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.view(-1).copy_(source)

    def send(self, source: Tensor, rank: int) -> Callable[[], None]:  # noqa: ARG002
        """Raise an error: there is no other rank."""
        raise AssertionError("a single process has no pipeline stages")

    def receive(self, target: Tensor, rank: int) -> None:
        """Raise an error: there is no other rank."""
        self.send(target, rank)


class VirtualGroup(Group):
    """One of several ranks on the meta device; the others do not exist, only shapes are exchanged."""

    def __init__(self, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise ConfigError("group", [f"rank {rank} of {world}: allowed: 0 to {world - 1}"])
        super().__init__(rank, world, world)


class TorchGroup(Group):
    """The default process group of torch.distributed: NCCL on CUDA, gloo on CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), dist.get_world_size())
        self._device = device
        self._on_cuda = device.type == "cuda"
        # What NCCL passes between two cards keeps its order in both directions together, and the order in which
        # neighbours send and receive is not the same: each direction has a communicator of its own.
        self._to_lower = dist.new_group() if self._on_cuda else None

    @classmethod
    def open(
        cls, device: torch.device, *, init_method: str = "env://", rank: int = -1, world: int = -1,
        timeout_s: float = TIMEOUT_S,
    ) -> "TorchGroup":  # fmt: skip
        """Join the group; by default address and rank come from torchrun's environment variables.

        ``timeout_s`` limits the wait for other ranks, here and in each collective.

        Raises:
            RankError: the other ranks did not join.
        """
        card = torch.cuda.current_device() if device.type == "cuda" else None

        def meet() -> TorchGroup:
            if card is not None:
                torch.cuda.set_device(card)  # a thread begins with the first one
            dist.init_process_group(
                "gloo" if card is None else "nccl", init_method=init_method, rank=rank, world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
            return cls(device)

        try:
            return _with_timeout(timeout_s, meet)
        except (dist.DistError, OSError, RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {rank if rank >= 0 else 'of this process'}: not all ranks joined within {timeout_s:g} s "
                f"({_first_line(error)}); start all ranks, with the same address."
            ) from error

    def all_to_all(self, target: Tensor, source: Tensor) -> None:
        """Exchange rows."""
        self._start(dist.all_to_all_single, target, source)()

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        """Gather rows."""
        self._start(_ALL_GATHER, target, source)()

    def begin_all_gather(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Start to gather rows; on CUDA after the current stream's work."""
        return self._start(_ALL_GATHER, target, source, async_op=True)

    def send(self, source: Tensor, rank: int) -> Callable[[], None]:
        """Start sending; the tensor is held until the send is waited for."""
        with self._rank_errors():
            given = source.contiguous() if self._on_cuda else source.clone()
            lane = self._to_lower if rank < self.rank else None
            work = dist.isend(given.view(-1).view(torch.uint8), rank, group=lane)
            assert work is not None, "this process is not in the group"
            del source

        def wait() -> None:
            nonlocal given
            with self._rank_errors():
                work.wait()
            del given

        return wait

    def receive(self, target: Tensor, rank: int) -> None:
        """Receive."""
        with self._rank_errors():
            got = target if self._on_cuda else torch.empty_like(target)
            lane = self._to_lower if rank > self.rank else None
            work = dist.irecv(got.view(-1).view(torch.uint8), rank, group=lane)
            assert work is not None, "this process is not in the group"
            work.wait()
            if got is not target:
                target.copy_(got)

    def gather_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Gather as float64, which is exact for float32 values."""
        with _disable_current_modes():  # a few numbers: no ledger's
            own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            found = torch.empty((self.world, len(numbers)), dtype=torch.float64, device=self._device)
            self.all_gather(found, own)
            return [float(number) for number in found.view(-1).tolist()]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _start(
        self, collective: Callable[..., object], target: Tensor, source: Tensor, **settings: bool
    ) -> Callable[[], None]:
        """Call a collective on flat tensors; return a function that waits for it and fills ``target``."""
        with self._rank_errors():
            # gloo's thread lets go of tensors when it comes to it, and then no two ledgers would be the same.
            got, given = (target, source) if self._on_cuda else (torch.empty_like(target), source.clone())
            work = collective(got.view(-1), given.view(-1), **settings)

        def end() -> None:
            with self._rank_errors():
                if settings:
                    assert isinstance(work, dist.Work), "of a collective that is under way"
                    work.wait()
                if got is not target:
                    target.copy_(got)

        return end

    @contextmanager
    def _rank_errors(self) -> Iterator[None]:
        """Convert torch's errors about other ranks to ``RankError``; no ledger sees the work inside."""
        try:
            with _disable_current_modes():  # as copies between tiers, which callers report to the ledger
                yield
        except (dist.DistError, RuntimeError) as error:
            raise RankError(
                f"rank {self.rank} of {self.world}: another rank ended or did not answer in time "
                f"({_first_line(error)}); read the error of the rank that ended first, then restart all ranks with "
                f"--resume."
            ) from error


def gather_texts(group: Group, device: torch.device, text: str) -> list[str]:
    """Gather texts of any length from all ranks, in rank order, through ``device``.

    Raises:
        RankError: another rank ended or did not answer in time.
    """
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    counts = [int(count) for count in group.gather_numbers([content.numel()])]
    with _disable_current_modes():  # no ledger's
        row = torch.zeros(max(counts), dtype=torch.uint8, device=device)
        row[: content.numel()].copy_(content)
        rows = row.new_empty((group.world, row.numel()))
        group.all_gather(rows, row)
        return [bytes(row[:count].cpu().numpy()).decode() for row, count in zip(rows, counts, strict=True)]


def _with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Call a function with a timeout.

    It runs in a thread of its own, which is abandoned after the timeout: torch has waits without an end.

    Raises:
        TimeoutError: it takes longer.
    """
    found: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  raised below
            faults.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    if not found:
        raise TimeoutError("no answer from the master address, or from a rank that connected")
    return found[0]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__

"""Ranks as forked processes on gloo: torch is imported once, and each test costs seconds."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from hybridtrain.memory.group import TorchGroup

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(world: int, work: Callable[[TorchGroup], T], *, timeout_s: float = 60.0) -> list[T]:
    """Return what ``work`` returns on each rank; raise where one of them fails."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{Path(folder) / 'meet'}"
        ends = [fork.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            fork.Process(target=_rank, args=(work, address, rank, world, timeout_s, ends[rank][1]))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for _, writer in ends:
            writer.close()
        found = []
        for reader, _ in ends:
            try:
                found.append(reader.recv())
            except EOFError:
                found.append((None, "ended without a word"))
        for rank in ranks:
            rank.join()
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(found) if fault]
    assert not faults, "\n".join(faults)
    return [value for value, _ in found]


def _rank(
    work: Callable[[TorchGroup], object], address: str, rank: int, world: int, timeout_s: float, writer: Connection
) -> None:
    torch.set_num_threads(1)
    try:
        group = TorchGroup.open(CPU, init_method=address, rank=rank, world=world, timeout_s=timeout_s)
        writer.send((work(group), ""))
        group.close()
    except BaseException:  # noqa: BLE001  the test is told
        writer.send((None, traceback.format_exc()))

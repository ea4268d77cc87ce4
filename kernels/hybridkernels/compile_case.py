"""What is compiled ahead of time: one kernel with the arguments and the configuration that its launcher gives it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = (80, 86, 89, 90, 120)
"""Compute capabilities of the cards: A100, RTX 30xx, RTX 40xx, H100 and H200, RTX 50xx."""

SHARED_MEMORY_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
"""What one block may take of a multiprocessor's shared memory (CUDA C++ Programming Guide, table of compute
capabilities: 163, 99, 99, 227 and 99 KiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One specialization of one Triton kernel."""

    name: str
    """Unique, as ``flash_attention/forward/bf16/head64``."""
    kernel: Any
    """The ``triton.jit`` function."""
    arguments: Mapping[str, str]
    """Triton types of the run-time arguments by name, as ``*bf16``, ``i32``, ``fp32``."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Values of the ``tl.constexpr`` arguments by name."""
    unaligned: frozenset[str] = frozenset()
    """Arguments of which Triton must not assume a multiple of 16; scalars of floating point never are."""
    num_warps: int = 4
    num_stages: int = 3


CompileCases = Callable[[int], list[CompileCase]]
"""Of a compute capability, as 90."""

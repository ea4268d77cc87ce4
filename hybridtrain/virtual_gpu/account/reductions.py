"""Scratch of CUDA's reductions: partial results of thread blocks that share an output.

After ``setReduceConfig`` and ``ReduceConfig.global_memory_size`` of torch 2.13 (ATen/native/cuda/Reduce.cuh), and the
order of dimensions of ``TensorIteratorBase`` (TensorIterator.cpp). The gradient of a bias is such a sum over tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_rules import Op, ScratchRule

_ATEN = torch.ops.aten
_WARP = 32
_MOST_THREADS = 512
_INPUT_VECTOR = 4
_VECTORIZED_FROM = 128
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values per thread between which an input is split over thread blocks."""
_SEMAPHORE_BYTES = 4
_INDEXED_BYTES = 2**31


@dataclass(frozen=True)
class Multiprocessors:
    """What of a card decides how its reductions are split: its number of multiprocessors, and threads of each."""

    count: int
    threads: int

    def scratch_of(self, x: Tensor, dims: Sequence[int], accumulator_bytes: int) -> int:
        """Return the bytes of scratch of reducing ``x`` over ``dims`` (none: over all), with accumulators of a size."""
        reduced = {dim % x.ndim for dim in dims} if x.ndim else set()
        return 0 if x.numel() == 0 else self._split(_Walk.of(x, reduced or set(range(x.ndim))), accumulator_bytes)

    def _split(self, walk: "_Walk", accumulator_bytes: int) -> int:
        """Halve what 32-bit indices do not reach, as ``with_32bit_indexing`` does, the longest dimension first."""
        buffer = 0
        while walk.reach >= _INDEXED_BYTES:
            if walk.itemsize < accumulator_bytes:
                buffer = buffer or walk.outputs * accumulator_bytes
            walk = walk.halved()
        return buffer + self._buffers(walk, accumulator_bytes)

    def _buffers(self, walk: "_Walk", accumulator_bytes: int) -> int:
        reduces_fastest = not walk.kept or (bool(walk.reduced) and walk.reduced[0].stride < walk.kept[0].stride)
        width_limit, height_limit = (walk.inputs, walk.outputs) if reduces_fastest else (walk.outputs, walk.inputs)
        dense = (walk.reduced if reduces_fastest else walk.kept)[:1]
        is_dense = not dense or dense[0].stride == 1
        vector = 1
        if is_dense and reduces_fastest and width_limit >= _VECTORIZED_FROM and len(walk.reduced) == 1:
            width_limit //= _INPUT_VECTOR
        elif is_dense and not reduces_fastest:
            vector = walk.output_vector()
            width_limit //= vector
        width, height = _block(width_limit, height_limit, _MOST_THREADS // vector)
        inputs_step, outputs_step = (width, 1) if reduces_fastest else (1, width)
        splits_rows = _div_up(walk.inputs, inputs_step) >= min(height * 16, _MOST_VALUES)
        inputs_step, outputs_step = (
            (inputs_step * height, outputs_step) if splits_rows else (inputs_step, outputs_step * height)
        )
        values = _div_up(walk.inputs, inputs_step)
        grid, target = _div_up(walk.outputs // vector, outputs_step), self.count * (self.threads // (width * height))
        if not splits_rows or values < _MOST_VALUES or grid > target:
            return 0
        blocks = max(min(_div_up(target, grid), _div_up(values, _LEAST_VALUES)), _div_up(values, _MOST_VALUES))
        if blocks < 2:
            return 0
        lanes = 1 if reduces_fastest else width * vector
        return accumulator_bytes * walk.outputs * blocks * lanes + _SEMAPHORE_BYTES * grid


@dataclass(frozen=True)
class _Dimension:
    size: int
    stride: int


@dataclass(frozen=True)
class _Walk:
    """Dimensions as the iterator orders and joins them: the reduced ones by stride, the others as in the result."""

    reduced: tuple[_Dimension, ...]
    kept: tuple[_Dimension, ...]
    itemsize: int
    offset: int

    @classmethod
    def of(cls, x: Tensor, reduced: set[int]) -> "_Walk":
        sizes = [(dim, _Dimension(x.shape[dim], x.stride(dim))) for dim in reversed(range(x.ndim)) if x.shape[dim] > 1]
        over = _by_stride([size for dim, size in sizes if dim in reduced])
        kept = [size for dim, size in sizes if dim not in reduced]  # in the order of the result, which is dense
        return cls(_joined(over), _joined(kept), x.element_size(), int(x.storage_offset()))

    @property
    def inputs(self) -> int:
        return prod(dimension.size for dimension in self.reduced)

    @property
    def outputs(self) -> int:
        return prod(dimension.size for dimension in self.kept)

    @property
    def reach(self) -> int:
        """Bytes from the first element to the last, or the number of elements if that is larger."""
        extent = 1 + self.itemsize * sum((d.size - 1) * d.stride for d in (*self.reduced, *self.kept))
        return max(extent, self.inputs * self.outputs)

    def halved(self) -> "_Walk":
        longest = max((*self.reduced, *self.kept), key=lambda d: ((d.size - 1) * d.stride, d.size))
        half = _Dimension(longest.size // 2, longest.stride)
        return replace(
            self,
            reduced=tuple(half if d is longest else d for d in self.reduced),
            kept=tuple(half if d is longest else d for d in self.kept),
        )

    def output_vector(self) -> int:
        """Return how many outputs a thread loads at once (``get_output_vec_size``)."""
        others = (d.stride for d in (*self.reduced, *self.kept[1:]))
        return next(v for v in (4, 2, 1) if not any(n % v for n in (self.offset, self.kept[0].size, *others)))


def _by_stride(dimensions: list[_Dimension]) -> list[_Dimension]:
    """Sort by insertion, where an expanded dimension is neither before nor after another (``reorder_dimensions``)."""
    ordered = list(dimensions)
    for last in range(1, len(ordered)):
        place = last
        for before in reversed(range(last)):
            lower, upper = ordered[before].stride, ordered[place].stride
            if lower and upper and lower < upper:
                break
            if lower and upper and lower > upper:
                ordered[before], ordered[place] = ordered[place], ordered[before]
                place = before
    return ordered


def _joined(dimensions: list[_Dimension]) -> tuple[_Dimension, ...]:
    """Join neighbours that lie one after the other."""
    joined: list[_Dimension] = []
    for dimension in dimensions:
        last = joined[-1] if joined else None
        if last is not None and last.size * last.stride == dimension.stride:
            joined[-1] = _Dimension(last.size * dimension.size, last.stride)
        else:
            joined.append(dimension)
    return tuple(joined)


def _block(width_limit: int, height_limit: int, threads: int) -> tuple[int, int]:
    """Return width and height of a thread block (``set_block_dimension``)."""
    widest, highest = (_power_of_two(min(limit, threads)) for limit in (width_limit, height_limit))
    height = min(highest, threads // min(widest, _WARP))
    return min(widest, threads // height), height


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not larger; 1 for 0."""
    return 1 << max(number.bit_length() - 1, 0)


def _div_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def reduction_rules(multiprocessors: Multiprocessors) -> dict[Op, ScratchRule]:
    """Return the scratch of ATen's reductions by op."""

    def rule(dims: int | None, accumulator_bytes: Callable[[Tensor], int]) -> ScratchRule:
        def scratch(args: Sequence[Any]) -> int:
            x: Tensor = args[0]
            given = args[dims] if dims is not None and len(args) > dims else None
            asked = [given] if isinstance(given, int) else list(given or ())
            return multiprocessors.scratch_of(x, asked, accumulator_bytes(x))

        return scratch

    rules = {
        getattr(getattr(_ATEN, packet), overload): rule(dims, _sum_bytes)
        for packet, overload, dims in (
            ("sum", "default", None), ("sum", "dim_IntList", 1), ("mean", "default", None), ("mean", "dim", 1),
            ("amax", "default", 1), ("amin", "default", 1), ("prod", "default", None), ("prod", "dim_int", 1),
            ("linalg_vector_norm", "default", 2),
        )
    }  # fmt: skip
    return rules | {
        getattr(_ATEN, packet).correction: rule(1, lambda x: 4 * max(x.element_size(), 4))
        for packet in ("var", "std", "var_mean", "std_mean")
    }


def _sum_bytes(x: Tensor) -> int:
    """Halves are added in fp32, whole numbers in int64."""
    return max(x.element_size(), 4) if x.is_floating_point() or x.is_complex() else 8

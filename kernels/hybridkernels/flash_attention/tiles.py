"""Parts of the forward and backward kernels: loading and storing tiles, placing programs, block sizes by card.

A head of H columns is worked on as HEAD columns and, where H is no power of two, TAIL more: 80 is 64 + 16, 96 is
64 + 32. Padding to 128 would multiply 1.6 times as much.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hybridkernels.flash_attention.options import Options

UNSPECIALIZED = ("num_heads", "group", "all_heads", "seq_len", "lse_rows", "heads_at_once")
"""Count arguments that Triton must not specialize on (values 1 and multiples of 16)."""
_SMALLEST_DOT = 16
"""Least columns of a matrix instruction."""
_TAILLESS = 64
"""Largest head dim that is padded to one power of two; wider ones are split into HEAD and TAIL."""


class LaunchConfig(NamedTuple):
    """Block sizes, warps and stages of one kernel's launch."""

    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Key rows of a tile; in forward and dq a divisor of ``block_m``."""
    num_warps: int
    num_stages: int


_CONFIGS = {
    80: {
        "forward": {64: (128, 64, 4, 2), 96: (128, 32, 4, 2), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)},
        "dq": {96: (128, 32, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
        "dkdv": {80: (64, 128, 8, 2), 96: (32, 128, 8, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 1)},
    },
    90: {
        "forward": {64: (128, 64, 4, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
        "dq": {96: (128, 128, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
        "dkdv": {80: (64, 128, 8, 3), 128: (64, 128, 8, 2), 256: (64, 32, 8, 1)},
    },
}
"""By capability, kernel and largest head dim. On 90 the matrix unit reads 64 rows of a tile at a time, and takes the
longer, the more columns the other side has; two blocks of 4 warps, or one of 8, fill a multiprocessor's registers."""
_OTHER_CONFIGS = {
    "forward": {64: (128, 64, 4, 2), 96: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    "dq": {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (32, 32, 4, 2)},
    "dkdv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 32, 4, 1)},
}
"""Cards with 99 KiB of shared memory a block, and those not known here."""


def head_widths(head_dim: int) -> tuple[int, int]:
    """Return HEAD and TAIL, powers of two that together hold ``head_dim`` columns; TAIL may be 0."""
    padded = max(_SMALLEST_DOT, triton.next_power_of_2(head_dim))
    if head_dim <= _TAILLESS or head_dim == padded:
        return padded, 0
    return _TAILLESS, max(_SMALLEST_DOT, triton.next_power_of_2(head_dim - _TAILLESS))


def launch_config(capability: int, kernel: str, head_dim: int) -> LaunchConfig:
    """Return the launch configuration of ``kernel`` (forward, dq or dkdv) for a compute capability, as 90."""
    by_head_dim = _CONFIGS.get(capability, _OTHER_CONFIGS)[kernel]
    return LaunchConfig(*by_head_dim[min(width for width in by_head_dim if width >= head_dim)])


def constants(config: LaunchConfig, head_dim: int, options: Options) -> dict[str, int | float]:
    """Return the values of the kernels' compile-time arguments."""
    head, tail = head_widths(head_dim)
    return {
        "HEAD_DIM": head_dim, "HEAD": head, "TAIL": tail, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "QK_SCALE": options.scale_of(head_dim), "SOFTCAP": options.softcap, "BOUNDED": options.is_bounded,
    }  # fmt: skip


@triton.jit
def capped(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return tanh(scores * SCALE / SOFTCAP) as (1 - e) / (1 + e) of e = exp(-2 |.|), which overflows nowhere."""
    shrunk = tl.exp2(tl.abs(scores) * (-2 * 1.4426950408889634 * SCALE / SOFTCAP))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0, -size, size)


@triton.jit
def load_tile(
    base, stride, rows, rows_left,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return WIDTH columns from FIRST on of the rows after ``base``; what lies outside of the tensor reads as 0."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if MASKED and FIRST + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(rows < rows_left)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=(rows < rows_left)[:, None], other=0.0)
    elif FIRST + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    tile, base, stride, rows, rows_left,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Round the tile once and write what lies within the tensor."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    inside = (rows < rows_left)[:, None]
    if FIRST + WIDTH > HEAD_DIM:
        inside = inside & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def place(all_heads, num_blocks, heads_at_once):
    """Return this program's head and its place in the order of the head's blocks.

    Programs start in the order of their number. As many heads as the second-level cache holds are worked on at once,
    and of these first every head's block 0, then every head's block 1: with the largest blocks in front the small
    ones fill the gaps at the end.
    """
    program = tl.program_id(0)
    first_head = program // (heads_at_once * num_blocks) * heads_at_once
    width = tl.minimum(heads_at_once, all_heads - first_head)
    within = program - first_head * num_blocks
    return first_head + within % width, within // width

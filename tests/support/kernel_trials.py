"""Two kernels that take as many registers, or as much shared memory, as they are told to."""

import triton
import triton.language as tl


@triton.jit
def sum_of_squares(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Hold the whole input until its sum is known."""
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(out_ptr + tl.arange(0, SIZE), x * tl.sum(x * x, 0))


@triton.jit
def transpose(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Pass a square through shared memory."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + rows * SIZE + columns)
    tl.store(out_ptr + rows * SIZE + columns, tl.trans(x))

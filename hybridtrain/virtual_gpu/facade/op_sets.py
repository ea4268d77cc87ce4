"""Sets of ops that need rules of a virtual card beyond torch's tags and schemas (``traits_of``), with reasons."""

import sys
from collections.abc import Callable
from functools import cache
from operator import and_, not_, or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from hybridtrain.virtual_gpu.account.op_rules import MATMUL_OPS, Args, Kwargs, Op, tensors_in, traits_of
from hybridtrain.virtual_gpu.facade.sequence_ops import PACK

_ATEN = torch.ops.aten
META = torch.device("meta")
COPIES = frozenset({_ATEN.copy_.default, _ATEN._foreach_copy_.default})
"""Ops that copy between host and card, depending on their arguments."""
FLOAT8_PRODUCTS = frozenset(
    {_ATEN._scaled_mm.default, *([_ATEN._scaled_mm_v2.default] if hasattr(_ATEN, "_scaled_mm_v2") else [])}
)
"""Products that need a card with float8 tensor cores."""
PUTS = frozenset({_ATEN.index_put_.default, _ATEN.index_put.default})
"""Ops that convert mask indices to positions, a tensor of data-dependent size."""
TAKES_HOST_INDICES = PUTS | {_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor}
QUESTIONS = frozenset(
    {_ATEN.gt, _ATEN.lt, _ATEN.ge, _ATEN.le, _ATEN.eq, _ATEN.ne, _ATEN.logical_not, _ATEN.logical_and, _ATEN.logical_or}
)
"""Ops that return a boolean about a number; no tag marks them."""
ANY_ALL = frozenset({_ATEN.any.default, _ATEN.all.default, _ATEN._is_any_true.default, _ATEN._is_all_true.default})
"""Ops that return a boolean about all elements."""
LOGIC: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys((_ATEN.logical_or, _ATEN.logical_or_, _ATEN.bitwise_or, _ATEN.bitwise_or_), or_),
    **dict.fromkeys((_ATEN.logical_and, _ATEN.logical_and_, _ATEN.bitwise_and, _ATEN.bitwise_and_), and_),
    **dict.fromkeys((_ATEN.logical_not, _ATEN.bitwise_not), not_),
}
"""Ops of booleans, each with its function of single ones."""
FINITE_ANSWERS = {_ATEN.isnan: False, _ATEN.isinf: False, _ATEN.isfinite: True}
"""Answers of ops that test for NaN and infinity, for unknown values."""
LIKES = frozenset(
    {_ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like, _ATEN.randint_like}
)
"""Ops that need the shape of an operand and not its values."""
DRAWS = frozenset(
    {_ATEN.uniform_, _ATEN.normal_, _ATEN.bernoulli_, _ATEN.random_, _ATEN.exponential_, _ATEN.log_normal_}
)
"""Ops that draw all values anew."""
FILLS = frozenset({_ATEN.fill_.Scalar, _ATEN.zero_.default, _ATEN.copy_.default})
"""Ops that overwrite all values without reading them, which schemas do not show."""
_ONE_DTYPE = MATMUL_OPS | {_ATEN.convolution.default}
"""Products whose operands have one dtype on a card; the meta device takes several."""
WORKSPACES = {
    **dict.fromkeys((_ATEN._fft_c2c, _ATEN._fft_r2c, _ATEN._fft_c2r), "workspaces of cuFFT"),
    **dict.fromkeys(
        (_ATEN._linalg_svd, _ATEN._linalg_eigh, _ATEN.linalg_qr, _ATEN.linalg_cholesky_ex, _ATEN.linalg_lu_factor_ex,
         _ATEN.linalg_inv_ex, _ATEN._linalg_solve_ex),
        "workspaces of cuSOLVER",
    ),
}  # fmt: skip
"""Library workspaces, which depend on run-time heuristics and are not counted."""
_INTO_ZEROS = frozenset(
    {_ATEN.index_put.default, _ATEN.scatter.src, _ATEN.scatter_add.default, _ATEN.index_add.default}
)
"""See ``accumulated``."""
_SHRUNK = {
    _ATEN.mse_loss.default: 2, _ATEN.smooth_l1_loss.default: 2, _ATEN.binary_cross_entropy.default: 3,
}  # fmt: skip
"""Losses whose mean or sum stays in the storage of all elements, resized to a scalar (aten/src/ATen/native/Loss.cpp,
cuda/Loss.cu) -> index of the argument ``reduction``."""
_ENGINE = _engine_run_backward.__code__
_KNOWN_FLOATS = 4096
"""Most elements of a floating-point tensor with known values."""
_KNOWN_INTEGERS = 2**24
"""Most elements of an integer or boolean tensor with known values: token batches, masks, positions, permutations."""
_REAL_WORK = 2**20
"""Least bytes of real operands from which an op's result is only planned."""


def is_dynamic(func: Op) -> bool:
    """Return whether the size of an op's result or temporary may depend on values."""
    return traits_of(func).is_dynamic or func in PUTS


def has_shapes_alone(func: Op) -> bool:
    """Return whether shapes of operands decide all that an op does on the card where their values are unknown."""
    packet = func._overloadpacket
    return not (
        func.is_view
        or is_dynamic(func)
        or func in ANY_ALL | FILLS | COPIES
        or packet in QUESTIONS
        or packet in FINITE_ANSWERS
        or packet in LOGIC
        or packet in WORKSPACES
        or packet is _ATEN.topk
    )


def is_integral(dtype: torch.dtype) -> bool:
    """Return whether a dtype is integer or boolean."""
    return not (dtype.is_floating_point or dtype.is_complex)


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is small enough to keep its values."""
    return tensor.numel() <= (_KNOWN_INTEGERS if is_integral(tensor.dtype) else _KNOWN_FLOATS)


def makes_large_known_shape(func: Op, operands: list[Tensor]) -> bool:
    """Return whether an op on real tensors makes a large tensor of known shape."""
    if func.is_view or func._schema.is_mutable or is_dynamic(func):
        return False
    return sum(tensor.nbytes for tensor in operands) >= _REAL_WORK


@cache
def _is_named_sparse(func: Op) -> bool:
    return "sparse" in func._schema.name


def touches_sparse(func: Op, operands: list[Tensor]) -> bool:
    """Return whether an op takes or makes sparse tensors."""
    return _is_named_sparse(func) or any(tensor.layout is not torch.strided for tensor in operands)


def allows_mixed_devices(func: Op) -> bool:
    """Return whether operands may be on two devices: a copy, indices, lengths, or an update of paged state."""
    return func in COPIES or func in TAKES_HOST_INDICES or func is PACK or func.namespace == "bitsandbytes"


def require_one_dtype(func: Op, args: Args) -> None:
    """Raise torch's ``RuntimeError`` for a product of tensors of several dtypes."""
    dtypes = list(dict.fromkeys(arg.dtype for arg in args if isinstance(arg, Tensor))) if func in _ONE_DTYPE else []
    if len(dtypes) > 1:
        found = " != ".join(map(str, dtypes))
        raise RuntimeError(f"expected operands to have the same dtype, but got: {found} (virtual GPU, in {func})")


def made_on_meta(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Call a factory on the meta device, for the shape of its result."""
    made: Tensor = func(*args, **(without_generator(kwargs) | {"device": META}))
    return made


def is_made_on_cpu(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Return whether an op's CPU result is real: copies of real data, small integers, empty tensors (torch.load)."""
    if func is _ATEN._to_copy.default:
        return True
    made = made_on_meta(func, args, kwargs)
    return not made.numel() or (is_integral(made.dtype) and is_small(made))


def without_generator(kwargs: Kwargs) -> dict[str, Any]:
    """Return arguments without a generator, unused on meta tensors, and without ``pin_memory``."""
    found = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return found | {"generator": None} if "generator" in found else found


def accumulated(func: Op, args: Args) -> Tensor | None:
    """Return the tensor into which autograd accumulates in place on a card; None if it makes a new one.

    The first of several gradients that are added: ``InputBuffer::accumulate`` (torch/csrc/autograd/input_buffer.cpp)
    adds in place into an unshared one, but never where tensors are on the meta device. Zeros that a gradient is put
    into: ``index_backward``, ``value_selecting_reduction_backward`` (torch/csrc/autograd/FunctionsManual.cpp),
    ``gather_backward`` and ``index_select_backward`` (aten/src/ATen/native) write in place, but never under a mode like
    this one. They are distinguished by their caller: autograd's engine, not Python code in a backward pass.
    """
    if func is _ATEN.add.Tensor and len(args) == 2:
        old, new = args
        may = isinstance(new, Tensor) and old.shape == new.shape and old.dtype is new.dtype
    else:
        may = func in _INTO_ZEROS
    if not may or sys._getframe(3).f_code is not _ENGINE:
        return None
    gradient: Tensor = args[0]
    # Two users: the tensor, and the object that asks. A view has a third, its base: tied weights get a new sum.
    is_unshared = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) == 2
    return gradient if is_unshared and torch.ops.aten.is_non_overlapping_and_dense(gradient) else None


def made_otherwise(func: Op, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return the card's result of an op that differs on the meta device; None for other ops."""
    if func is _ATEN._grouped_mm.default:
        return _grouped_matmul(*args, **kwargs)
    position = _SHRUNK.get(func)
    if position is not None and (len(args) <= position or args[position]):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        return torch.empty(shape, dtype=args[0].dtype, device=META).resize_(())
    return None


def _grouped_matmul(
    one: Tensor, other: Tensor, offs: Tensor | None = None, _bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return a grouped matmul's result, rows aligned to 16 bytes; torch's own answer on meta is for bfloat16 alone.

    ``create_grouped_gemm_output_tensor`` of aten/src/ATen/native/GroupedMMUtils.h.
    """
    dtype = out_dtype or one.dtype
    rows, columns = one.shape[-2], other.shape[-1]
    aligned = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if one.dim() != other.dim():
        return torch.empty_strided((rows, columns), (aligned, 1), dtype=dtype, device=META)
    if one.dim() == 2 and offs is None:
        raise ValueError("_grouped_mm: offs is missing, which divides two matrices into groups; pass the offsets.")
    groups = one.shape[0] if offs is None or one.dim() == 3 else offs.shape[0]
    strides = (rows * aligned, aligned, 1)
    return torch.empty_strided((groups, rows, columns), strides, dtype=dtype, device=META)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Map the tensors in a value, list or tuple."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def like(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def to_meta(tensor: Tensor) -> Tensor:
    """Convert a CPU tensor (except scalars) to a meta tensor of equal layout."""
    return tensor if tensor.is_meta or not tensor.dim() else like(tensor)


def is_real_tensor(args: Args, kwargs: Kwargs) -> bool:
    """Return whether ``to_meta`` converts a value."""
    return any(not tensor.is_meta and tensor.dim() for tensor in tensors_in([*args, *kwargs.values()]))

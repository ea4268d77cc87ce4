"""Options of causal attention, checks of its inputs, and the keys that each query sees.

B batch, T sequence, N query heads, K key/value heads, H head dim. Causal attention within a window and within documents
whose ids rise along a row is a band: query t sees the keys from ``first[t]`` to t, key s is seen by the queries from s
to ``last[s]``, and both rise along a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkernels.define_op import describe

_ID_DTYPES = frozenset({torch.int32, torch.int64})


class Options(NamedTuple):
    """Options of attention, off by default."""

    ids_BT: Tensor | None = None
    """Document of each token, (B, T) int32 or int64, rising along a row; None: one document a row."""
    scale: float | None = None
    """None: 1/sqrt(H)."""
    softcap: float = 0.0
    window: int = 0
    """Most keys that a query attends to, itself included; 0: no limit."""

    @property
    def is_bounded(self) -> bool:
        """Whether queries have a first key."""
        return self.window > 0 or self.ids_BT is not None

    @property
    def is_scale_alone(self) -> bool:
        """Whether nothing but the scale is out of the ordinary: torch's own kernels take that."""
        return not self.softcap and not self.is_bounded

    def scale_of(self, head_dim: int) -> float:
        """Return the scale of the scores of heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def first_keys(self, like_BT: Tensor) -> Tensor:
        """Return (B, T) int32, contiguous: the first key that each query attends to.

        The first two sizes of ``like_BT`` are B and T; it is on the device of the result.
        """
        first_BT = torch.zeros(like_BT.shape[:2], dtype=torch.int32, device=like_BT.device)
        if self.ids_BT is not None:
            ids_BT = self.ids_BT.contiguous()
            first_BT = torch.searchsorted(ids_BT, ids_BT, out_int32=True)
        return first_BT if not self.window else torch.maximum(first_BT, _positions(like_BT) - (self.window - 1))

    def last_queries(self, like_BT: Tensor) -> Tensor:
        """Return (B, T) int32, contiguous: the last query that attends to each key."""
        last = like_BT.shape[1] - 1
        last_BT = torch.zeros(like_BT.shape[:2], dtype=torch.int32, device=like_BT.device) + last
        if self.ids_BT is not None:
            ids_BT = self.ids_BT.contiguous()
            last_BT = torch.searchsorted(ids_BT, ids_BT, right=True, out_int32=True) - 1
        return last_BT if not self.window else torch.minimum(last_BT, _positions(like_BT) + (self.window - 1))


def _positions(like_BT: Tensor) -> Tensor:
    return torch.arange(like_BT.shape[1], dtype=torch.int32, device=like_BT.device)


def check_inputs(
    function: str, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, softcap: float, window: int, ids_BT: Tensor | None
) -> None:
    """Raise ValueError unless shapes, dtypes and devices go together and options are in range.

    The order of ids along a row is not checked.
    """
    tensors = (q_BTNH, k_BTKH, v_BTKH)
    if not _fit(q_BTNH, k_BTKH) or k_BTKH.shape != v_BTKH.shape:
        raise ValueError(
            f"{function}: q has shape {tuple(q_BTNH.shape)}, k {tuple(k_BTKH.shape)}, v {tuple(v_BTKH.shape)}; allowed "
            "are q (B, T, N, H) and k, v (B, T, K, H) with N a multiple of K; transpose or repeat heads first"
        )
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1 or not q_BTNH.is_floating_point():
        raise ValueError(
            f"{function}: q, k and v are {describe(*tensors)}; they need one floating point dtype and one device; "
            "convert them first"
        )
    if softcap < 0 or window < 0:
        raise ValueError(
            f"{function}: softcap is {softcap}, window {window}; neither may be below 0; leave one that is off at 0"
        )
    wanted = (q_BTNH.shape[:2], q_BTNH.device)
    if ids_BT is not None and (ids_BT.dtype not in _ID_DTYPES or (ids_BT.shape, ids_BT.device) != wanted):
        raise ValueError(
            f"{function}: document_ids_BT is {describe(ids_BT)}; it must be int32 or int64 {tuple(wanted[0])} on "
            f"{wanted[1]}; convert or move it"
        )


def _fit(q_BTNH: Tensor, k_BTKH: Tensor) -> bool:
    if q_BTNH.dim() != 4 or k_BTKH.dim() != 4:
        return False
    (batch, seq_len, num_heads, head_dim), (kv_batch, kv_len, num_kv_heads, kv_dim) = q_BTNH.shape, k_BTKH.shape
    return (batch, seq_len, head_dim) == (kv_batch, kv_len, kv_dim) and num_heads % max(1, num_kv_heads) == 0

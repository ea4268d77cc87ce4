"""What attention asks of its inputs.

B batch, T sequence, N query heads, K key/value heads, H head dim.
"""

import torch
from torch import Tensor

_ID_DTYPES = frozenset({torch.int32, torch.int64})


def check_inputs(function: str, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> None:
    """Raise ValueError unless shapes, dtypes and devices go together."""
    if not _fit(q_BTNH, k_BTKH) or k_BTKH.shape != v_BTKH.shape:
        raise ValueError(
            f"{function}: q has shape {tuple(q_BTNH.shape)}, k {tuple(k_BTKH.shape)}, v {tuple(v_BTKH.shape)}; allowed "
            "are q (B, T, N, H) and k, v (B, T, K, H) with N a multiple of K; transpose or repeat heads first"
        )
    kinds = {(tensor.dtype, tensor.device) for tensor in (q_BTNH, k_BTKH, v_BTKH)}
    if len(kinds) > 1 or not q_BTNH.is_floating_point():
        found = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (q_BTNH, k_BTKH, v_BTKH))
        raise ValueError(
            f"{function}: q, k and v are {found}; they need one floating point dtype and one device; convert them first"
        )


def check_options(function: str, q_BTNH: Tensor, softcap: float, window: int, document_ids_BT: Tensor | None) -> None:
    """Raise ValueError unless every option is in its range; that ids rise is not looked at."""
    if softcap < 0 or window < 0:
        raise ValueError(
            f"{function}: softcap is {softcap}, window {window}; neither may be below 0; leave one that is off at 0"
        )
    ids = document_ids_BT
    if ids is None:
        return
    if ids.dtype not in _ID_DTYPES or (ids.shape, ids.device) != (q_BTNH.shape[:2], q_BTNH.device):
        raise ValueError(
            f"{function}: document_ids_BT is {ids.dtype} {tuple(ids.shape)} on {ids.device}; it must be int32 or int64 "
            f"{tuple(q_BTNH.shape[:2])} on {q_BTNH.device}; convert or move it"
        )


def _fit(q_BTNH: Tensor, k_BTKH: Tensor) -> bool:
    if q_BTNH.dim() != 4 or k_BTKH.dim() != 4:
        return False
    (batch, seq_len, num_heads, head_dim), (kv_batch, kv_len, num_kv_heads, kv_dim) = q_BTNH.shape, k_BTKH.shape
    return (batch, seq_len, head_dim) == (kv_batch, kv_len, kv_dim) and num_heads % max(1, num_kv_heads) == 0

"""Which keys each query sees, as the first and the last of a run: sliding windows and documents of packed rows.

B batch, T sequence. Causal attention within a window and within documents whose ids rise along a row is a band: query
t sees the keys from ``first[t]`` to t, key s is seen by the queries from s to ``last[s]``, and both rise along a row.
"""

import torch
from torch import Tensor


def first_keys(like_BT: Tensor, window: int, document_ids_BT: Tensor | None) -> Tensor:
    """Return (B, T) int32, contiguous: the first key that each query sees.

    Args:
        like_BT: Any tensor whose first two sizes are B and T, on the device of the result.
        window: Keys that a query sees at most, itself among them; 0: no limit.
        document_ids_BT: (B, T) int32 or int64, rising along a row, or None.
    """
    first_BT = _zeros(like_BT)
    if document_ids_BT is not None:
        ids_BT = document_ids_BT.contiguous()
        first_BT = torch.searchsorted(ids_BT, ids_BT, out_int32=True)
    return first_BT if not window else torch.maximum(first_BT, _positions(like_BT) - (window - 1))


def last_queries(like_BT: Tensor, window: int, document_ids_BT: Tensor | None) -> Tensor:
    """Return (B, T) int32, contiguous: the last query that sees each key; arguments as of ``first_keys``."""
    last_BT = _zeros(like_BT) + (like_BT.shape[1] - 1)
    if document_ids_BT is not None:
        ids_BT = document_ids_BT.contiguous()
        last_BT = torch.searchsorted(ids_BT, ids_BT, right=True, out_int32=True) - 1
    return last_BT if not window else torch.minimum(last_BT, _positions(like_BT) + (window - 1))


def seen_pairs(seq_len: int, window: int) -> float:
    """Return the pairs of query and key that one row computes; half of the square, less what no window reaches."""
    beyond = seq_len - window if 0 < window < seq_len else 0
    return (seq_len**2 - beyond**2) / 2


def _zeros(like_BT: Tensor) -> Tensor:
    return torch.zeros(like_BT.shape[:2], dtype=torch.int32, device=like_BT.device)


def _positions(like_BT: Tensor) -> Tensor:
    return torch.arange(like_BT.shape[1], dtype=torch.int32, device=like_BT.device)

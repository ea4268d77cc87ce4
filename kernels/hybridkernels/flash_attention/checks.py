"""What attention asks of its inputs.

B batch, T sequence, N query heads, K key/value heads, H head dim.
"""

from torch import Tensor


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


def _fit(q_BTNH: Tensor, k_BTKH: Tensor) -> bool:
    if q_BTNH.dim() != 4 or k_BTKH.dim() != 4:
        return False
    (batch, seq_len, num_heads, head_dim), (kv_batch, kv_len, num_kv_heads, kv_dim) = q_BTNH.shape, k_BTKH.shape
    return (batch, seq_len, head_dim) == (kv_batch, kv_len, kv_dim) and num_heads % max(1, num_kv_heads) == 0

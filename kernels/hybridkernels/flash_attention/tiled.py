"""Causal attention with windows, documents and soft caps in torch's own ops, some rows of queries at a time.

For the CPU, and for CUDA where no kernel takes a case. B batch, T sequence, N query heads, K key/value heads, G of the
former to one of the latter, H head dim, R query rows at work, S keys that they see. Statistics and sums are float32
(float64 for float64), results are rounded once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkernels.flash_attention.options import Options
from hybridkernels.flash_attention.sdpa import padded

_SCORES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Scores at work: 4 MiB in fp32 on the CPU, where they stay near the cache; 64 MiB on CUDA, where launches cost."""


def tiled_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return out_BTNH, contiguous, and lse_BNR (float32, natural logarithm), zeros behind the T rows."""
    first_BT = options.first_keys(q_BTNH)
    batch, seq_len, num_heads, _ = q_BTNH.shape
    out_BTNH = q_BTNH.new_empty(q_BTNH.shape)
    lse_BNT = q_BTNH.new_empty(batch, num_heads, seq_len, dtype=_wide(q_BTNH))
    for row in range(batch):
        k_KTH, v_KTH = _by_head(k_BTKH[row]), _by_head(v_BTKH[row])
        for queries, keys, hidden_RS in _tiles(first_BT[row], num_heads):
            q_KRH = _grouped(q_BTNH[row, queries], len(k_KTH))
            scores_KRS, _ = _scores(q_KRH, k_KTH[:, keys], hidden_RS, options)
            lse_KR1 = scores_KRS.logsumexp(-1, keepdim=True)
            found_KRH = scores_KRS.sub_(lse_KR1).exp_() @ v_KTH[:, keys]
            out_BTNH[row, queries] = _ungrouped(found_KRH, num_heads).to(out_BTNH.dtype)
            lse_BNT[row, :, queries] = lse_KR1.view(num_heads, -1)
    return out_BTNH, padded(lse_BNT, q_BTNH)


def tiled_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq_BTNH, dk_BTKH and dv_BTKH, contiguous (Dao, FlashAttention-2, 2307.08691, algorithm 2).

    A soft cap's derivative is 1 - tanh(s / c)^2.
    """
    _, seq_len, num_heads, head_dim = q_BTNH.shape
    first_BT, scale, lse_BNT = options.first_keys(q_BTNH), options.scale_of(head_dim), lse_BNR[..., :seq_len]
    dq_BTNH, dk_BTKH, dv_BTKH = (tensor.new_empty(tensor.shape) for tensor in (q_BTNH, k_BTKH, v_BTKH))
    for row in range(len(q_BTNH)):
        k_KTH, v_KTH = _by_head(k_BTKH[row]), _by_head(v_BTKH[row])
        dk_KTH, dv_KTH = torch.zeros_like(k_KTH), torch.zeros_like(v_KTH)
        for queries, keys, hidden_RS in _tiles(first_BT[row], num_heads):
            q_KRH, grad_KRH, out_KRH = (
                _grouped(tensor[row, queries], len(k_KTH)) for tensor in (q_BTNH, grad_BTNH, out_BTNH)
            )
            scores_KRS, slope_KRS = _scores(q_KRH, k_KTH[:, keys], hidden_RS, options)
            weights_KRS = scores_KRS.sub_(lse_BNT[row, :, queries].reshape(len(k_KTH), -1, 1)).exp_()
            dv_KTH[:, keys] += weights_KRS.transpose(1, 2) @ grad_KRH
            delta_KR1 = (grad_KRH * out_KRH).sum(-1, keepdim=True)
            dscores_KRS = (grad_KRH @ v_KTH[:, keys].transpose(1, 2)).sub_(delta_KR1).mul_(weights_KRS).mul_(scale)
            if slope_KRS is not None:
                dscores_KRS.mul_(slope_KRS)
            dq_BTNH[row, queries] = _ungrouped(dscores_KRS @ k_KTH[:, keys], num_heads).to(dq_BTNH.dtype)
            dk_KTH[:, keys] += dscores_KRS.transpose(1, 2) @ q_KRH
        dk_BTKH[row], dv_BTKH[row] = dk_KTH.transpose(0, 1), dv_KTH.transpose(0, 1)
    return dq_BTNH, dk_BTKH, dv_BTKH


def tiled_workspace_bytes(q_BTNH: Tensor, k_BTKH: Tensor, *, is_backward: bool, softcap: float = 0.0) -> int:
    """Return an upper bound of the scratch bytes on CUDA.

    Of a tile there are its rows and scores, of a row of the batch its keys and values with their gradients; of either
    the one before lives until the next is made. ``logsumexp`` takes as much as the scores.
    """
    batch, seq_len, num_heads, head_dim = q_BTNH.shape
    wide = _wide(q_BTNH).itemsize
    rows = min(seq_len, _tile_rows("cuda", num_heads, seq_len))
    matrices = 2 + (rows < seq_len) + (3 if softcap else 0)
    scores = rows * seq_len * (matrices * wide * num_heads + 4)
    of_keys = (4 * (1 + (batch > 1)) + 1 if is_backward else 2 * (1 + (batch > 1))) * k_BTKH.shape[2] * seq_len
    of_rows = (10 if is_backward else 6) * num_heads * rows
    return scores + wide * head_dim * (of_keys + of_rows) + 4 * (batch + 4) * seq_len


def _tile_rows(device: str, num_heads: int, seq_len: int) -> int:
    return max(1, _SCORES[device] // max(1, num_heads * seq_len))


def _tiles(first_T: Tensor, num_heads: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield query rows, the keys that they see, and which of those are hidden from which row."""
    seq_len = len(first_T)
    rows = _tile_rows(first_T.device.type, num_heads, seq_len)
    firsts = first_T[::rows].tolist()
    positions_T = torch.arange(seq_len, dtype=first_T.dtype, device=first_T.device)
    for start, first in zip(range(0, seq_len, rows), firsts, strict=True):
        queries, keys = slice(start, min(start + rows, seq_len)), slice(first, min(start + rows, seq_len))
        keys_S = positions_T[keys]
        yield queries, keys, (keys_S > positions_T[queries, None]) | (keys_S < first_T[queries, None])


def _scores(q_KRH: Tensor, k_KSH: Tensor, hidden_RS: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """Return the scores, -inf where hidden, and the soft cap's derivative, if there is one."""
    scores_KRS = torch.bmm(q_KRH, k_KSH.transpose(1, 2)).mul_(options.scale_of(q_KRH.shape[2]))
    slope_KRS, softcap = None, options.softcap
    if softcap:
        scores_KRS.div_(softcap).tanh_()
        slope_KRS = 1 - scores_KRS.square()
        scores_KRS.mul_(softcap)
    scores_KRS.view(len(k_KSH), -1, *hidden_RS.shape).masked_fill_(hidden_RS, float("-inf"))
    return scores_KRS, slope_KRS


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_head(kv_TKH: Tensor) -> Tensor:
    return kv_TKH.transpose(0, 1).to(_wide(kv_TKH))


def _grouped(x_RNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return (K, G*R, H): rows of all query heads of a group below each other."""
    rows, num_heads, head_dim = x_RNH.shape
    x_RKGH = x_RNH.to(_wide(x_RNH)).view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return x_RKGH.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)


def _ungrouped(x_KRH: Tensor, num_heads: int) -> Tensor:
    """Return (R, N, H)."""
    return x_KRH.view(num_heads, -1, x_KRH.shape[2]).transpose(0, 1)

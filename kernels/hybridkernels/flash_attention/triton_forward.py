"""Causal attention forward as one Triton kernel (Dao, FlashAttention-2, 2307.08691, algorithm 1).

B batch, T sequence, N query heads, K key/value heads, H head dim. Scores are scaled by log2(e) / sqrt(H), so that
exp2 serves; the log-sum-exp is written in natural logarithm. Windows and documents are BOUNDED: each query has a first
key, as of ``first_keys``, and blocks of keys in front of that of a block's first query are skipped.
"""

import triton
import triton.language as tl

from hybridkernels.flash_attention.tiles import UNSPECIALIZED, capped, load_tile, place, store_tile


@triton.jit
def _attend(
    acc, acc_tail, row_sum, row_max, q, q_tail, queries, firsts,
    k_head, k_stride, v_head, v_stride, start, end, seq_len,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
    QK_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``start`` to ``end`` to the running softmax."""
    SCALE: tl.constexpr = 1.4426950408889634 * QK_SCALE
    keys = tl.arange(0, BLOCK_N)
    k_step, v_step = tl.cast(k_stride, tl.int64), tl.cast(v_stride, tl.int64)
    for start_n in tl.range(start, end, BLOCK_N):
        left = seq_len - start_n
        k_block, v_block = k_head + start_n * k_step, v_head + start_n * v_step
        k = load_tile(k_block, k_stride, keys, left, 0, HEAD, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if TAIL > 0:
            k_tail = load_tile(k_block, k_stride, keys, left, HEAD, TAIL, HEAD_DIM, MASKED)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        if SOFTCAP > 0:
            scores = capped(scores, QK_SCALE, SOFTCAP) * (SOFTCAP / QK_SCALE)
        if MASKED:
            scores = tl.where((queries - start_n)[:, None] >= keys[None, :], scores, float("-inf"))
        if MASKED and BOUNDED:
            scores = tl.where((firsts - start_n)[:, None] <= keys[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * SCALE)
        base = new_max
        if MASKED and BOUNDED:  # a row that has seen no key yet
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * SCALE - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max
        v = load_tile(v_block, v_stride, keys, left, 0, HEAD, HEAD_DIM, MASKED)
        rounded = weights.to(v.dtype)
        acc = tl.dot(rounded, v, acc * shrink[:, None], input_precision="ieee")
        if TAIL > 0:
            v_tail = load_tile(v_block, v_stride, keys, left, HEAD, TAIL, HEAD_DIM, MASKED)
            acc_tail = tl.dot(rounded, v_tail, acc_tail * shrink[:, None], input_precision="ieee")
    return acc, acc_tail, row_sum, row_max


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_t, q_stride_n, k_stride_b, k_stride_t, k_stride_n,
    v_stride_b, v_stride_t, v_stride_n,
    num_heads, group, all_heads, seq_len, lse_rows, heads_at_once,
    HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QK_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write out (B, T, N, H), contiguous, and lse (B, N, rows) for one block of queries of one head.

    Key blocks left of the diagonal need no mask, as long as BLOCK_N divides BLOCK_M; those on it come last.
    """
    MASKED_N: tl.constexpr = BLOCK_N if BLOCK_N <= 64 else 64  # noqa: FURB136  Triton's min of constants is none
    num_blocks = tl.cdiv(seq_len, BLOCK_M)
    head, order = place(all_heads, num_blocks, heads_at_once)
    start_m = (num_blocks - 1 - order) * BLOCK_M
    batch, query_head = tl.cast(head // num_heads, tl.int64), tl.cast(head % num_heads, tl.int64)
    kv_head = query_head // group
    rows = tl.arange(0, BLOCK_M)
    left = seq_len - start_m
    q_block = q_ptr + batch * q_stride_b + query_head * q_stride_n + start_m * tl.cast(q_stride_t, tl.int64)
    k_head = k_ptr + batch * k_stride_b + kv_head * k_stride_n
    v_head = v_ptr + batch * v_stride_b + kv_head * v_stride_n
    q = load_tile(q_block, q_stride_t, rows, left, 0, HEAD, HEAD_DIM, True)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    if TAIL > 0:
        q_tail = load_tile(q_block, q_stride_t, rows, left, HEAD, TAIL, HEAD_DIM, True)
        acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
    else:
        q_tail, acc_tail = q, acc  # not read
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if BOUNDED:
        first_block = first_ptr + batch * seq_len + start_m
        firsts = tl.load(first_block + rows, mask=rows < left, other=0)
        all_see = tl.cdiv(tl.load(first_block + tl.minimum(left, BLOCK_M) - 1), BLOCK_N) * BLOCK_N
        all_see = tl.minimum(all_see, start_m)
        acc, acc_tail, row_sum, row_max = _attend(
            acc, acc_tail, row_sum, row_max, q, q_tail, start_m + rows, firsts, k_head, k_stride_t, v_head, v_stride_t,
            tl.load(first_block) // BLOCK_N * BLOCK_N, all_see, seq_len,
            True, HEAD_DIM, HEAD, TAIL, MASKED_N, QK_SCALE, SOFTCAP, BOUNDED,
        )  # fmt: skip
    else:
        all_see, firsts = 0, rows  # not read
    acc, acc_tail, row_sum, row_max = _attend(
        acc, acc_tail, row_sum, row_max, q, q_tail, start_m + rows, firsts, k_head, k_stride_t, v_head, v_stride_t,
        all_see, start_m, seq_len, False, HEAD_DIM, HEAD, TAIL, BLOCK_N, QK_SCALE, SOFTCAP, BOUNDED,
    )  # fmt: skip
    acc, acc_tail, row_sum, row_max = _attend(
        acc, acc_tail, row_sum, row_max, q, q_tail, start_m + rows, firsts, k_head, k_stride_t, v_head, v_stride_t,
        start_m, tl.minimum(start_m + BLOCK_M, seq_len), seq_len,
        True, HEAD_DIM, HEAD, TAIL, MASKED_N, QK_SCALE, SOFTCAP, BOUNDED,
    )  # fmt: skip
    out_stride = num_heads * HEAD_DIM
    out_block = out_ptr + ((batch * seq_len + start_m) * num_heads + query_head) * HEAD_DIM
    store_tile(acc / row_sum[:, None], out_block, out_stride, rows, left, 0, HEAD, HEAD_DIM)
    if TAIL > 0:
        store_tile(acc_tail / row_sum[:, None], out_block, out_stride, rows, left, HEAD, TAIL, HEAD_DIM)
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + tl.cast(head, tl.int64) * lse_rows + start_m + rows, lse, mask=rows < left)

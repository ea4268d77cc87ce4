"""Causal attention backward as two Triton kernels (Dao, FlashAttention-2, 2307.08691, algorithm 2, cut in two).

B batch, T sequence, N query heads, K key/value heads, H head dim. With P the weights, dP = dO v^T and
delta = rowsum(dO * out): dS = P * (dP - delta), dq = dS k / sqrt(H), dk = dS^T q / sqrt(H), dv = P^T dO. A soft cap c
multiplies dS by 1 - tanh(s / c)^2; windows and documents (BOUNDED) leave out blocks as in the forward pass.

FlashAttention-2 adds dq up in memory while it loops over queries, in an order that varies from run to run. Here every
result has one program that sums it in registers, at the price of computing P and dP twice: 7 products instead of 5.
"""

import triton
import triton.language as tl

from hybridkernels.flash_attention.tiles import UNSPECIALIZED, capped, load_tile, place, store_tile


@triton.jit
def _add_keys(
    dq, dq_tail, q, q_tail, grad, grad_tail, lse, delta, queries, firsts,
    k_head, k_stride, v_head, v_stride, start, end, seq_len,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
    QK_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys from ``start`` to ``end`` to dq."""
    SCALE: tl.constexpr = 1.4426950408889634 * QK_SCALE
    keys = tl.arange(0, BLOCK_N)
    k_step, v_step = tl.cast(k_stride, tl.int64), tl.cast(v_stride, tl.int64)
    for start_n in tl.range(start, end, BLOCK_N):
        left = seq_len - start_n
        k_block, v_block = k_head + start_n * k_step, v_head + start_n * v_step
        k = load_tile(k_block, k_stride, keys, left, 0, HEAD, HEAD_DIM, MASKED)
        v = load_tile(v_block, v_stride, keys, left, 0, HEAD, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        if TAIL > 0:
            k_tail = load_tile(k_block, k_stride, keys, left, HEAD, TAIL, HEAD_DIM, MASKED)
            v_tail = load_tile(v_block, v_stride, keys, left, HEAD, TAIL, HEAD_DIM, MASKED)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
            grad_weights = tl.dot(grad_tail, tl.trans(v_tail), grad_weights, input_precision="ieee")
        if SOFTCAP > 0:
            tanh = capped(scores, QK_SCALE, SOFTCAP)
            scores = tanh * (SOFTCAP / QK_SCALE)
        if MASKED:
            scores = tl.where((queries - start_n)[:, None] >= keys[None, :], scores, float("-inf"))
        if MASKED and BOUNDED:
            scores = tl.where((firsts - start_n)[:, None] <= keys[None, :], scores, float("-inf"))
        weights = tl.exp2(scores * SCALE - lse[:, None])
        grad_scores = weights * (grad_weights - delta[:, None])
        if SOFTCAP > 0:
            grad_scores = grad_scores * (1.0 - tanh * tanh)
        grad_scores = grad_scores.to(k.dtype)
        dq = tl.dot(grad_scores, k, dq, input_precision="ieee")
        if TAIL > 0:
            dq_tail = tl.dot(grad_scores, k_tail, dq_tail, input_precision="ieee")
    return dq, dq_tail


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_dq_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, first_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    grad_stride_b, grad_stride_t, grad_stride_n, q_stride_b, q_stride_t, q_stride_n,
    k_stride_b, k_stride_t, k_stride_n, v_stride_b, v_stride_t, v_stride_n,
    num_heads, group, all_heads, seq_len, lse_rows, heads_at_once,
    HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QK_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write dq and delta for one block of queries of one head; delta (B, N, T) in fp32 is read by the other kernel."""
    MASKED_N: tl.constexpr = BLOCK_N if BLOCK_N <= 64 else 64  # noqa: FURB136  Triton's min of constants is none
    num_blocks = tl.cdiv(seq_len, BLOCK_M)
    head, order = place(all_heads, num_blocks, heads_at_once)
    start_m = (num_blocks - 1 - order) * BLOCK_M
    batch, query_head = tl.cast(head // num_heads, tl.int64), tl.cast(head % num_heads, tl.int64)
    kv_head = query_head // group
    rows = tl.arange(0, BLOCK_M)
    left = seq_len - start_m
    q_block = q_ptr + batch * q_stride_b + query_head * q_stride_n + start_m * tl.cast(q_stride_t, tl.int64)
    grad_block = grad_ptr + batch * grad_stride_b + query_head * grad_stride_n
    grad_block += start_m * tl.cast(grad_stride_t, tl.int64)
    k_head = k_ptr + batch * k_stride_b + kv_head * k_stride_n
    v_head = v_ptr + batch * v_stride_b + kv_head * v_stride_n
    dense_block = ((batch * seq_len + start_m) * num_heads + query_head) * HEAD_DIM
    dense_stride = num_heads * HEAD_DIM
    grad = load_tile(grad_block, grad_stride_t, rows, left, 0, HEAD, HEAD_DIM, True)
    out = load_tile(out_ptr + dense_block, dense_stride, rows, left, 0, HEAD, HEAD_DIM, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    q = load_tile(q_block, q_stride_t, rows, left, 0, HEAD, HEAD_DIM, True)
    dq = tl.zeros([BLOCK_M, HEAD], tl.float32)
    if TAIL > 0:
        grad_tail = load_tile(grad_block, grad_stride_t, rows, left, HEAD, TAIL, HEAD_DIM, True)
        out_tail = load_tile(out_ptr + dense_block, dense_stride, rows, left, HEAD, TAIL, HEAD_DIM, True)
        delta += tl.sum(out_tail.to(tl.float32) * grad_tail.to(tl.float32), 1)
        q_tail = load_tile(q_block, q_stride_t, rows, left, HEAD, TAIL, HEAD_DIM, True)
        dq_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
    else:
        q_tail, grad_tail, dq_tail = q, grad, dq  # not read
    long_head = tl.cast(head, tl.int64)
    tl.store(delta_ptr + long_head * seq_len + start_m + rows, delta, mask=rows < left)
    lse = tl.load(lse_ptr + long_head * lse_rows + start_m + rows, mask=rows < left, other=0.0) * 1.4426950408889634
    if BOUNDED:
        first_block = first_ptr + batch * seq_len + start_m
        firsts = tl.load(first_block + rows, mask=rows < left, other=0)
        all_see = tl.cdiv(tl.load(first_block + tl.minimum(left, BLOCK_M) - 1), BLOCK_N) * BLOCK_N
        all_see = tl.minimum(all_see, start_m)
        dq, dq_tail = _add_keys(
            dq, dq_tail, q, q_tail, grad, grad_tail, lse, delta, start_m + rows, firsts,
            k_head, k_stride_t, v_head, v_stride_t, tl.load(first_block) // BLOCK_N * BLOCK_N, all_see, seq_len,
            True, HEAD_DIM, HEAD, TAIL, MASKED_N, QK_SCALE, SOFTCAP, BOUNDED,
        )  # fmt: skip
    else:
        all_see, firsts = 0, rows  # not read
    dq, dq_tail = _add_keys(
        dq, dq_tail, q, q_tail, grad, grad_tail, lse, delta, start_m + rows, firsts,
        k_head, k_stride_t, v_head, v_stride_t, all_see, start_m, seq_len,
        False, HEAD_DIM, HEAD, TAIL, BLOCK_N, QK_SCALE, SOFTCAP, BOUNDED,
    )  # fmt: skip
    dq, dq_tail = _add_keys(
        dq, dq_tail, q, q_tail, grad, grad_tail, lse, delta, start_m + rows, firsts,
        k_head, k_stride_t, v_head, v_stride_t, start_m, tl.minimum(start_m + BLOCK_M, seq_len), seq_len,
        True, HEAD_DIM, HEAD, TAIL, MASKED_N, QK_SCALE, SOFTCAP, BOUNDED,
    )  # fmt: skip
    store_tile(dq * QK_SCALE, dq_ptr + dense_block, dense_stride, rows, left, 0, HEAD, HEAD_DIM)
    if TAIL > 0:
        store_tile(dq_tail * QK_SCALE, dq_ptr + dense_block, dense_stride, rows, left, HEAD, TAIL, HEAD_DIM)


@triton.jit
def _add_queries(
    dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail, keys,
    q_ptr, q_stride, q_stride_n, grad_ptr, grad_stride, grad_stride_n, lse_ptr, lse_rows, delta_ptr,
    first_ptr, seq_len, group, start, blocks, near, jump,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
    QK_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of ``blocks`` query blocks from ``start`` on to dk and dv, for each head of the group.

    After ``near`` blocks, ``jump`` queries are passed over: those that need no mask. A single loop over blocks and
    heads goes on loading where one head ends and the next begins, and takes fewer registers than two nested ones.
    Scores are worked on transposed, keys by queries, so that they are the left side of the products they go into.
    """
    SCALE: tl.constexpr = 1.4426950408889634 * QK_SCALE
    queries = tl.arange(0, BLOCK_M)
    q_step, grad_step = tl.cast(q_stride, tl.int64), tl.cast(grad_stride, tl.int64)
    divisor = tl.maximum(blocks, 1)  # where there are no blocks, the loop's prefetch divides all the same
    for step in tl.range(0, group * blocks):
        member, block = tl.cast(step // divisor, tl.int64), step % divisor
        start_m = start + block * BLOCK_M
        if MASKED:
            start_m += tl.where(block >= near, jump, 0)
        left = seq_len - start_m
        q_block = q_ptr + member * q_stride_n + start_m * q_step
        grad_block = grad_ptr + member * grad_stride_n + start_m * grad_step
        lse_block, delta_block = lse_ptr + member * lse_rows + start_m, delta_ptr + member * seq_len + start_m
        q = load_tile(q_block, q_stride, queries, left, 0, HEAD, HEAD_DIM, MASKED)
        grad = load_tile(grad_block, grad_stride, queries, left, 0, HEAD, HEAD_DIM, MASKED)
        if MASKED:
            lse = tl.load(lse_block + queries, mask=queries < left, other=0.0)
            delta = tl.load(delta_block + queries, mask=queries < left, other=0.0)
        else:
            lse = tl.load(lse_block + queries)
            delta = tl.load(delta_block + queries)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        if TAIL > 0:
            q_tail = load_tile(q_block, q_stride, queries, left, HEAD, TAIL, HEAD_DIM, MASKED)
            grad_tail = load_tile(grad_block, grad_stride, queries, left, HEAD, TAIL, HEAD_DIM, MASKED)
            scores = tl.dot(k_tail, tl.trans(q_tail), scores, input_precision="ieee")
            grad_weights = tl.dot(v_tail, tl.trans(grad_tail), grad_weights, input_precision="ieee")
        if SOFTCAP > 0:
            tanh = capped(scores, QK_SCALE, SOFTCAP)
            scores = tanh * (SOFTCAP / QK_SCALE)
        if MASKED:
            scores = tl.where(queries[None, :] >= (keys - start_m)[:, None], scores, float("-inf"))
        if MASKED and BOUNDED:
            firsts = tl.load(first_ptr + start_m + queries, mask=queries < left, other=0)
            scores = tl.where(firsts[None, :] <= keys[:, None], scores, float("-inf"))
        weights = tl.exp2(scores * SCALE - (lse * 1.4426950408889634)[None, :])
        rounded = weights.to(q.dtype)
        dv = tl.dot(rounded, grad, dv, input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[None, :])
        if SOFTCAP > 0:
            grad_scores = grad_scores * (1.0 - tanh * tanh)
        grad_scores = grad_scores.to(q.dtype)
        dk = tl.dot(grad_scores, q, dk, input_precision="ieee")
        if TAIL > 0:
            dv_tail = tl.dot(rounded, grad_tail, dv_tail, input_precision="ieee")
            dk_tail = tl.dot(grad_scores, q_tail, dk_tail, input_precision="ieee")
    return dk, dk_tail, dv, dv_tail


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_dkdv_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    grad_stride_b, grad_stride_t, grad_stride_n, q_stride_b, q_stride_t, q_stride_n,
    k_stride_b, k_stride_t, k_stride_n, v_stride_b, v_stride_t, v_stride_n,
    num_heads, group, all_heads, seq_len, lse_rows, heads_at_once,
    HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QK_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write dk and dv for one block of keys of one key/value head (``num_heads`` counts those here)."""
    num_blocks = tl.cdiv(seq_len, BLOCK_N)
    head, order = place(all_heads, num_blocks, heads_at_once)
    start_n = order * BLOCK_N
    batch, kv_head = tl.cast(head // num_heads, tl.int64), tl.cast(head % num_heads, tl.int64)
    rows = tl.arange(0, BLOCK_N)
    left = seq_len - start_n
    k_block = k_ptr + batch * k_stride_b + kv_head * k_stride_n + start_n * tl.cast(k_stride_t, tl.int64)
    v_block = v_ptr + batch * v_stride_b + kv_head * v_stride_n + start_n * tl.cast(v_stride_t, tl.int64)
    k = load_tile(k_block, k_stride_t, rows, left, 0, HEAD, HEAD_DIM, True)
    v = load_tile(v_block, v_stride_t, rows, left, 0, HEAD, HEAD_DIM, True)
    dk, dv = tl.zeros([BLOCK_N, HEAD], tl.float32), tl.zeros([BLOCK_N, HEAD], tl.float32)
    if TAIL > 0:
        k_tail = load_tile(k_block, k_stride_t, rows, left, HEAD, TAIL, HEAD_DIM, True)
        v_tail = load_tile(v_block, v_stride_t, rows, left, HEAD, TAIL, HEAD_DIM, True)
        dk_tail, dv_tail = tl.zeros([BLOCK_N, TAIL], tl.float32), tl.zeros([BLOCK_N, TAIL], tl.float32)
    else:
        k_tail, v_tail, dk_tail, dv_tail = k, v, dk, dv  # not read
    first_head = kv_head * group
    q_head = q_ptr + batch * q_stride_b + first_head * q_stride_n
    grad_head = grad_ptr + batch * grad_stride_b + first_head * grad_stride_n
    first_row = tl.cast(head, tl.int64) * group
    lse_head, delta_head = lse_ptr + first_row * lse_rows, delta_ptr + first_row * seq_len
    MASKED_M: tl.constexpr = BLOCK_M if BLOCK_M <= 32 else 32  # noqa: FURB136  Triton's min of constants is none
    first = start_n // MASKED_M * MASKED_M
    full = tl.cdiv(start_n + BLOCK_N, BLOCK_M) * BLOCK_M
    if BOUNDED:
        first_row, last_block = first_ptr + batch * seq_len, last_ptr + batch * seq_len + start_n
        all_see, end = tl.load(last_block) + 1, tl.load(last_block + tl.minimum(left, BLOCK_N) - 1) + 1
    else:
        first_row, all_see, end = first_ptr, seq_len, seq_len
    full_blocks = tl.maximum(all_see - full, 0) // BLOCK_M
    near = tl.cdiv(tl.minimum(full, end) - first, MASKED_M)
    far = tl.cdiv(tl.maximum(end - full - full_blocks * BLOCK_M, 0), MASKED_M)
    dk, dk_tail, dv, dv_tail = _add_queries(
        dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail, start_n + rows,
        q_head, q_stride_t, q_stride_n, grad_head, grad_stride_t, grad_stride_n, lse_head, lse_rows, delta_head,
        first_row, seq_len, group, first, near + far, near, full_blocks * BLOCK_M,
        True, HEAD_DIM, HEAD, TAIL, MASKED_M, QK_SCALE, SOFTCAP, BOUNDED,
    )  # fmt: skip
    dk, dk_tail, dv, dv_tail = _add_queries(
        dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail, start_n + rows,
        q_head, q_stride_t, q_stride_n, grad_head, grad_stride_t, grad_stride_n, lse_head, lse_rows, delta_head,
        first_row, seq_len, group, full, full_blocks, 0, 0,
        False, HEAD_DIM, HEAD, TAIL, BLOCK_M, QK_SCALE, SOFTCAP, BOUNDED,
    )  # fmt: skip
    dense_block = ((batch * seq_len + start_n) * num_heads + kv_head) * HEAD_DIM
    dense_stride = num_heads * HEAD_DIM
    store_tile(dk * QK_SCALE, dk_ptr + dense_block, dense_stride, rows, left, 0, HEAD, HEAD_DIM)
    store_tile(dv, dv_ptr + dense_block, dense_stride, rows, left, 0, HEAD, HEAD_DIM)
    if TAIL > 0:
        store_tile(dk_tail * QK_SCALE, dk_ptr + dense_block, dense_stride, rows, left, HEAD, TAIL, HEAD_DIM)
        store_tile(dv_tail, dv_ptr + dense_block, dense_stride, rows, left, HEAD, TAIL, HEAD_DIM)

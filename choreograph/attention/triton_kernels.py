"""Triton kernels: cache write, attention and merge of partial softmaxes.

Work items, KV chunks and row parameters are described in `TileMetadata` (`triton_partition.py`). Rows of an int8 cache
(`int8_rows.py`) are multiplied as integers, which every dtype of queries represents; their scales are factors of scores
and weights.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

UNMASKED_MIN_LEN = tl.constexpr(512)  # minimum slots of a KV chunk for a separate unmasked loop

MIN_MAGNITUDE = tl.constexpr(1e-30)  # as in `int8_rows`

ROUNDING = tl.constexpr(12582912.0)  # adding 1.5 * 2^23 rounds to an integer, half to even

MERGE_BLOCK = tl.constexpr(32)  # partial results per load, to hide the latency of dependent loads


@triton.jit
def write(
    key, value, slots, keys, values, key_head_stride, key_token_stride, value_head_stride, value_token_stride, slot_stride, num_tokens,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Write ROWS tokens of one KV head into their slots."""
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    mask = (row < num_tokens)[:, None] & (d < D)[None, :]
    slot = tl.load(slots + row, mask=row < num_tokens, other=0).to(tl.int64) * slot_stride + head * D
    k = tl.load(key + head * key_head_stride + row[:, None] * key_token_stride + d[None, :], mask=mask, other=0.0)
    v = tl.load(value + head * value_head_stride + row[:, None] * value_token_stride + d[None, :], mask=mask, other=0.0)
    tl.store(keys + slot[:, None] + d[None, :], k, mask=mask)
    tl.store(values + slot[:, None] + d[None, :], v, mask=mask)


@triton.jit
def write_int8(
    key, value, slots, keys, values, key_scales, value_scales, key_head_stride, key_token_stride,
    value_head_stride, value_token_stride, slot_stride, num_tokens,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Encode and write as `write`; the scales are float32 views of keys and values."""
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    row_mask = row < num_tokens
    mask = row_mask[:, None] & (d < D)[None, :]
    slot = tl.load(slots + row, mask=row_mask, other=0).to(tl.int64) * slot_stride + head * (D + 4)
    k = tl.load(key + head * key_head_stride + row[:, None] * key_token_stride + d[None, :], mask=mask, other=0.0)
    v = tl.load(value + head * value_head_stride + row[:, None] * value_token_stride + d[None, :], mask=mask, other=0.0)
    k, v = k.to(tl.float32), v.to(tl.float32)
    k_scale = tl.maximum(tl.max(tl.abs(k), 1), MIN_MAGNITUDE) / 127
    v_scale = tl.maximum(tl.max(tl.abs(v), 1), MIN_MAGNITUDE) / 127
    k_steps = (k / k_scale[:, None] + ROUNDING) - ROUNDING
    v_steps = (v / v_scale[:, None] + ROUNDING) - ROUNDING
    tl.store(keys + slot[:, None] + d[None, :], k_steps.to(tl.int8), mask=mask)
    tl.store(values + slot[:, None] + d[None, :], v_steps.to(tl.int8), mask=mask)
    tl.store(key_scales + (slot + D) // 4, k_scale, mask=row_mask)
    tl.store(value_scales + (slot + D) // 4, v_scale, mask=row_mask)


@triton.jit
def attend(
    query, keys, values, key_scales, value_scales, work_items, kv_chunks, row_params, rows, temperatures,
    cos, sin, alibi_slopes, partial_out, lse, rotated_q,
    q_head_stride, q_token_stride, slot_stride, scale, softcap, window,
    HEADS: tl.constexpr, GQA: tl.constexpr, GQA_PAD: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, ROT: tl.constexpr, ROT_PAD: tl.constexpr,
    NOROT: tl.constexpr, NOROT_PAD: tl.constexpr, PAIR_STRIDE: tl.constexpr, PAIR_OFFSET: tl.constexpr,
    SOFTCAP: tl.constexpr, SLIDING_WINDOW: tl.constexpr, ALIBI: tl.constexpr, SINGLE_SPLIT: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr, Q_VIA_GMEM: tl.constexpr, PRECISION: tl.constexpr, INT8: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute attention over one work item's KV chunks for one KV head.

    *_PAD sizes are powers of two. PAIR_STRIDE and PAIR_OFFSET locate the two elements of a rotated pair.
    SINGLE_SPLIT: the output is final, not a partial result. Q_VIA_GMEM: rotated queries are written to
    `rotated_q` once per chunk; otherwise they are multiplied from registers, where large tiles spill.
    INT8: keys and values are encoded, and the scales are float32 views of them. ALIGNED: some rows are aligned
    (`AlignedRows`), and `temperatures` divides the scores of every row.
    """
    dtype: tl.constexpr = query.dtype.element_ty
    item, kv_head = tl.program_id(0) // (HEADS // GQA), tl.program_id(0) % (HEADS // GQA)
    first = tl.load(work_items + item * 4)
    count = tl.load(work_items + item * 4 + 1)
    if count == 0:  # unused work item of a captured graph
        return
    m = tl.arange(0, ROWS * GQA_PAD)
    row_in_tile, head_in_group = m // GQA_PAD, m % GQA_PAD
    row_mask = (row_in_tile < count) & (head_in_group < GQA)
    head = kv_head * GQA + head_in_group
    row = tl.load(rows + (first + row_in_tile) * 2, mask=row_mask, other=0)
    q_pos = tl.load(rows + (first + row_in_tile) * 2 + 1, mask=row_mask, other=0)
    q_ptrs = query + head * q_head_stride + row * q_token_stride
    d = tl.arange(0, D_PAD)
    h = tl.arange(0, ROT_PAD)
    r = tl.arange(0, NOROT_PAD)
    if ROT > 0:
        mask_h = row_mask[:, None] & (h < ROT)[None, :]
    if ROT > 0 and not Q_VIA_GMEM:
        a = tl.load(q_ptrs[:, None] + h[None, :] * PAIR_STRIDE, mask=mask_h, other=0.0)
        b = tl.load(q_ptrs[:, None] + h[None, :] * PAIR_STRIDE + PAIR_OFFSET, mask=mask_h, other=0.0)
    if NOROT > 0:
        mask_r = row_mask[:, None] & (r < NOROT)[None, :]
        c = tl.load(q_ptrs[:, None] + 2 * ROT + r[None, :], mask=mask_r, other=0.0)
    if ALIGNED:
        sharpness = 1.0 / tl.load(temperatures + first + row_in_tile, mask=row_mask, other=1.0)
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=row_mask, other=0.0) * LOG2E
    qk_scale = scale * LOG2E
    post_scale = 1.0 if SOFTCAP or ALIBI else qk_scale  # without them, scaling fuses with subtracting the maximum
    if Q_VIA_GMEM:
        rotated_ptrs = rotated_q + (tl.program_id(0) * (ROWS * GQA_PAD) + m).to(tl.int64) * D
        mask_q = row_mask[:, None] & (d < D)[None, :]
        if NOROT > 0:
            tl.store(rotated_ptrs[:, None] + 2 * ROT + r[None, :], c, mask=mask_r)
    m_i = tl.full([ROWS * GQA_PAD], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS * GQA_PAD], tl.float32)
    acc = tl.zeros([ROWS * GQA_PAD, D_PAD], tl.float32)
    for chunk in range(tl.load(work_items + item * 4 + 2), tl.load(work_items + item * 4 + 3)):
        slot_start = tl.load(kv_chunks + chunk * 4).to(tl.int64)
        begin = tl.load(kv_chunks + chunk * 4 + 1)
        end = tl.load(kv_chunks + chunk * 4 + 2)
        params = tl.load(kv_chunks + chunk * 4 + 3) + row_in_tile
        shift = tl.load(row_params + params * 3, mask=row_mask, other=0)
        # padding rows attend to nothing
        kv_len = tl.minimum(tl.load(row_params + params * 3 + 1, mask=row_mask, other=0), end)
        position = tl.load(row_params + params * 3 + 2, mask=row_mask, other=0)
        if Q_VIA_GMEM:  # reload, to keep them out of registers in the loops
            a = tl.load(q_ptrs[:, None] + h[None, :] * PAIR_STRIDE, mask=mask_h, other=0.0)
            b = tl.load(q_ptrs[:, None] + h[None, :] * PAIR_STRIDE + PAIR_OFFSET, mask=mask_h, other=0.0)
        if ROT > 0:
            x = tl.load(cos + shift[:, None] * ROT + h[None, :], mask=mask_h, other=0.0)
            y = tl.load(sin + shift[:, None] * ROT + h[None, :], mask=mask_h, other=0.0)
            rot_a = (a.to(tl.float32) * x + b.to(tl.float32) * y).to(dtype)  # rotate by -shift
            rot_b = (b.to(tl.float32) * x - a.to(tl.float32) * y).to(dtype)
        if Q_VIA_GMEM:
            tl.debug_barrier()  # all threads have read the previous chunk's queries
            tl.store(rotated_ptrs[:, None] + h[None, :] * PAIR_STRIDE, rot_a, mask=mask_h)
            tl.store(rotated_ptrs[:, None] + h[None, :] * PAIR_STRIDE + PAIR_OFFSET, rot_b, mask=mask_h)
            tl.debug_barrier()
            q = tl.load(rotated_ptrs[:, None] + d[None, :], mask=mask_q, other=0.0)
        full_end = begin  # below this every row attends to every slot
        if UNMASKED_LOOP and end - begin >= UNMASKED_MIN_LEN:
            full_end += (tl.maximum(tl.min(tl.where(row_mask, kv_len, end)), begin) - begin) // SLOTS * SLOTS
        for masked in tl.static_range(1 - UNMASKED_LOOP, 2):
            for t in range(full_end if masked else begin, end if masked else full_end, SLOTS):
                j = t + tl.arange(0, SLOTS)
                read = (j < end) | (masked == 0)
                slot = (slot_start + j) * slot_stride + kv_head * (D + 4 if INT8 else D)
                score = tl.zeros([ROWS * GQA_PAD, SLOTS], tl.float32)
                if Q_VIA_GMEM:
                    key = tl.load(keys + slot[:, None] + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0)
                    score += tl.dot(q, tl.trans(key.to(dtype)), input_precision=PRECISION)
                if ROT > 0 and not Q_VIA_GMEM:
                    mask_k = read[:, None] & (h < ROT)[None, :]
                    key_ptrs = keys + slot[:, None] + h[None, :] * PAIR_STRIDE
                    key = tl.load(key_ptrs, mask=mask_k, other=0.0).to(dtype)
                    score += tl.dot(rot_a, tl.trans(key), input_precision=PRECISION)
                    key = tl.load(key_ptrs + PAIR_OFFSET, mask=mask_k, other=0.0).to(dtype)
                    score += tl.dot(rot_b, tl.trans(key), input_precision=PRECISION)
                if NOROT > 0 and not Q_VIA_GMEM:
                    mask_k = read[:, None] & (r < NOROT)[None, :]
                    key = tl.load(keys + slot[:, None] + 2 * ROT + r[None, :], mask=mask_k, other=0.0)
                    score += tl.dot(c, tl.trans(key.to(dtype)), input_precision=PRECISION)
                if INT8:
                    score *= tl.load(key_scales + (slot + D) // 4, mask=read, other=0.0)[None, :]
                if ALIGNED:
                    score *= sharpness[:, None]
                distance = q_pos[:, None] - (position[:, None] + j[None, :])
                if SOFTCAP or ALIBI:
                    score *= qk_scale
                if SOFTCAP:
                    z = tl.exp2(-tl.abs(score) * (2.0 * LOG2E / softcap))
                    score = tl.where(score < 0, -1.0, 1.0) * softcap * (1.0 - z) / (1.0 + z)  # cap * tanh(score / cap)
                if ALIBI:
                    score -= slope[:, None] * distance.to(tl.float32)
                if masked:
                    visible = j[None, :] < kv_len[:, None]
                    if SLIDING_WINDOW:
                        visible = visible & (distance < window) & (distance > -window)
                    score = tl.where(visible, score, float("-inf"))
                m_new = tl.maximum(m_i, tl.max(score, 1) * post_scale)
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
                alpha = tl.exp2(m_i - m_safe)
                p = tl.exp2(score * post_scale - m_safe[:, None])
                l_i = l_i * alpha + tl.sum(p, 1)
                value = tl.load(values + slot[:, None] + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0)
                if INT8:
                    p *= tl.load(value_scales + (slot + D) // 4, mask=read, other=0.0)[None, :]
                acc = acc * alpha[:, None] + tl.dot(p.to(dtype), value.to(dtype), input_precision=PRECISION)
                m_i = m_new
    non_empty = l_i > 0
    result = (acc / tl.where(non_empty, l_i, 1.0)[:, None]).to(partial_out.dtype.element_ty)
    mask_d = row_mask[:, None] & (d < D)[None, :]
    if SINGLE_SPLIT:
        tl.store(partial_out + (row * HEADS + head)[:, None] * D + d[None, :], result, mask=mask_d)
    else:
        partial = (first + row_in_tile) * HEADS + head
        tl.store(partial_out + partial[:, None] * D + d[None, :], result, mask=mask_d)
        log_sum = tl.where(non_empty, m_i + tl.log2(tl.where(non_empty, l_i, 1.0)), float("-inf"))
        tl.store(lse + partial, log_sum, mask=row_mask)


@triton.jit
def merge(
    partial_out, lse, merge_order, merge_indptr, sinks, aligned_rows, alignments, out,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SINKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Merge partial results of one token and head by base-2 log-sum-exp.

    ALIGNED: a token may have an aligned row, whose partial results are merged as `Alignment` says.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    m_i, l_i = float("-inf"), 0.0
    if SINKS:
        m_i, l_i = tl.load(sinks + head).to(tl.float32) * LOG2E, 1.0
    m_i, l_i, acc = _merge_row(partial_out, lse, merge_order, merge_indptr, token, head, m_i, l_i, HEADS, D, D_PAD)
    if ALIGNED:
        row = tl.load(aligned_rows + token)
        if row >= 0:
            m_aligned, l_aligned, acc_aligned = _merge_row(
                partial_out, lse, merge_order, merge_indptr, row, head, float("-inf"), 0.0, HEADS, D, D_PAD
            )
            has_keys = l_aligned > 0
            l_safe = tl.where(has_keys, l_aligned, 1.0)
            logit = (m_aligned + tl.log2(l_safe)) * tl.load(alignments + 2 * token) + tl.load(
                alignments + 2 * token + 1
            )
            logit = tl.where(has_keys, logit, float("-inf"))
            m_new = tl.maximum(m_i, logit)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha, weight = tl.exp2(m_i - m_safe), tl.exp2(logit - m_safe)
            acc = acc * alpha + acc_aligned / l_safe * weight
            l_i = l_i * alpha + weight
    acc = acc / tl.where(l_i > 0, l_i, 1.0)
    tl.store(out + (token * HEADS + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _merge_row(
    partial_out, lse, merge_order, merge_indptr, token, head, m_i, l_i,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Merge one row's partial results into maximum and sum; return them and the weighted values."""
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    last = tl.load(merge_indptr + token + 1)
    for first in range(tl.load(merge_indptr + token), last, MERGE_BLOCK):
        index = first + tl.arange(0, MERGE_BLOCK)
        partial = tl.load(merge_order + index, mask=index < last, other=0) * HEADS + head
        lse_part = tl.load(lse + partial, mask=index < last, other=float("-inf"))
        mask = (index < last)[:, None] & (d < D)[None, :]
        part = tl.load(partial_out + partial[:, None] * D + d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse_part, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m_i - m_safe), tl.exp2(lse_part - m_safe)
        acc = acc * alpha + tl.sum(weight[:, None] * part, 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    return m_i, l_i, acc

"""Triton programs of placed attention: rows' own keys and values into their slots, a tile of rows over pieces of runs,
and the merging of partial softmaxes.

What the numbers of items, pieces and reads mean is said where they are made (`ops/tiles.py`).
"""

# mypy: ignore-errors
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LONG = tl.constexpr(512)  # slots of a piece from which on whole tiles of it are worth a loop of their own
AT_ONCE = tl.constexpr(32)  # partial results that are loaded together, since each load waits for the one before


@triton.jit
def write(
    key, value, slots, keys, values, key_head, key_row, value_head, value_row, slot_stride, count,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some rows of one key-value head into their slots."""
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDE)
    mask = (row < count)[:, None] & (d < WIDTH)[None, :]
    slot = tl.load(slots + row, mask=row < count, other=0).to(tl.int64) * slot_stride + head * WIDTH
    k = tl.load(key + head * key_head + row[:, None] * key_row + d[None, :], mask=mask, other=0.0)
    v = tl.load(value + head * value_head + row[:, None] * value_row + d[None, :], mask=mask, other=0.0)
    tl.store(keys + slot[:, None] + d[None, :], k, mask=mask)
    tl.store(values + slot[:, None] + d[None, :], v, mask=mask)


@triton.jit
def attend(
    query, keys, values, items, pieces, reads, rows, cos, sin, slopes, partial, norms, turned,
    q_head, q_row, slot_stride, scale, cap, window,
    HEADS: tl.constexpr, SHARE: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    REST: tl.constexpr, RESTS: tl.constexpr, STEP: tl.constexpr, SECOND: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SLOPING: tl.constexpr, DIRECT: tl.constexpr,
    SPLIT: tl.constexpr, THROUGH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of rows, for one key-value head, over its pieces. Padded sizes are powers of two; STEP and SECOND say
    where the partners of a rotated pair lie. DIRECT: what comes out is the rows' result, not a part of it. THROUGH: the
    turned queries go through memory, `turned`, once a piece: what is computed in registers is multiplied from there,
    and large tiles spill."""
    item, group = tl.program_id(0) // (HEADS // SHARE), tl.program_id(0) % (HEADS // SHARE)
    first = tl.load(items + item * 4)
    count = tl.load(items + item * 4 + 1)
    if count == 0:  # room in a graph that this step has no use for
        return
    m = tl.arange(0, ROWS * SHARED)
    entry, inner = m // SHARED, m % SHARED
    here = (entry < count) & (inner < SHARE)
    head = group * SHARE + inner
    row = tl.load(rows + (first + entry) * 2, mask=here, other=0)
    stands = tl.load(rows + (first + entry) * 2 + 1, mask=here, other=0)
    base = query + head * q_head + row * q_row
    d = tl.arange(0, WIDE)
    h = tl.arange(0, HALVES)
    r = tl.arange(0, RESTS)
    if HALF > 0:
        mask_h = here[:, None] & (h < HALF)[None, :]
    if HALF > 0 and not THROUGH:
        a = tl.load(base[:, None] + h[None, :] * STEP, mask=mask_h, other=0.0)
        b = tl.load(base[:, None] + h[None, :] * STEP + SECOND, mask=mask_h, other=0.0)
    if REST > 0:
        mask_r = here[:, None] & (r < REST)[None, :]
        c = tl.load(base[:, None] + 2 * HALF + r[None, :], mask=mask_r, other=0.0)
    if SLOPING:
        slope = tl.load(slopes + head, mask=here, other=0.0) * LOG2E
    by = scale * LOG2E
    after = 1.0 if CAPPED or SLOPING else by  # plain scores are scaled where the best is taken off, in one instruction
    if THROUGH:
        own = turned + (tl.program_id(0) * (ROWS * SHARED) + m).to(tl.int64) * WIDTH
        mask_q = here[:, None] & (d < WIDTH)[None, :]
        if REST > 0:
            tl.store(own[:, None] + 2 * HALF + r[None, :], c, mask=mask_r)
    top = tl.full([ROWS * SHARED], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * SHARED], tl.float32)
    out = tl.zeros([ROWS * SHARED, WIDE], tl.float32)
    for number in range(tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)):
        run = tl.load(pieces + number * 4).to(tl.int64)
        begin = tl.load(pieces + number * 4 + 1)
        end = tl.load(pieces + number * 4 + 2)
        where = tl.load(pieces + number * 4 + 3) + entry
        shift = tl.load(reads + where * 3, mask=here, other=0)
        limit = tl.minimum(tl.load(reads + where * 3 + 1, mask=here, other=0), end)  # what is no row sees nothing
        position = tl.load(reads + where * 3 + 2, mask=here, other=0)
        if THROUGH:  # read again, so that the loops below need not hold them
            a = tl.load(base[:, None] + h[None, :] * STEP, mask=mask_h, other=0.0)
            b = tl.load(base[:, None] + h[None, :] * STEP + SECOND, mask=mask_h, other=0.0)
        if HALF > 0:
            x = tl.load(cos + shift[:, None] * HALF + h[None, :], mask=mask_h, other=0.0)
            y = tl.load(sin + shift[:, None] * HALF + h[None, :], mask=mask_h, other=0.0)
            turned_a = (a.to(tl.float32) * x + b.to(tl.float32) * y).to(keys.dtype.element_ty)  # by minus the shift
            turned_b = (b.to(tl.float32) * x - a.to(tl.float32) * y).to(keys.dtype.element_ty)
        if THROUGH:
            tl.debug_barrier()  # every thread has read those of the piece before
            tl.store(own[:, None] + h[None, :] * STEP, turned_a, mask=mask_h)
            tl.store(own[:, None] + h[None, :] * STEP + SECOND, turned_b, mask=mask_h)
            tl.debug_barrier()
            q = tl.load(own[:, None] + d[None, :], mask=mask_q, other=0.0)
        whole = begin  # up to here every row sees all
        if SPLIT and end - begin >= LONG:
            whole += (tl.maximum(tl.min(tl.where(here, limit, end)), begin) - begin) // SLOTS * SLOTS
        for masked in tl.static_range(1 - SPLIT, 2):
            for t in range(whole if masked else begin, end if masked else whole, SLOTS):
                j = t + tl.arange(0, SLOTS)
                read = (j < end) | (masked == 0)
                slot = (run + j) * slot_stride + group * WIDTH
                score = tl.zeros([ROWS * SHARED, SLOTS], tl.float32)
                if THROUGH:
                    key = tl.load(
                        keys + slot[:, None] + d[None, :], mask=read[:, None] & (d < WIDTH)[None, :], other=0.0
                    )
                    score += tl.dot(q, tl.trans(key), input_precision=PRECISION)
                if HALF > 0 and not THROUGH:
                    mask_k = read[:, None] & (h < HALF)[None, :]
                    key = keys + slot[:, None] + h[None, :] * STEP
                    score += tl.dot(turned_a, tl.trans(tl.load(key, mask=mask_k, other=0.0)), input_precision=PRECISION)
                    key += SECOND
                    score += tl.dot(turned_b, tl.trans(tl.load(key, mask=mask_k, other=0.0)), input_precision=PRECISION)
                if REST > 0 and not THROUGH:
                    mask_k = read[:, None] & (r < REST)[None, :]
                    key = tl.load(keys + slot[:, None] + 2 * HALF + r[None, :], mask=mask_k, other=0.0)
                    score += tl.dot(c, tl.trans(key), input_precision=PRECISION)
                distance = stands[:, None] - (position[:, None] + j[None, :])
                if CAPPED or SLOPING:
                    score *= by
                if CAPPED:
                    z = tl.exp2(-tl.abs(score) * (2.0 * LOG2E / cap))
                    score = tl.where(score < 0, -1.0, 1.0) * cap * (1.0 - z) / (1.0 + z)  # cap * tanh(score / cap)
                if SLOPING:
                    score -= slope[:, None] * distance.to(tl.float32)
                if masked:
                    seen = j[None, :] < limit[:, None]
                    if WINDOWED:
                        seen = seen & (distance < window) & (distance > -window)
                    score = tl.where(seen, score, float("-inf"))
                best = tl.maximum(top, tl.max(score, 1) * after)
                level = tl.where(best == float("-inf"), 0.0, best)
                keep = tl.exp2(top - level)
                weight = tl.exp2(score * after - level[:, None])
                total = total * keep + tl.sum(weight, 1)
                value = tl.load(
                    values + slot[:, None] + d[None, :], mask=read[:, None] & (d < WIDTH)[None, :], other=0.0
                )
                out = out * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
                top = best
    some = total > 0
    result = (out / tl.where(some, total, 1.0)[:, None]).to(partial.dtype.element_ty)
    mask_d = here[:, None] & (d < WIDTH)[None, :]
    if DIRECT:
        tl.store(partial + (row * HEADS + head)[:, None] * WIDTH + d[None, :], result, mask=mask_d)
    else:
        place = (first + entry) * HEADS + head
        tl.store(partial + place[:, None] * WIDTH + d[None, :], result, mask=mask_d)
        tl.store(norms + place, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=here)


@triton.jit
def merge(
    partial, norms, order, starts, sinks, out,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, SINKING: tl.constexpr,
):  # fmt: skip
    """The partial results of one row and head, weighed by their log-sum-exp (in base 2)."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDE)
    top, total = float("-inf"), 0.0
    if SINKING:
        top, total = tl.load(sinks + head).to(tl.float32) * LOG2E, 1.0
    mixed = tl.zeros([WIDE], tl.float32)
    last = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), last, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        place = tl.load(order + index, mask=index < last, other=0) * HEADS + head
        norm = tl.load(norms + place, mask=index < last, other=float("-inf"))
        mask = (index < last)[:, None] & (d < WIDTH)[None, :]
        part = tl.load(partial + place[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
        best = tl.maximum(top, tl.max(norm, 0))
        level = tl.where(best == float("-inf"), 0.0, best)
        keep, weight = tl.exp2(top - level), tl.exp2(norm - level)
        mixed = mixed * keep + tl.sum(weight[:, None] * part, 0)
        total = total * keep + tl.sum(weight, 0)
        top = best
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * HEADS + head) * WIDTH + d, mixed.to(out.dtype.element_ty), mask=d < WIDTH)

"""Performs the tree of `attention_tree` on the device: a walk over chunks, and a fold of them.

`walk` serves every query length: a program takes a tile of rows, (token, head of one KV head), and
walks a run of chunks. It either folds them itself or stores each chunk's partial result for `fold`.
Both merge by `_merge`, so the order and the roundings are the same. Launch with
`enable_fp_fusion=False`: where a multiplication and an addition are one rounding it is written so.
"""

# Triton's language: arguments are untyped, constants upper case, and as many as a launch needs.
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0915, PLR0917, FBT003, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _merge(high, total, acc, m, part, a):
    """Merge a chunk (m, part, a) into (high, total, acc): [R], [R], [R, D]; maxima in log2 units.

    A chunk that saw no key (m = -inf, zeros) leaves the state bit for bit as it was.
    """
    new = tl.maximum(high, m)
    base = tl.where(new == -float("inf"), 0.0, new)
    kept = tl.exp2(high - base)
    added = tl.exp2(m - base)
    total = tl.fma(total, kept, part * added)
    acc = tl.fma(acc, kept[:, None], a * added[:, None])
    return new, total, acc


@triton.jit
def _find_request(cu_query_ptr, tile, requests, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The request that `tile` falls to: request b has its tiles from cu[b] * GROUP // ROWS + b.

    Those are at least as many as it needs; the rest exit. The search is that of vLLM's kernel.
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        first = tl.load(cu_query_ptr + middle) * GROUP // ROWS + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _tile_step(
    s, v, ones, key, position, m, part, a, scales, window,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: scores s [R, N], v [N, D] -> (m [R], part [R, ONES], a [R, D]) after it.

    Every tile is masked the same way. `m` is the maximum of raw scores (exact in any order), and
    exp2 takes one fused multiply-add a score.
    """
    exp_scale, cap_in, cap_out = scales
    if SOFTCAP:
        # cap * tanh(x) * log2(e) as cap_out * (1 - 2 / (e^2x + 1)): finite for any x.
        s = cap_out - 2.0 * cap_out / (tl.exp2(s * cap_in) + 1.0)
    seen = key[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (key[None, :] > position[:, None] - window)
    s = tl.where(seen, s, -float("inf"))
    new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(new == -float("inf"), 0.0, new) * exp_scale
    p = tl.exp2(tl.fma(s, exp_scale, -base[:, None]))
    kept = tl.exp2(m * exp_scale - base)
    p = p.to(v.dtype)
    a = tl.dot(p, v, a * kept[:, None])
    part = tl.dot(p, ones, part * kept[:, None])
    return new, part, a


@triton.jit
def _span(
    seq_len, first_position, last_position, window,
    CHUNK: tl.constexpr, KEY_TILE: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """(from, to, first chunk, chunks, sharing): this program's tiles of keys, its rows' chunks.

    The tiles [from, to) are those that its rows see, or its share of them among `sharing` programs.
    """
    PER: tl.constexpr = CHUNK // KEY_TILE
    low = 0
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0) // KEY_TILE
    high = tl.cdiv(tl.minimum(last_position + 1, seq_len), KEY_TILE)
    first = low // PER
    chunks = tl.cdiv(high, PER) - first
    sharing = 1
    if SPLIT:
        share = tl.cdiv(chunks, tl.num_programs(2))
        sharing = tl.cdiv(chunks, share)
        mine = first + tl.program_id(2) * share
        low = tl.maximum(low, mine * PER)
        high = tl.minimum(high, (mine + share) * PER)
    return low, high, first, chunks, sharing


@triton.jit
def _pages(table, first, seq_len, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr, TMA: tl.constexpr):
    """Cache blocks of the keys first .. first + KEY_TILE: [KEY_TILE], or the one block of all."""
    if TMA:
        page = tl.load(table + first // BLOCK, mask=first < seq_len, other=0)
    else:
        key = first + tl.arange(0, KEY_TILE)
        page = tl.load(table + key // BLOCK, mask=key < seq_len, other=0)
    return page


@triton.jit
def _load_tile(
    source, page, first, seq_len, kv_head, strides,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    TMA: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Keys or values first .. first + KEY_TILE of one request: [KEY_TILE, PADDED].

    `strides` are those of cache block, slot and KV head. With ZERO, slots past `seq_len` read as 0:
    a masked key has weight 0, but 0 * NaN is NaN.
    """
    block_stride, slot_stride, head_stride = strides
    key = first + tl.arange(0, KEY_TILE)
    if TMA:
        # One box of one block: BLOCK is a multiple of KEY_TILE.
        x = source.load([page * BLOCK + first % BLOCK, kv_head * head_stride])
        if ZERO:
            x = tl.where(key[:, None] < seq_len, x, 0.0)
    else:
        row = page.to(tl.int64) * block_stride + (key % BLOCK) * slot_stride
        column = tl.arange(0, PADDED)
        at = source + kv_head * head_stride + row[:, None] + column[None, :]
        if ZERO:
            x = tl.load(at, mask=(key < seq_len)[:, None] & (column < SIZE)[None, :], other=0.0)
        elif SIZE == PADDED:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    return x


@triton.jit
def _store_chunk(parts, slot, live, m, part, a, PADDED: tl.constexpr):
    """Put a chunk's partial result away: `slot` [R] in m and sum, rows of PADDED in acc."""
    m_ptr, sum_ptr, acc_ptr = parts
    column = tl.arange(0, PADDED)
    tl.store(m_ptr + slot, m, mask=live)
    # All columns of `part` are equal, so a maximum takes one out exactly.
    tl.store(sum_ptr + slot, tl.max(part, 1), mask=live)
    tl.store(acc_ptr + slot[:, None] * PADDED + column[None, :], a, mask=live[:, None])


@triton.jit
def _fold_rows(
    parts, slot, live, first, chunks,
    PADDED: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge the chunks first .. first + chunks that programs stored for these rows, ascending.

    AHEAD are loaded at a time, since a load takes far longer than a merge; one past the last reads
    as a chunk that saw no key. Reads past the first cache, which other programs do not write to.
    """
    m_ptr, sum_ptr, acc_ptr = parts
    column = tl.arange(0, PADDED)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for begin in range(first, first + chunks, AHEAD):
        for i in tl.static_range(AHEAD):
            at = slot + begin + i
            there = live & (begin + i < first + chunks)
            m = tl.load(m_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
            part = tl.load(sum_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
            a_at = acc_ptr + at[:, None] * PADDED + column[None, :]
            a = tl.load(a_at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            top, total, acc = _merge(top, total, acc, m, part, a)
    return total, acc


@triton.jit
def _advance(
    t, low, q, ones, page, chunk, done, sources, strides, parts, slot, live, position, table,
    seq_len, kv_head, scales, window,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    KEY_TILE: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, ZERO: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Tile `t`: chunk = (m, part, a), the open one; done = (top, total, acc), those folded."""
    first = t * KEY_TILE
    m, part, a = chunk
    top, total, acc = done
    k = _load_tile(
        sources[0], page, first, seq_len, kv_head, strides[0],
        SIZE, PADDED, BLOCK, KEY_TILE, TMA, ZERO=False,
    )  # fmt: skip
    v = _load_tile(
        sources[1], page, first, seq_len, kv_head, strides[1],
        SIZE, PADDED, BLOCK, KEY_TILE, TMA, ZERO=ZERO,
    )  # fmt: skip
    # Of the next tile, a step ahead: the address of a key waits for no other load then.
    page = _pages(table, first + KEY_TILE, seq_len, BLOCK, KEY_TILE, TMA)
    s = tl.dot(q, tl.trans(k))
    # The chunk before is put away here, not after its own last tile: Triton 3.6 leaves the product
    # with V in flight there and inserts no wait before this branch (seen in its TTGIR for sm_90).
    if (first % CHUNK == 0) & (t > low):
        if SPLIT:
            at = slot + first // CHUNK - 1
            _store_chunk(parts, at, live, m * scales[0], part, a, PADDED)
        else:
            top, total, acc = _merge(top, total, acc, m * scales[0], tl.max(part, 1), a)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        part = tl.zeros([ROWS, ONES], tl.float32)
        a = tl.zeros([ROWS, PADDED], tl.float32)
    key = first + tl.arange(0, KEY_TILE)
    chunk = _tile_step(s, v, ones, key, position, m, part, a, scales, window, SOFTCAP, WINDOWED)
    return page, chunk, (top, total, acc)


@triton.jit
def _store_rows(out, used, total, acc):
    # + 0.0 makes one zero of two: a rescaled -0.0 may or may not have met a masked tile.
    tl.store(out, (acc / total[:, None] + 0.0).to(out.dtype.element_ty), mask=used)


_VARYING = ("requests", "min_query", "max_query", "window", "part_chunks", "table_row")


@triton.jit(do_not_specialize=list(_VARYING))  # or a step of other counts would compile anew
def walk(
    q_ptr, k_source, v_source, out_ptr, m_ptr, sum_ptr, acc_ptr, tickets_ptr,
    table_ptr, cu_query_ptr, seq_lens_ptr, exp_scale, cap_in, cap_out,
    requests, min_query, max_query, window, part_chunks,
    q_token, q_head, out_token, out_head, k_block, k_slot, k_head, v_block, v_slot, v_head,
    table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, KEY_TILE: tl.constexpr, ONES: tl.constexpr,
    ROWS: tl.constexpr, ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, TICKET: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, splits); requests of other than min_query..max_query tokens exit.

    ONE_TILE: a request's rows fit one tile, so the tile's number is the request's. Partial results
    (SPLIT) go to m, sum: [requests * max_query, HEADS, part_chunks] and acc: [..., PADDED]. TICKET
    (of ONE_TILE alone): the program that is last to store folds them, in the order of the chunks
    whoever it is; tickets: int32 [requests, KV heads], zero before and after.
    """
    # Long rows first: a causal prefill's last tiles walk the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tile if ONE_TILE else _find_request(cu_query_ptr, tile, requests, GROUP, ROWS)
    start = tl.load(cu_query_ptr + request)
    query_len = tl.load(cu_query_ptr + request + 1) - start
    row0 = 0 if ONE_TILE else (tile - (start * GROUP // ROWS + request)) * ROWS
    if (query_len < min_query) | (query_len > max_query) | (row0 >= query_len * GROUP):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    row = row0 + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = token < query_len
    position = seq_len - query_len + token
    last = seq_len - query_len + tl.minimum((row0 + ROWS - 1) // GROUP, query_len - 1)
    low, high, first_chunk, chunks, sharing = _span(
        seq_len, seq_len - query_len + row0 // GROUP, last, window, CHUNK, KEY_TILE, WINDOWED, SPLIT
    )
    if low >= high:
        return
    column = tl.arange(0, PADDED)
    used = live[:, None] & (column < SIZE)[None, :]
    q_row = (start + token).to(tl.int64) * q_token + head * q_head
    q = tl.load(q_ptr + q_row[:, None] + column[None, :], mask=used, other=0.0)
    ones = tl.full([KEY_TILE, ONES], 1.0, tl.float32).to(q.dtype)
    table = table_ptr + request.to(tl.int64) * table_row
    slot = ((request * max_query + token).to(tl.int64) * HEADS + head) * part_chunks
    sources = (k_source, v_source)
    strides = ((k_block, k_slot, k_head), (v_block, v_slot, v_head))
    parts = (m_ptr, sum_ptr, acc_ptr)
    scales = (exp_scale, cap_in, cap_out)
    chunk = (
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS, ONES], tl.float32),
        tl.zeros([ROWS, PADDED], tl.float32),
    )
    done = (
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, PADDED], tl.float32),
    )
    page = _pages(table, low * KEY_TILE, seq_len, BLOCK, KEY_TILE, TMA)
    # A box comes whole: only the tile that `seq_len` cuts is zeroed past it, apart from the loop,
    # which would otherwise take every tile through registers.
    middle = tl.minimum(high, seq_len // KEY_TILE) if TMA else high
    for t in range(low, middle):
        page, chunk, done = _advance(
            t, low, q, ones, page, chunk, done, sources, strides, parts, slot, live, position,
            table, seq_len, kv_head, scales, window, SIZE, PADDED, BLOCK, CHUNK, KEY_TILE, ONES,
            ROWS, SPLIT, TMA, not TMA, SOFTCAP, WINDOWED,
        )  # fmt: skip
    if TMA:
        if middle < high:
            page, chunk, done = _advance(
                middle, low, q, ones, page, chunk, done, sources, strides, parts, slot, live,
                position, table, seq_len, kv_head, scales, window, SIZE, PADDED, BLOCK, CHUNK,
                KEY_TILE, ONES, ROWS, SPLIT, TMA, True, SOFTCAP, WINDOWED,
            )  # fmt: skip
    m, part, a = chunk
    out_row = (start + token).to(tl.int64) * out_token + head * out_head
    out = out_ptr + out_row[:, None] + column[None, :]
    if SPLIT:
        at = slot + (high - 1) * KEY_TILE // CHUNK
        _store_chunk(parts, at, live, m * exp_scale, part, a, PADDED)
        if TICKET:
            tl.debug_barrier()  # all of this program has stored before its ticket says so
            mine = tickets_ptr + request * tl.num_programs(1) + kv_head
            if tl.atomic_add(mine, 1, sem="acq_rel") == sharing - 1:
                tl.store(mine, 0)
                total, acc = _fold_rows(
                    parts, slot, live, first_chunk, chunks, PADDED, ROWS, AHEAD
                )  # fmt: skip
                _store_rows(out, used, total, acc)
    else:
        _, total, acc = _merge(done[0], done[1], done[2], m * exp_scale, tl.max(part, 1), a)
        _store_rows(out, used, total, acc)


@triton.jit(do_not_specialize=list(_VARYING[1:5]))
def fold(
    out_ptr, m_ptr, sum_ptr, acc_ptr, cu_query_ptr, seq_lens_ptr,
    min_query, max_query, window, part_chunks, out_token, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    WINDOWED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge what `walk` stored, a row a program. Grid (requests * max_query, HEADS)."""
    request = tl.program_id(0) // max_query
    token = tl.program_id(0) % max_query
    head = tl.program_id(1)
    start = tl.load(cu_query_ptr + request)
    query_len = tl.load(cu_query_ptr + request + 1) - start
    if (query_len < min_query) | (query_len > max_query) | (token >= query_len):
        return
    position = tl.load(seq_lens_ptr + request) - query_len + token
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // CHUNK
    chunks = position // CHUNK + 1
    column = tl.arange(0, PADDED)
    one = tl.arange(0, 1)
    slot = (tl.program_id(0).to(tl.int64) * HEADS + head) * part_chunks + one
    parts = (m_ptr, sum_ptr, acc_ptr)
    total, acc = _fold_rows(parts, slot, one == 0, first, chunks - first, PADDED, 1, AHEAD)
    out_row = (start + token).to(tl.int64) * out_token + head * out_head
    out = out_ptr + out_row + one[:, None] + column[None, :]
    _store_rows(out, (column < SIZE)[None, :], total, acc)

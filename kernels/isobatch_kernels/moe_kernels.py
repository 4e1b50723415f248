"""Performs a mixture of experts in Triton: routing, the grouped matmul, and the combination.

In each of them what one token gets is computed in an order of its own: from its own scores, from
its own chain over K (`matmul_kernels`), from its own slots. Neighbours decide only which tile of
which program it stands in.
"""

# Triton's arguments have no Python types, are many, and sizes are in capitals:
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from isobatch_kernels.matmul_kernels import _fold, _place


@triton.jit
def route_kernel(
    logits, weights, ids, E, logits_stride,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program, by one warp: scores, then TOP_K times the best expert that is left.

    logits [T, E] -> weights [T, TOP_K] float32, ids [T, TOP_K] int32, best first, of equal scores
    the lower expert first; a NaN score comes last. BLOCK >= E and SLOTS >= TOP_K: powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    x = tl.load(logits + token * logits_stride + expert, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        raised = tl.exp(x - tl.max(x, axis=0))
        score = raised / tl.sum(raised, axis=0)
    left = tl.where(score >= 0.0, score, -1.0)  # false of a NaN alone
    left = tl.where(inside, left, -2.0)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.float32)
    which = tl.zeros((SLOTS,), tl.int32)
    total = 0.0
    for number in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, axis=0), expert, BLOCK), axis=0)
        value = tl.sum(tl.where(expert == best, score, 0.0), axis=0)
        chosen = tl.where(slot == number, value, chosen)
        which = tl.where(slot == number, best, which)
        total += value
        left = tl.where(expert == best, -2.0, left)
    if RENORMALIZE:
        chosen = chosen / total
    tl.store(weights + token * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, which, mask=slot < TOP_K)


@triton.jit(do_not_specialize=["tiles"])
def grouped_kernel(
    x, w, y, order, tile_expert, tile_start, tile_stop, tiles, N, K,
    x_stride, w_expert_stride, w_stride, y_stride,
    SLOTS_PER_ROW: tl.constexpr, WHOLE_K: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Slots of one expert a tile: y[slot] = x[slot // SLOTS_PER_ROW] w[expert]^T.

    order [slots] lists the slots by expert; tile i covers order[tile_start[i] : tile_stop[i]], at
    most TOKENS of them, or none. w is [E, N, K], or where TMA a descriptor of [E * N, K] in blocks
    [FEATURES, DEPTH]; x [rows, K], y [slots, N]. Grid: tiles times feature tiles.
    """
    tile, feature = _place(tl.program_id(0), tiles * TOKENS, N, TOKENS, FEATURES, GROUP)
    start = tl.load(tile_start + tile)
    stop = tl.load(tile_stop + tile)
    if start >= stop:
        return
    expert = tl.load(tile_expert + tile)
    at = start + tl.arange(0, TOKENS)
    slot = tl.load(order + at, mask=at < stop, other=0)
    f = feature * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, DEPTH)
    x_at = x + (slot // SLOTS_PER_ROW).to(tl.int64)[:, None] * x_stride + k[None, :]
    if not TMA:
        w_at = w + expert.to(tl.int64) * w_expert_stride
        w_at = w_at + f.to(tl.int64)[:, None] * w_stride + k[None, :]
    acc = tl.zeros((FEATURES, TOKENS) if SWAP else (TOKENS, FEATURES), tl.float32)
    for depth in range(0, K, DEPTH):
        x_inside = at[:, None] < stop
        if not WHOLE_K:
            x_inside = x_inside & (k[None, :] < K - depth)
        x_tile = tl.load(x_at, mask=x_inside, other=0.0)
        if TMA:
            # A tile may reach into the next expert's rows: they end up outside of the mask below.
            w_tile = w.load([expert * N + feature * FEATURES, depth])
        else:
            w_inside = f[:, None] < N
            if not WHOLE_K:
                w_inside = w_inside & (k[None, :] < K - depth)
            w_tile = tl.load(w_at, mask=w_inside, other=0.0)
            w_at += DEPTH
        acc = _fold(x_tile, w_tile, acc, SWAP)
        x_at += DEPTH
    slot_at = slot.to(tl.int64) * y_stride
    if SWAP:
        y_at = y + slot_at[None, :] + f[:, None]
        inside = (at[None, :] < stop) & (f[:, None] < N)
    else:
        y_at = y + slot_at[:, None] + f[None, :]
        inside = (at[:, None] < stop) & (f[None, :] < N)
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    y, weights, out, H, y_stride, out_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = the sum over slots s, in order, of weights[t, s] * y[t * TOP_K + s].

    y [T * TOP_K, H], weights [T, TOP_K] float32, out [T, H]; a chain of float32 multiply-adds from
    +0, rounded once. Grid: (T, blocks of H).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    acc = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = token * TOP_K + slot
        value = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + row)
        acc = tl.fma(tl.broadcast_to(weight, (BLOCK,)), value, acc)
    tl.store(out + token * out_stride + column, acc.to(out.dtype.element_ty), mask=inside)

"""Performs y = x W^T (+ b) in Triton: two kernels, whose every schedule adds in plain K order.

Each output element is one chain of MMA steps over K, started from +0. Tiles, warps, stages, the
operand that feeds the MMA's M side and the order of tiles are free: none of them can reach it.
"""

# Triton's arguments have no Python types, are many, and sizes are in capitals:
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _place(index, M, N, TOKENS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr):
    """(token tile, feature tile) of `index`; GROUP token tiles in a row share weights in L2."""
    token_tiles = tl.cdiv(M, TOKENS)
    feature_tiles = tl.cdiv(N, FEATURES)
    band = index // (GROUP * feature_tiles)
    inside = index % (GROUP * feature_tiles)
    width = tl.minimum(token_tiles - band * GROUP, GROUP)
    return band * GROUP + inside % width, inside // width


@triton.jit
def _fold(x, w, acc, SWAP: tl.constexpr):
    """One step of the chain: x [TOKENS, DEPTH] and w [FEATURES, DEPTH] into acc."""
    # A product commutes, so which operand is the MMA's M side does not reach the bits.
    return tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)


@triton.jit
def _store(
    acc, y, bias, token, feature, M, N, y_stride,
    SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Round acc (transposed where SWAP) once and write the part of it that is inside of y."""
    t = token * TOKENS + tl.arange(0, TOKENS)
    f = feature * FEATURES + tl.arange(0, FEATURES)
    if HAS_BIAS:
        b = tl.load(bias + f, mask=f < N, other=0.0).to(tl.float32)
        acc += b[:, None] if SWAP else b[None, :]
    t_at = t.to(tl.int64) * y_stride
    if SWAP:
        at = y + t_at[None, :] + f[:, None]
        inside = (t[None, :] < M) & (f[:, None] < N)
    else:
        at = y + t_at[:, None] + f[None, :]
        inside = (t[:, None] < M) & (f[None, :] < N)
    tl.store(at, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def pointer_kernel(
    x, w, bias, y, M, N, K, x_stride, w_stride, y_stride,
    HAS_BIAS: tl.constexpr, WHOLE_K: tl.constexpr, SWAP: tl.constexpr, TOKENS: tl.constexpr,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile a program, by masked loads: takes any stride and alignment.

    x [M, K], w [N, K], bias [N] or unused, y [M, N], strides in elements; grid: all tiles.
    WHOLE_K says that DEPTH divides K. Where it does not, zeros fill both operands: they add +0.
    """
    token, feature = _place(tl.program_id(0), M, N, TOKENS, FEATURES, GROUP)
    t = token * TOKENS + tl.arange(0, TOKENS)
    f = feature * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, DEPTH)
    x_at = x + t.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + f.to(tl.int64)[:, None] * w_stride + k[None, :]
    acc = tl.zeros((FEATURES, TOKENS) if SWAP else (TOKENS, FEATURES), tl.float32)
    for start in range(0, K, DEPTH):
        if WHOLE_K:
            x_tile = tl.load(x_at, mask=t[:, None] < M, other=0.0)
            w_tile = tl.load(w_at, mask=f[:, None] < N, other=0.0)
        else:
            inside = k[None, :] < K - start
            x_tile = tl.load(x_at, mask=(t[:, None] < M) & inside, other=0.0)
            w_tile = tl.load(w_at, mask=(f[:, None] < N) & inside, other=0.0)
        acc = _fold(x_tile, w_tile, acc, SWAP)
        x_at += DEPTH
        w_at += DEPTH
    _store(acc, y, bias, token, feature, M, N, y_stride, SWAP, HAS_BIAS, TOKENS, FEATURES)


@triton.jit
def _tma_tile(
    x, w, bias, y, M, N, K, y_stride, index,
    HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tile `index` of y, operands loaded by tensor descriptors that fill the outside with zeros."""
    token, feature = _place(index, M, N, TOKENS, FEATURES, GROUP)
    acc = tl.zeros((FEATURES, TOKENS) if SWAP else (TOKENS, FEATURES), tl.float32)
    for start in range(0, K, DEPTH):
        x_tile = x.load([token * TOKENS, start])
        w_tile = w.load([feature * FEATURES, start])
        acc = _fold(x_tile, w_tile, acc, SWAP)
    _store(acc, y, bias, token, feature, M, N, y_stride, SWAP, HAS_BIAS, TOKENS, FEATURES)


@triton.jit(do_not_specialize=["M"])
def tma_kernel(
    x, w, bias, y, M, N, K, y_stride,
    HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PERSISTENT: tl.constexpr, TOKENS: tl.constexpr,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """By tensor descriptors of x in blocks [TOKENS, DEPTH] and of w in [FEATURES, DEPTH].

    bias [N] or unused, y [M, N] a pointer; grid: all tiles, or where PERSISTENT any number of
    programs, which share the tiles out among them.
    """
    if PERSISTENT:
        tiles = tl.cdiv(M, TOKENS) * tl.cdiv(N, FEATURES)
        # Flattened, the loads of the next tile start under the stores of this one.
        for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tma_tile(
                x, w, bias, y, M, N, K, y_stride, index,
                HAS_BIAS, SWAP, TOKENS, FEATURES, DEPTH, GROUP,
            )  # fmt: skip
    else:
        _tma_tile(
            x, w, bias, y, M, N, K, y_stride, tl.program_id(0),
            HAS_BIAS, SWAP, TOKENS, FEATURES, DEPTH, GROUP,
        )  # fmt: skip

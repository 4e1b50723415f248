"""Performs rotary embedding (Su et al. 2021), NeoX style: elementwise, no sum.

A pair (a, b) turns to (a cos - b sin, b cos + a sin), each product and the difference rounded in
float32, then once to the tensor's dtype.
"""

# Triton's language: arguments are untyped, constants upper case, and as many as a launch needs.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

TREE = "rope/neox/float32/v1"
_HEADS = 8  # heads a program


def rope_reference(positions: torch.Tensor, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """positions: [T], x: [T, H, D], cos_sin: [P, R], R <= D -> x turned, in x.dtype.

    A row of `cos_sin` holds R / 2 cosines, then R / 2 sines; columns of x past R stay.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


@triton.jit
def _turn_heads(
    x_ptr, y_ptr, x_token, x_head, heads, token, block, cos, sin,
    SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turn HEADS heads of one token; columns past 2 * HALF are copied."""
    head = block * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    at = x_ptr + token * x_token + head[:, None] * x_head + column[None, :]
    to = y_ptr + (token * heads + head[:, None]) * SIZE + column[None, :]
    used = (head < heads)[:, None] & (column < HALF)[None, :]
    a = tl.load(at, mask=used, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=used, other=0.0).to(tl.float32)
    tl.store(to, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=used)
    tl.store(to + HALF, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=used)
    if 2 * HALF < SIZE:
        for start in tl.static_range(2 * HALF, SIZE, PADDED):
            rest = (head < heads)[:, None] & (start + column < SIZE)[None, :]
            tl.store(to + start, tl.load(at + start, mask=rest), mask=rest)


@triton.jit
def _rope_kernel(
    positions_ptr, q_ptr, k_ptr, q_out, k_out, table_ptr, q_token, q_head, k_token, k_head,
    table_row, q_heads, k_heads, q_blocks,
    SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of HEADS heads of q, then of k)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = tl.arange(0, PADDED)
    inside = column < HALF
    row = table_ptr + tl.load(positions_ptr + token) * table_row
    cos = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if block < q_blocks:
        _turn_heads(
            q_ptr, q_out, q_token, q_head, q_heads, token, block, cos, sin,
            SIZE, HALF, PADDED, HEADS,
        )  # fmt: skip
    else:
        _turn_heads(
            k_ptr, k_out, k_token, k_head, k_heads, token, block - q_blocks, cos, sin,
            SIZE, HALF, PADDED, HEADS,
        )  # fmt: skip


def rope(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` [T, H, D] and `key` [T, G, D] turned by the rows `positions` [T] of `cos_sin` [P, R].

    Heads may be strided, as those of a fused projection are. Positions (int64) must lie in 0..P-1:
    they are not read back to check. Raises `ValueError` for another shape, dtype, stride or device.
    """
    _check(positions, query, key, cos_sin)
    turned = (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(key.shape, dtype=key.dtype, device=key.device),
    )
    tokens, half = positions.shape[0], cos_sin.shape[1] // 2
    if tokens:
        blocks = [triton.cdiv(x.shape[1], _HEADS) for x in (query, key)]
        _rope_kernel[(tokens, sum(blocks))](
            positions, query, key, *turned, cos_sin, query.stride(0), query.stride(1),
            key.stride(0), key.stride(1), cos_sin.stride(0), query.shape[1], key.shape[1],
            blocks[0], SIZE=query.shape[2], HALF=half, PADDED=triton.next_power_of_2(half),
            HEADS=_HEADS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return turned


def _check(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    tokens = positions.shape[0] if positions.dim() == 1 else -1
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 3 or x.shape[0] != tokens or x.stride(2) != 1 or 0 in x.shape[1:]:
            raise ValueError(
                f"rope: {name} is {tuple(x.shape)} with strides {x.stride()}, positions "
                f"{tuple(positions.shape)}; need [T, H, D] with contiguous heads, and [T]"
            )
    if query.shape[2] != key.shape[2] or query.dtype != key.dtype:
        raise ValueError(
            f"rope: heads of {query.shape[2]} {query.dtype} beside {key.shape[2]} {key.dtype}"
        )
    if positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"rope: positions are {positions.dtype}, not contiguous int64")
    width = cos_sin.shape[1] if cos_sin.dim() == 2 else -1
    if not 0 < width <= query.shape[2] or width % 2 or cos_sin.stride(1) != 1:
        raise ValueError(f"rope: cos_sin is {tuple(cos_sin.shape)} for heads of {query.shape[2]}")
    if not positions.device == query.device == key.device == cos_sin.device:
        raise ValueError(f"rope: on {[t.device for t in (positions, query, key, cos_sin)]}")

"""Performs rotary embedding (Su et al. 2021), NeoX style, in place: elementwise, no sum.

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
def _rope_kernel(
    positions_ptr, x_ptr, table_ptr, x_token, x_head, table_row, heads,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    inside = column < HALF
    row = table_ptr + tl.load(positions_ptr + token) * table_row
    cos = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = x_ptr + token * x_token + head[:, None] * x_head + column[None, :]
    used = (head < heads)[:, None] & inside[None, :]
    a = tl.load(at, mask=used, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=used, other=0.0).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=used)
    tl.store(at + HALF, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=used)


def rope(positions: torch.Tensor, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Turn `x` [T, H, D] in place by the rows `positions` [T] (int64) of `cos_sin` [P, R].

    Positions must lie in 0..P-1: they are not read back to check. Returns x. Raises `ValueError`
    for another shape, dtype, stride or device.
    """
    tokens = positions.shape[0] if positions.dim() == 1 else -1
    if x.dim() != 3 or x.shape[0] != tokens or x.stride(2) != 1:
        raise ValueError(
            f"rope: x is {tuple(x.shape)} with strides {x.stride()}, positions "
            f"{tuple(positions.shape)}; need [T, H, D] with contiguous heads, and [T]"
        )
    if positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"rope: positions are {positions.dtype}, not contiguous int64")
    width = cos_sin.shape[1] if cos_sin.dim() == 2 else -1
    if not 0 < width <= x.shape[2] or width % 2 or cos_sin.stride(1) != 1:
        raise ValueError(f"rope: cos_sin is {tuple(cos_sin.shape)} for heads of {x.shape[2]}")
    if not positions.device == x.device == cos_sin.device:
        raise ValueError(f"rope: on {positions.device}, {x.device} and {cos_sin.device}")
    if tokens:
        _rope_kernel[(tokens, triton.cdiv(x.shape[1], 8))](
            positions, x, cos_sin, x.stride(0), x.stride(1), cos_sin.stride(0), x.shape[1],
            HALF=width // 2, PADDED=triton.next_power_of_2(width // 2), HEADS=8,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return x

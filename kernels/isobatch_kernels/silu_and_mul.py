"""Performs SiLU-and-mul, silu(gate) * up, elementwise: no sum, so no tree but its roundings.

All in float32, rounded once at the end.
"""

# Triton's language: arguments are untyped, constants upper case.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from isobatch_kernels.row_checks import check_rows

BLOCK = 1024
TREE = "silu-and-mul/float32/v1"


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [T, 2 * D], gate before up -> [T, D] in x.dtype, computed in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


@triton.jit
def _silu_and_mul_kernel(x_ptr, y_ptr, x_row, y_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < width
    gate = tl.load(x_ptr + row * x_row + column, mask=used, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + width + column, mask=used, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * y_row + column, y.to(y_ptr.dtype.element_ty), mask=used)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [T, 2 * D], gate before up -> [T, D]. Rows may be strided.

    Raises `ValueError` for another shape, dtype or stride.
    """
    check_rows("silu_and_mul", x)
    if x.shape[1] % 2:
        raise ValueError(f"silu_and_mul: x is {tuple(x.shape)}, not two halves")
    width = x.shape[1] // 2
    y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _silu_and_mul_kernel[(x.shape[0], triton.cdiv(width, BLOCK))](
            x, y, x.stride(0), y.stride(0), width,
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y

"""Performs log-softmax over a vocabulary by a fixed tree of chunks.

The tree of a row: absolute chunks of `CHUNK` columns, each with its own maximum and sum of
exponentials (one reduction inside one program), merged in ascending order in float32 by every
program that writes a part of the row. A row's chunks run in parallel, so a single row of a large
vocabulary fills the card, by the same tree as a row among many.
"""

# Triton's language: arguments are untyped, constants upper case, and as many as a launch needs.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from isobatch_kernels.row_checks import check_rows, settle_rows

CHUNK = 4096
WARPS = 8
TREE = f"log-softmax/chunks-{CHUNK}/warps-{WARPS}/v1"


def log_softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [T, V] -> [T, V] float32, by the shifted logarithm of a sum."""
    wide = x.float()
    shifted = wide - wide.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


@triton.jit
def _chunk_kernel(x_ptr, m_ptr, sum_ptr, x_row, columns, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=-float("inf")).to(tl.float32)
    m = tl.max(x, axis=0)
    base = tl.where(m == -float("inf"), 0.0, m)
    at = row * tl.num_programs(1) + chunk
    tl.store(m_ptr + at, m)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - base), axis=0))


@triton.jit
def _write_kernel(x_ptr, y_ptr, m_ptr, sum_ptr, x_row, y_row, columns, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.num_programs(1)
    top = -float("inf")
    total = 0.0
    for chunk in range(chunks):
        m = tl.load(m_ptr + row * chunks + chunk)
        part = tl.load(sum_ptr + row * chunks + chunk)
        new = tl.maximum(top, m)
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - base) + part * tl.exp(m - base)
        top = new
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * y_row + column, x - top - tl.log(total), mask=inside)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """x: [T, V] -> [T, V] float32. Rows may be strided.

    A row that is -inf throughout, or holds NaN or +inf, gives NaN. Raises `ValueError` for another
    shape, dtype or stride.
    """
    check_rows("log_softmax", x)
    rows, columns = x.shape
    chunks = triton.cdiv(columns, CHUNK)
    y = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    if rows == 0:
        return y
    x = settle_rows(x)
    m, total = torch.empty((2, rows, chunks), dtype=torch.float32, device=x.device)
    options = {"CHUNK": CHUNK, "num_warps": WARPS, "enable_fp_fusion": False}
    _chunk_kernel[(rows, chunks)](x, m, total, x.stride(0), columns, **options)
    _write_kernel[(rows, chunks)](x, y, m, total, x.stride(0), y.stride(0), columns, **options)
    return y

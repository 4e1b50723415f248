"""Performs RMSNorm (Zhang and Sennrich 2019), plain and after adding a residual.

The tree of a row: the columns in blocks summed element by element in order, then one reduction
along the row. It depends on the row's length alone: block, warps and the rows that share a program
follow from it by a committed rule, since autotuning would let the batch pick the order (as a block
size by the number of tokens did in vLLM, its issue 48271).
"""

# Triton's language: arguments are untyped, constants upper case, and as many as a launch needs.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917, SIM108
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from isobatch_kernels.row_checks import check_rows, settle_rows

_MOST_COLUMNS = 8192  # of a block: 64 a thread, kept in registers between the passes


def block_of(width: int) -> tuple[int, int, int]:
    """(rows of a program, columns of its block, warps) for `width`. Changing it changes bits.

    Measured on an H200 at 16,384 rows: 128 columns by 24 heads 54 us (one row a program: 247),
    1,024 columns 34 (57), 4,096 columns 72 (75).
    """
    block = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    if block <= 256:  # heads
        return 1024 // block, block, 2
    return max(1, 4096 // block), block, 4


def tree_name(width: int) -> str:
    """As plans and fingerprints write it."""
    rows, block, warps = block_of(width)
    return f"rms-norm/block-{rows}x{block}/warps-{warps}/v3"


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [T, D], weight: [D] -> [T, D] in x.dtype, computed in float32 and rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, kept_ptr, rows, heads, x_token, x_head, residual_row,
    y_row, columns, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: a block holds the row, which then is read once."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    x_at = x_ptr + row // heads * x_token + row % heads * x_head
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    x = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        used = (column < columns) & (row < rows)
        x = tl.load(x_at + column, mask=used, other=0.0).to(tl.float32)
        if ADD:
            r = tl.load(residual_ptr + row * residual_row + column, mask=used, other=0.0)
            # Rounded before it is normed, as it is kept: the next layer must see the same values.
            kept = (x + r.to(tl.float32)).to(x_ptr.dtype.element_ty)
            tl.store(kept_ptr + row * y_row + column, kept, mask=used)
            x = kept.to(tl.float32)
        total = tl.fma(x, x, total)
    scale = tl.rsqrt(tl.sum(total, axis=1) / columns + eps)[:, None]
    if not WHOLE:
        # A lane may read below what another wrote above: layouts of loads and stores can differ.
        tl.debug_barrier()
    for start in range(0, columns, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        used = (column < columns) & (row < rows)
        if not WHOLE:
            if ADD:
                at = kept_ptr + row * y_row + column
            else:
                at = x_at + column
            x = tl.load(at, mask=used, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y = (x * scale * weight).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * y_row + column, y, mask=used)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [T, D] or [T, H, D], weight: [D] -> x's shape; each row of D by itself.

    Rows may be strided, as the heads of a fused projection are; columns must be contiguous. Raises
    `ValueError` for another shape, dtype, stride or device.
    """
    if x.dim() == 3 and x.shape[1] > 0:
        check_rows("rms_norm", *(x[:, head] for head in {0, x.shape[1] - 1}))
    else:
        check_rows("rms_norm", x)
    _check_weight(x, weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, (y, y), eps)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [T, D], weight: [D] -> (norm of x + residual [T, D], x + residual [T, D]).

    Raises `ValueError` as `rms_norm` does.
    """
    check_rows("add_rms_norm", x, residual)
    _check_weight(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, x {tuple(x.shape)}")
    y, kept = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, (y, kept), eps)
    return y, kept


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous() or weight.device != x.device:
        raise ValueError(
            f"weight is {tuple(weight.shape)} on {weight.device}; need [{x.shape[-1]}], "
            f"contiguous, on {x.device}"
        )


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return
    x = settle_rows(x)
    other = x if residual is None else settle_rows(residual)
    y, kept = outputs
    heads = x.shape[1] if x.dim() == 3 else 1
    each, block, warps = block_of(width)
    _rms_norm_kernel[(triton.cdiv(rows, each),)](
        x, other, weight, y, kept, rows, heads, x.stride(0), x.stride(-2), other.stride(0), width,
        width, eps, ADD=residual is not None, ROWS=each, BLOCK=block, WHOLE=width <= block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip

"""Decides how the row kernels are certified: `rows`' rule, against the kernel in fixed blocks.

Another implementation (vLLM's own, torch's) is tried as a candidate when the caller brings it; it
is admitted only for the row counts where it has this kernel's bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from isobatch_kernels import log_softmax, rms_norm, rope, silu_and_mul
from isobatch_kernels.certification import Operator, Schedule, Tensors
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.rows import Draw, RowFunction, RowOperator, drawn_on, row_operator


@dataclass(frozen=True, slots=True)
class RowShapes:
    """The sizes of one model: what its row kernels are proved on."""

    hidden: int
    intermediate: int
    heads: int
    head_size: int
    vocabulary: int
    dtype: torch.dtype
    max_rows: int


@dataclass(frozen=True, slots=True)
class RowKernel:
    """A row kernel on operands of one shape; `draw` makes rows where its generator is."""

    name: str
    tree: str
    shape: str
    function: RowFunction
    draw: Draw


def row_operators(
    shapes: RowShapes, device: torch.device, others: Mapping[str, RowFunction], seed: int
) -> tuple[Operator, ...]:
    """One operator for each row kernel. `others` maps operator names to rival implementations.

    Names: rms_norm, add_rms_norm, silu_and_mul, rope, log_softmax. A rival takes and
    returns what the kernel's function here does.
    """
    kernels = _kernels(shapes, device)
    unknown = sorted(set(others) - {kernel.name for kernel in kernels})
    if unknown:
        raise ValueError(f"no row kernels named {unknown}")
    operators = []
    for kernel in kernels:
        base = kernel_operator(kernel, shapes.max_rows, device, seed)
        rivals = (Schedule("other", others[kernel.name]),) if kernel.name in others else ()
        operators.append(replace(base, candidates=rivals + base.candidates))
    return tuple(operators)


def kernel_operator(kernel: RowKernel, max_rows: int, device: torch.device, seed: int) -> Operator:
    """What certification needs of `kernel` on `device`, up to `max_rows` rows."""
    draw = drawn_on(device, kernel.draw)
    described = RowOperator(kernel.name, kernel.shape, kernel.function, draw, max_rows)
    return replace(row_operator(described, seed), tree=kernel.tree)


def _kernels(shapes: RowShapes, device: torch.device) -> tuple[RowKernel, ...]:
    """Every row kernel."""
    vocabulary, dtype = shapes.vocabulary, shapes.dtype
    angles = torch.outer(torch.arange(4096.0), 1e4 ** -torch.linspace(0, 1, shapes.head_size // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    heads = (shapes.heads, shapes.heads)

    return (
        *norm_kernels(shapes.hidden, dtype, device),
        activation_kernel(shapes.intermediate, dtype),
        rotary_kernel(heads, shapes.head_size, table, dtype),
        RowKernel(
            "log_softmax",
            log_softmax.TREE,
            f"{vocabulary} {dtype}",
            lambda x: (log_softmax.log_softmax(x),),
            _values(vocabulary, dtype),
        ),
    )


def _values(columns: int, dtype: torch.dtype, count: int = 1) -> Draw:
    return lambda rows, generator: tuple(
        mixed_rows(rows, columns, dtype, generator) for _ in range(count)
    )


def norm_kernels(
    width: int, dtype: torch.dtype, device: torch.device
) -> tuple[RowKernel, RowKernel]:
    """RMSNorm of rows of `width`, plain and after adding a residual."""
    weight = torch.linspace(0.5, 1.5, width).to(dtype).to(device)
    tree, shape = rms_norm.tree_name(width), f"{width} {dtype}"
    return (
        RowKernel(
            "rms_norm",
            tree,
            shape,
            lambda x: (rms_norm.rms_norm(x, weight, 1e-6),),
            _values(width, dtype),
        ),
        RowKernel(
            "add_rms_norm",
            tree,
            shape,
            lambda x, residual: rms_norm.add_rms_norm(x, residual, weight, 1e-6),
            _values(width, dtype, 2),
        ),
    )


def activation_kernel(width: int, dtype: torch.dtype) -> RowKernel:
    """SiLU-and-mul of rows of twice `width`."""
    return RowKernel(
        "silu_and_mul",
        silu_and_mul.TREE,
        f"{width} {dtype}",
        lambda x: (silu_and_mul.silu_and_mul(x),),
        _values(2 * width, dtype),
    )


def rotary_kernel(
    heads: tuple[int, int], head_size: int, table: torch.Tensor, dtype: torch.dtype
) -> RowKernel:
    """Rotary embedding of (query, key) `heads` by `table` [positions, columns]."""
    positions, columns = table.shape

    def draw(rows: int, generator: torch.Generator) -> Tensors:
        at = torch.randint(0, positions, (rows,), generator=generator)
        x = mixed_rows(rows, sum(heads) * head_size, dtype, generator).view(rows, -1, head_size)
        return at, x[:, : heads[0]], x[:, heads[0] :]

    return RowKernel(
        "rope",
        rope.TREE,
        f"{heads[0]}/{heads[1]}x{head_size} table {positions}x{columns} {dtype}",
        lambda p, q, k: rope.rope(p, q, k, table),
        draw,
    )

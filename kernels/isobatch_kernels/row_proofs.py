"""Decides how the row kernels are certified: `rows`' rule, against the kernel in fixed blocks.

Another implementation (vLLM's own, torch's) is tried as a candidate when the caller brings it; it
is admitted only for the row counts where it has this kernel's bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from isobatch_kernels import exponential, log_softmax, rms_norm, rope, silu_and_mul
from isobatch_kernels.certification import Operator, Schedule
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.rows import Draw, RowFunction, RowOperator, row_operator


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


def row_operators(
    shapes: RowShapes, device: torch.device, others: Mapping[str, RowFunction], seed: int
) -> tuple[Operator, ...]:
    """One operator for each row kernel. `others` maps operator names to rival implementations.

    Names: rms_norm, add_rms_norm, silu_and_mul, rope, log_softmax, exponential. A rival takes and
    returns what the kernel's function here does.
    """
    kernels = _kernels(shapes, device)
    unknown = sorted(set(others) - {name for name, _, _, _ in kernels})
    if unknown:
        raise ValueError(f"no row kernels named {unknown}")
    operators = []
    for name, tree, function, draw in kernels:
        described = RowOperator(name, _shape_of(name, shapes), function, draw, shapes.max_rows)
        base = row_operator(described, seed)
        rivals = (Schedule("other", others[name]),) if name in others else ()
        operators.append(replace(base, tree=tree, candidates=rivals + base.candidates))
    return tuple(operators)


def _shape_of(name: str, shapes: RowShapes) -> str:
    sizes = {
        "silu_and_mul": f"{shapes.intermediate}",
        "rope": f"{shapes.heads}x{shapes.head_size}",
        "log_softmax": f"{shapes.vocabulary}",
        "exponential": f"{shapes.vocabulary}",
    }
    return f"{sizes.get(name, str(shapes.hidden))} {shapes.dtype}"


def _kernels(
    shapes: RowShapes, device: torch.device
) -> tuple[tuple[str, str, RowFunction, Draw], ...]:
    """(name, tree, function, draw) of every row kernel."""
    weight = torch.linspace(0.5, 1.5, shapes.hidden).to(shapes.dtype).to(device)
    angles = torch.outer(torch.arange(4096.0), 1e4 ** -torch.linspace(0, 1, shapes.head_size // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)

    def values(columns: int, count: int = 1) -> Draw:
        return lambda rows, generator: tuple(
            mixed_rows(rows, columns, shapes.dtype, generator).to(device) for _ in range(count)
        )

    def turns(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        positions = torch.randint(0, 4096, (rows,), generator=generator)
        width = 2 * shapes.heads * shapes.head_size
        x = mixed_rows(rows, width, shapes.dtype, generator).to(device)
        query, key = x.reshape(rows, 2 * shapes.heads, shapes.head_size).chunk(2, dim=1)
        return positions.to(device), query, key

    def cells(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
        positions = torch.randint(0, 2**20, (rows,), generator=generator)
        return seeds.to(device), positions.to(device)

    return (
        (
            "rms_norm",
            rms_norm.tree_name(shapes.hidden),
            lambda x: (rms_norm.rms_norm(x, weight, 1e-6),),
            values(shapes.hidden),
        ),
        (
            "add_rms_norm",
            rms_norm.tree_name(shapes.hidden),
            lambda x, residual: rms_norm.add_rms_norm(x, residual, weight, 1e-6),
            values(shapes.hidden, 2),
        ),
        (
            "silu_and_mul",
            silu_and_mul.TREE,
            lambda x: (silu_and_mul.silu_and_mul(x),),
            values(2 * shapes.intermediate),
        ),
        ("rope", rope.TREE, lambda p, q, k: rope.rope(p, q, k, table), turns),
        (
            "log_softmax",
            log_softmax.TREE,
            lambda x: (log_softmax.log_softmax(x),),
            values(shapes.vocabulary),
        ),
        (
            "exponential",
            exponential.SAMPLER,
            lambda s, p: (exponential.exponential_rows(s, p, shapes.vocabulary),),
            cells,
        ),
    )

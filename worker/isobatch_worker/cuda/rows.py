"""Decides which inputs the layers' row kernels are certified on."""

from collections.abc import Callable
from typing import Any

import torch
from isobatch_kernels import rms_norm, rope, silu_and_mul
from isobatch_kernels.certification import Tensors
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.rows import Draw, RowOperator, drawn_on

from isobatch_worker.cuda.coverage import Found

_MAX_ROWS = 2048  # proved; one program computes one row, so more rows are more programs
_HEADS = (8, 2)  # of a drawn query and key: a program takes 8 of either


def layer_operators(
    found: Found, dtype: torch.dtype, intermediate: int, device: torch.device
) -> list[RowOperator]:
    """The row kernels of `found`, `intermediate` columns wide where they follow a gate."""

    def values(width: int, count: int) -> Draw:
        return lambda rows, generator: tuple(
            mixed_rows(rows, width, dtype, generator) for _ in range(count)
        )

    described: list[tuple[str, str, Callable[..., Tensors], Draw]] = []
    for width in sorted(found.norms):
        weight = torch.linspace(0.5, 1.5, width, device=device).to(dtype)
        described += [
            ("rms-norm", f"width={width} {dtype}", _norm(weight), values(width, 1)),
            ("add-rms-norm", f"width={width} {dtype}", _add_norm(weight), values(width, 2)),
        ]
    if found.has_activation:
        described.append(
            ("silu-and-mul", f"width={intermediate} {dtype}", _silu, values(2 * intermediate, 1))
        )
    for module in _distinct(found.rotaries):
        described.append((*_rotary(module, dtype),))
    return [
        RowOperator(name, shape, function, drawn_on(device, draw), _MAX_ROWS)
        for name, shape, function, draw in described
    ]


def _norm(weight: torch.Tensor) -> Callable[..., Tensors]:
    return lambda x: (rms_norm.rms_norm(x, weight, 1e-6),)


def _add_norm(weight: torch.Tensor) -> Callable[..., Tensors]:
    return lambda x, residual: rms_norm.add_rms_norm(x, residual, weight, 1e-6)


def _silu(x: torch.Tensor) -> Tensors:
    return (silu_and_mul.silu_and_mul(x),)


def _distinct(modules: list[torch.nn.Module]) -> list[Any]:
    """One module of each size of head and table."""
    return list({(m.head_size, m.cos_sin_cache.shape): m for m in modules}.values())


def _rotary(module: Any, dtype: torch.dtype) -> tuple[str, str, Callable[..., Tensors], Draw]:
    size, table = module.head_size, module.cos_sin_cache

    def run(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Tensors:
        return rope.rope(positions, query, key, table)

    def draw(rows: int, generator: torch.Generator) -> Tensors:
        positions = torch.randint(0, table.shape[0], (rows,), generator=generator)
        x = mixed_rows(rows, sum(_HEADS) * size, dtype, generator).view(rows, -1, size)
        return positions, x[:, : _HEADS[0]], x[:, _HEADS[0] :]

    return "rope", f"size={size} table={tuple(table.shape)} {dtype}", run, draw

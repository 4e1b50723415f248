"""Decides which inputs a schedule is tried on.

Each family makes another kind of rounding visible. Outputs in a short dtype hide most differences
of a float32 accumulation; sums that nearly cancel leave little but the rounding, so that family
finds what random inputs miss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Draw = Callable[[int, int, torch.dtype, torch.Generator], torch.Tensor]
"""(rows, columns, dtype, generator) -> [rows, columns] on the CPU."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of input, by name."""

    name: str
    draw: Draw


def _normal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator)


def _random(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    return _normal(rows, columns, generator).to(dtype)


def _wide_range(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    scale = torch.exp(3 * _normal(rows, columns, generator))
    return (_normal(rows, columns, generator) * scale).to(dtype)


def _cancelling(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Pairs x, -x at shuffled columns, with one small term left over in each row."""
    half = (columns + 1) // 2
    one_side = _normal(rows, half, generator) * torch.exp(_normal(rows, half, generator))
    both = torch.cat((one_side, -one_side), dim=1)[:, :columns]
    both = both[:, torch.randperm(columns, generator=generator)].clone()
    both[:, 0] += 1e-2 * _normal(rows, 1, generator)[:, 0]
    return both.to(dtype)


def _denormal(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    tiny = torch.finfo(dtype).tiny
    return (_normal(rows, columns, generator) * tiny * 0.25).to(dtype)


def _signed_zero(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Mostly zeros of both signs, some units: sums whose sign of zero depends on the order."""
    kind = torch.randint(0, 8, (rows, columns), generator=generator)
    table = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 1.0, -1.0])
    return table[kind].to(dtype)


def _special(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Random rows of which every fourth holds an infinity and every eighth a NaN."""
    x = _random(rows, columns, dtype, generator)
    at = torch.randint(0, columns, (rows,), generator=generator)
    x[torch.arange(0, rows, 4), at[::4]] = float("inf")
    x[torch.arange(0, rows, 8), at[::8]] = float("nan")
    return x


RANDOM = Family("random", _random)
WIDE_RANGE = Family("wide-range", _wide_range)
CANCELLING = Family("cancelling", _cancelling)
DENORMAL = Family("denormal", _denormal)
SIGNED_ZERO = Family("signed-zero", _signed_zero)
SPECIAL = Family("nan-inf", _special)
FAMILIES = (RANDOM, WIDE_RANGE, CANCELLING, DENORMAL, SIGNED_ZERO, SPECIAL)


def mixed_rows(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    families: tuple[Family, ...] = FAMILIES,
) -> torch.Tensor:
    """[rows, columns] whose row r is of family r mod len(families).

    One batch then holds every family, so that a row is also proved against neighbours of other
    kinds (a NaN next to it, say).
    """
    x = torch.empty(rows, columns, dtype=dtype)
    for index, family in enumerate(families):
        own = range(index, rows, len(families))
        if own:
            x[own.start :: own.step] = family.draw(len(own), columns, dtype, generator)
    return x

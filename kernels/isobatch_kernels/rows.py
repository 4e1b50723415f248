"""Decides how a row-wise operator is computed for any number of rows with the bits of one schedule.

A row-wise operator maps tensors of M rows to tensors of M rows, row r of the outputs depending on
row r of the inputs alone, in exact arithmetic. Libraries choose another kernel, and so other bits,
by M. The reference runs the operator on fixed blocks of `BLOCK_ROWS` rows and never on another
count; every other way is a candidate that must prove the same bits, row count by row count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from isobatch_kernels.bits import first_difference, same_bits
from isobatch_kernels.certification import Case, Operator, Proof, Schedule, Tensors

BLOCK_ROWS = 64
"""Rows of a reference block: a constant, since it fixes bits. Large enough that a prefill of many
blocks keeps the library's speed (measured: within 10 % of one call at 2,048 rows)."""

ROWS_PROVED_EACH = 64
"""Rows compared for each row count at least, so that one row alone is tried at many values."""

RowFunction = Callable[..., Tensors]
Draw = Callable[[int, torch.Generator], Tensors]
"""(rows, generator) -> inputs, each with that many rows on dimension 0."""


@dataclass(frozen=True, slots=True)
class RowOperator:
    """A row-wise operator of a loaded model. `function` is the library's own, at any row count.

    `draw` makes inputs on the device that `function` expects. `max_rows` is the most rows one call
    may have, `block_rows` those of a reference block (a constant: it fixes bits). The function may
    write its outputs over its inputs; what it returns counts.
    """

    name: str
    shape: str
    function: RowFunction
    draw: Draw
    max_rows: int
    block_rows: int = BLOCK_ROWS


def drawn_on(device: torch.device, draw: Draw) -> Draw:
    """`draw`, on `device`: what it makes and what it draws with are there."""
    if device.type == "cpu":
        return draw

    def run(rows: int, generator: torch.Generator) -> Tensors:
        seed = int(torch.randint(2**62, (1,), generator=generator))
        with torch.device(device):
            return draw(rows, torch.Generator(device).manual_seed(seed))

    return run


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` [m, ...] with copies of its last row up to `rows`: no value that x has not.

    Copies, not zeros, so that a position or index tensor stays in its domain.
    """
    missing = rows - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x[-1:].expand(missing, *x.shape[1:])))


def run_padded(function: RowFunction, rows: int, inputs: Tensors) -> Tensors:
    """`function` on `inputs` padded to `rows`, cut back to the rows given."""
    count = inputs[0].shape[0]
    return tuple(y[:count] for y in function(*(pad_rows(x, rows) for x in inputs)))


def run_blocks(function: RowFunction, inputs: Tensors, rows: int = BLOCK_ROWS) -> Tensors:
    """The reference: `function` on blocks of exactly `rows` rows, the last one padded."""
    count = inputs[0].shape[0]
    blocks = [
        run_padded(function, rows, tuple(x[at : at + rows].clone() for x in inputs))
        for at in range(0, count, rows)
    ]
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


def row_schedules(function: RowFunction) -> tuple[Schedule, ...]:
    """The candidates of a row-wise operator, best first."""
    return (
        Schedule("direct", function),
        Schedule("padded-2", lambda *inputs: run_padded(function, 2, inputs)),
        Schedule("padded-8", lambda *inputs: run_padded(function, 8, inputs)),
    )


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Row counts to prove: each to `BLOCK_ROWS`, then edges of powers of two, samples and the end.

    A count outside of these runs as reference blocks and a proved remainder.
    """
    each = range(1, min(BLOCK_ROWS, max_rows) + 1)
    edges = {e + d for e in (128, 256, 512, 1024, 2048) for d in (-1, 0, 1)}
    samples = {96, 160, 192, 384, 768, max_rows}
    return (*each, *sorted(r for r in edges | samples if BLOCK_ROWS < r <= max_rows))


def row_operator(operator: RowOperator, seed: int) -> Operator:
    """What certification needs of `operator`; `seed` fixes the inputs drawn."""
    return Operator(
        name=operator.name,
        shape=operator.shape,
        tree=f"blocks-of-{operator.block_rows}",
        candidates=row_schedules(operator.function),
        cases=lambda: _cases(operator, seed),
        self_check=lambda: _self_check(operator, seed),
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _cases(operator: RowOperator, seed: int) -> Iterator[Case]:
    """Cases by row count, those of one count together."""
    generator = _generator(seed)
    counts = row_counts(operator.max_rows)
    pool = max(counts[-1], 2 * operator.block_rows)
    inputs = operator.draw(pool, generator)
    expected = run_blocks(operator.function, inputs, operator.block_rows)
    for count in counts:
        repeats = max(1, -(-ROWS_PROVED_EACH // count))
        starts = torch.randint(0, pool - count + 1, (repeats,), generator=generator).tolist()
        for start in starts:
            rows = slice(start, start + count)
            yield Case(
                domain=count,
                label=f"{count} rows from {start} of seed {seed}",
                inputs=tuple(x[rows] for x in inputs),
                expected=tuple(y[rows] for y in expected),
            )


def _self_check(operator: RowOperator, seed: int) -> str | None:
    """Why a reference block's rows depend on their place or neighbours, or None.

    The same rows are computed in place, turned by an odd number of places, in another order and
    each beside other neighbours; all must have equal bits.
    """
    generator = _generator(seed + 1)
    size = operator.block_rows
    inputs = operator.draw(2 * size, generator)
    rows = tuple(x[:size] for x in inputs)
    others = tuple(x[size:] for x in inputs)
    wanted = _block(operator, rows)
    if not all(map(same_bits, wanted, _block(operator, rows))):
        return "the same block twice gave two results"
    orders = [torch.arange(size).roll(turn) for turn in (1, 7, 31)]
    orders.append(torch.randperm(size, generator=generator))
    for order in orders:
        got = _block(operator, tuple(x[order] for x in rows))
        for mine, y in zip(got, wanted, strict=True):
            if not same_bits(mine, y[order]):
                return f"a row's bits move with its place: {first_difference(mine, y[order])}"
    for kept in (1, 5, size // 2):
        mixed = tuple(torch.cat((x[:kept], o[kept:])) for x, o in zip(rows, others, strict=True))
        for mine, y in zip(_block(operator, mixed), wanted, strict=True):
            if not same_bits(mine[:kept], y[:kept]):
                return f"the bits of {kept} rows move with their neighbours"
    return None


def _block(operator: RowOperator, rows: Tensors) -> Tensors:
    return tuple(y.clone() for y in operator.function(*(x.clone() for x in rows)))


class CertifiedRows:
    """The operator as it serves: for each row count the first admitted schedule, else blocks.

    Counts above a block that were not proved run as whole reference blocks and a remainder by the
    schedule admitted for it: rows are independent of each other, which the self-check proved.
    """

    def __init__(self, function: RowFunction, proof: Proof, block_rows: int) -> None:
        """Bind `proof` to `function`, the very one that was proved, in the blocks of that proof."""
        self._function = function
        self._block_rows = block_rows
        self._choice: dict[int, Schedule] = {}
        for schedule in reversed(row_schedules(function)):
            for count in proof.admitted.get(schedule.name, frozenset()):
                self._choice[count] = schedule
        self.reference_only = False

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Outputs for `inputs`, all [M, ...], M >= 0, with the reference's bits."""
        count = inputs[0].shape[0]
        if count == 0:
            return self._function(*inputs)
        if self.reference_only:
            return run_blocks(self._function, inputs, self._block_rows)
        schedule = self._choice.get(count)
        if schedule is not None:
            return schedule.run(*inputs)
        if count <= self._block_rows:
            return run_blocks(self._function, inputs, self._block_rows)
        return self._whole_blocks_and_remainder(inputs, count)

    def _whole_blocks_and_remainder(self, inputs: Tensors, count: int) -> Tensors:
        whole = count - count % self._block_rows
        parts = [run_blocks(self._function, tuple(x[:whole] for x in inputs), self._block_rows)]
        if whole < count:
            parts.append(self(*(x[whole:] for x in inputs)))
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

"""Decides how a linear is certified: its reference, the inputs, and which schedule at which rows.

The reference is one pointer kernel of one tiling (`matmul.REFERENCE`): its tree is revealed, and
its rows shown to be independent of the batch, before anything is compared with it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from isobatch_kernels.bits import first_difference, same_bits
from isobatch_kernels.certification import Case, Operator, Proof, prove_groups
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.matmul import linear
from isobatch_kernels.matmul_schedules import linear_schedules
from isobatch_kernels.reveal import Matmul, Setting, reveal
from isobatch_kernels.tree import Tree

_EDGES = (24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 192, 255, 256, 257, 384, 512)
ROW_COUNTS = (*range(1, 18), *_EDGES, 1000, 1024, 2048, 4096, 8192)
"""Row counts proved: every small one, the edges of tiles and buckets, and what servers batch to."""

_SELF_CHECK_ROWS = 192


@dataclass(frozen=True, slots=True)
class Linear:
    """What is certified: y = x W^T (+ b) with w [N, K], bias [N] or None, up to `max_rows` rows.

    `tree` is what `tree.linear_tree` declares for the shape. `w` may be the model's own weight or
    one from `probe_rows`; schedules are admitted for its shape, dtype and placement.
    """

    w: torch.Tensor
    bias: torch.Tensor | None
    tree: Tree
    max_rows: int

    @property
    def shape(self) -> str:
        """`NxK dtype`, with `+bias` where there is one."""
        n, k = self.w.shape
        dtype = str(self.w.dtype).removeprefix("torch.")
        return f"{n}x{k} {dtype}{'+bias' * (self.bias is not None)}"


def probe_rows(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """[rows, columns] on `device`: rows of every input family in turn."""
    # The families draw where the current default device is: on the card, a matter of milliseconds.
    with torch.device(device):
        return mixed_rows(rows, columns, dtype, torch.Generator(device).manual_seed(seed))


def linear_operator(
    linear_: Linear, seed: int, rows: Iterable[int] = ROW_COUNTS, *, reference: Matmul = linear
) -> Operator:
    """What certification needs of `linear_`; `seed` fixes the inputs drawn.

    A domain is a row count. `reference` is what all are compared with: exchanged by tests alone.
    """

    def run(x: torch.Tensor) -> torch.Tensor:
        if linear_.bias is None:
            return reference(x, linear_.w)
        return linear(x, linear_.w, linear_.bias)

    return Operator(
        name="linear",
        shape=linear_.shape,
        tree=linear_.tree.name,
        candidates=linear_schedules(linear_.w, linear_.bias),
        cases=lambda: _cases(linear_, run, seed, tuple(rows)),
        self_check=lambda: _self_check(linear_, reference, run, seed),
    )


def prove_each(operator: Operator, serves: Callable[[str, int], bool]) -> Proof:
    """Prove every candidate of `operator` for every domain that it serves.

    The fastest is to be found among all. Raises `CertificationRefused` as `certify` does.
    """
    return prove_groups(operator, ((candidate,) for candidate in operator.candidates), serves)


def _cases(
    linear_: Linear, run: Callable[[torch.Tensor], torch.Tensor], seed: int, rows: tuple[int, ...]
) -> Iterator[Case]:
    """Cases by row count, at places of one shared pool: more of them for few rows."""
    counts = sorted(r for r in rows if r <= linear_.max_rows)
    pool = counts[-1] + 64
    w = linear_.w
    x = probe_rows(pool, w.shape[1], w.dtype, w.device, seed)
    expected = run(x)
    generator = torch.Generator().manual_seed(seed)
    for count in counts:
        places = 1 if count > 64 else 3 if count > 4 else 6
        starts = torch.randint(0, pool - count + 1, (places,), generator=generator).tolist()
        for start in starts:
            own = slice(start, start + count)
            label = f"{count} rows from {start} of seed {seed}"
            yield Case(count, label, (x[own],), (expected[own],))


def _self_check(
    linear_: Linear, reference: Matmul, run: Callable[[torch.Tensor], torch.Tensor], seed: int
) -> str | None:
    """Why the reference has another tree, or rows that depend on their batch, or None."""
    w = linear_.w
    setting = Setting(rows=3, n=w.shape[0], dtype=w.dtype, device=w.device)
    reason = reveal(reference, linear_.tree, setting)
    if reason is not None:
        return f"it adds in another tree: {reason}"
    x = probe_rows(_SELF_CHECK_ROWS, w.shape[1], w.dtype, w.device, seed + 1)
    wanted = run(x)
    orders = [torch.arange(_SELF_CHECK_ROWS).roll(turn) for turn in (0, 1, 31)]
    places = ((5, 1), (100, 1), (3, 16), (47, 33), (61, 70))
    orders += [torch.arange(start, start + count) for start, count in places]
    for order in orders:
        at = order.to(w.device)
        got = run(x[at])
        if not same_bits(got, wanted[at]):
            return f"a row's bits move with its place: {first_difference(got, wanted[at])}"
    return None

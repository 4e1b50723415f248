"""Decides whether a matmul adds in its declared tree, from outputs alone.

The idea is FPRev's (Xie et al., USENIX ATC 2025): of a sum that holds a large value, its negative
and units, the units that meet the large value before its negative does are rounded away; those
that survive lie outside of the smallest subtree that holds the pair. FPRev counts the survivors of
ones in float32. Here outputs are short floats and a row of weights is one probe: each asks either
for units inside of the expected subtree (none may survive) or next to it (all must).

For a chain of groups the pairs (first term, a term of each group) suffice. Let A(j) be the subtree
of the first group and group j. "Inside is lost" says that A(j) holds groups 0..j, "outside
survives" that it lacks group j + 1; so A(1), A(2), ... grow strictly, each by one group. Chunks are
the same argument over again from each chunk's first term.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from isobatch_kernels.tree import Tree

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [M, K], w [N, K]) -> [M, N]."""

_BIG, _UNIT = 2.0**15, 2.0**-14  # weights, exact in bfloat16 and float16
_LIFT = 2.0**14  # activation at the lanes that carry large values
# A product of 2^29 beside products of 2^-14: a float32 or a fused MMA group holds 2^23 to 2^25 of a
# ratio, and all the units of 2^17 terms together stay under half an ulp of the large one.
_FIRST_UNIT_LANE = 2


@dataclass(frozen=True, slots=True)
class _Probe:
    """Large at `first`, its negative at `last`, units where `units`; `survivors` are expected."""

    first: int
    last: int
    units: tuple[range, ...]
    survivors: int
    question: str


def subtree(tree: Tree, first: int, last: int) -> range:
    """The terms of the smallest subtree of `tree` that holds terms `first` < `last`.

    A group is added together with the sum so far, so two terms of one group meet in that sum too.
    """
    chunk = first // tree.chunk
    if last // tree.chunk == chunk:
        end = (last // tree.group + 1) * tree.group
        return range(chunk * tree.chunk, min(tree.terms, end))
    return range(min(tree.terms, (last // tree.chunk + 1) * tree.chunk))


@dataclass(frozen=True, slots=True)
class Setting:
    """What probes are made of: an x [rows, terms] and a w [n, terms], both `dtype` on `device`."""

    rows: int
    n: int
    dtype: torch.dtype
    device: torch.device


def reveal(run: Matmul, tree: Tree, setting: Setting) -> str | None:
    """Why `run` does not add in `tree`, with the probe that shows it; None if it does.

    Calls `run` on operands of the setting's shape as often as the probes need: what it chooses by
    shape or row count is then what it chooses in service. Takes groups of 4 terms or more.
    """
    if tree.group < 4:
        raise ValueError(f"groups of {tree.group} terms leave no lane for units beside the pair")
    probes = tuple(_probes(tree))
    x = torch.ones(setting.rows, tree.terms, dtype=setting.dtype, device=setting.device)
    lanes = torch.arange(tree.terms, device=setting.device) % tree.group
    x[:, lanes < _FIRST_UNIT_LANE] = _LIFT
    for at in range(0, len(probes), setting.n):
        batch = probes[at : at + setting.n]
        answers = run(x, _weights(batch, tree, setting)).double() / _UNIT
        expected = torch.tensor([p.survivors for p in batch], dtype=torch.float64).to(answers)
        wrong = (answers[:, : len(batch)] != expected).nonzero()
        if len(wrong):
            row, which = (int(i) for i in wrong[0])
            got = float(answers[row, which])
            return f"{batch[which].question}: {got:g} of the units survive, not {expected[which]:g}"
    return None


def _probes(tree: Tree) -> Iterator[_Probe]:
    for group in range(0, tree.terms, tree.group):
        last = group + 1
        if last >= tree.terms:
            continue
        for first in sorted({0, group // tree.chunk * tree.chunk}):
            inside = subtree(tree, first, last)
            pair = f"{tree.name}, terms {first} and {last}"
            yield _Probe(first, last, (inside,), 0, f"{pair}, units among terms {_span(inside)}")
            beside = tuple(_beside(tree, inside))
            units = sum(len(_unit_terms(tree, r)) for r in beside)
            if units:
                where = " and ".join(map(_span, beside))
                yield _Probe(first, last, beside, units, f"{pair}, units at terms {where}")


def _beside(tree: Tree, inside: range) -> Iterator[range]:
    """The nearest unit lane before and after `inside`, where there is one."""
    if inside.start > 0:
        yield range(inside.start - 1, inside.start)
    lane = inside.stop + _FIRST_UNIT_LANE
    if lane < tree.terms:
        yield range(lane, lane + 1)


def _span(terms: range) -> str:
    return f"{terms.start}..{terms.stop - 1}" if len(terms) > 1 else str(terms.start)


def _unit_terms(tree: Tree, terms: range) -> list[int]:
    return [term for term in terms if term % tree.group >= _FIRST_UNIT_LANE]


def _weights(probes: tuple[_Probe, ...], tree: Tree, setting: Setting) -> torch.Tensor:
    """[n, terms], a probe a row, the rest zero."""
    lanes = torch.arange(tree.terms) % tree.group >= _FIRST_UNIT_LANE
    probed = torch.zeros(len(probes), tree.terms, dtype=setting.dtype)
    for row, probe in enumerate(probes):
        for terms in probe.units:
            probed[row, terms.start : terms.stop] = lanes[terms.start : terms.stop] * _UNIT
        probed[row, probe.first], probed[row, probe.last] = _BIG, -_BIG
    w = torch.zeros(setting.n, tree.terms, dtype=setting.dtype, device=setting.device)
    w[: len(probes)] = probed.to(setting.device)
    return w

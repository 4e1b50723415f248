"""Decides how a grouped matmul is certified: against the dense linear of each slot's expert.

The dense reference has proved its tree and its independence of the batch (`matmul_operator`), so a
grouped tiling that agrees with it computes a slot as if the token were alone with its expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from isobatch_kernels.bits import first_difference, same_bits
from isobatch_kernels.certification import Case, Operator, Schedule, Tensors
from isobatch_kernels.matmul import Loads, Tiling, linear
from isobatch_kernels.matmul_operator import probe_rows
from isobatch_kernels.moe import (
    GROUPED_REFERENCE,
    group_slots,
    grouped_linear,
    grouped_reference,
)
from isobatch_kernels.reveal import Setting, reveal
from isobatch_kernels.tree import Tree

TOKEN_COUNTS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1024, 2048)

_FEW = (
    Tiling(16, 64, 128, 4, 5, swapped=True),
    Tiling(16, 128, 64, 4, 6, swapped=True),
    Tiling(16, 128, 128, 4, 4, swapped=True),
    Tiling(16, 64, 128, 4, 4, Loads.POINTER, swapped=True),
)
_SOME = (
    Tiling(32, 128, 64, 4, 5, swapped=True),
    Tiling(64, 128, 64, 4, 4, swapped=True),
    Tiling(64, 128, 64, 4, 4),
)
_MANY = (
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 128, 64, 8, 3, Loads.POINTER),
)
GROUPED_TILINGS = (*_FEW, *_SOME, *_MANY, GROUPED_REFERENCE)


def serves_slots(name: str, slots_per_expert: float) -> bool:
    """Whether a tiling is worth trying for that many slots an expert on average."""
    few = {t.name for t in _FEW} if slots_per_expert <= 24 else set()
    some = {t.name for t in _SOME} if slots_per_expert >= 8 else set()
    many = {t.name for t in _MANY} if slots_per_expert >= 48 else set()
    return name in few | some | many or name == GROUPED_REFERENCE.name


@dataclass(frozen=True, slots=True)
class Grouped:
    """What is certified: `grouped_linear` with w [E, N, K] for tokens of `top_k` slots each.

    `slots_per_row` is `top_k` for the first matmul of an expert, 1 for the second.
    """

    w: torch.Tensor
    top_k: int
    slots_per_row: int
    tree: Tree
    max_tokens: int

    @property
    def shape(self) -> str:
        """`E x N x K top k dtype`, and how rows map to slots."""
        experts, n, k = self.w.shape
        dtype = str(self.w.dtype).removeprefix("torch.")
        return f"{experts}x{n}x{k} top{self.top_k}/{self.slots_per_row} {dtype}"

    def rows(self, tokens: int) -> int:
        """Rows of the input for that many tokens."""
        return tokens * self.top_k // self.slots_per_row


def grouped_operator(grouped: Grouped, seed: int) -> Operator:
    """What certification needs of `grouped`; inputs are (x, ids), a domain is a count of tokens."""
    return Operator(
        name="grouped-linear",
        shape=grouped.shape,
        tree=grouped.tree.name,
        candidates=tuple(
            Schedule(tiling.name, _Run(grouped, tiling)) for tiling in GROUPED_TILINGS
        ),
        cases=lambda: _cases(grouped, seed),
        self_check=lambda: _self_check(grouped, seed),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    grouped: Grouped
    tiling: Tiling

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> Tensors:
        w = self.grouped.w
        grouping = group_slots(ids, w.shape[0], self.tiling.tokens)
        return (grouped_linear(x, w, grouping, self.grouped.slots_per_row, self.tiling),)


def draw_ids(tokens: int, experts: int, top_k: int, crowd: int, seed: int) -> torch.Tensor:
    """[tokens, top_k] int32 of distinct experts, all among the first `crowd` of a shuffled list."""
    generator = torch.Generator().manual_seed(seed)
    crowd = max(top_k, min(crowd, experts))
    popular = torch.randperm(experts, generator=generator)[:crowd]
    ranks = torch.rand(tokens, crowd, generator=generator).argsort(dim=1)[:, :top_k]
    return popular[ranks].int()


def _cases(grouped: Grouped, seed: int) -> Iterator[Case]:
    """Tokens spread over all experts, and crowded on few of them."""
    experts, _, k = grouped.w.shape
    for tokens in (t for t in TOKEN_COUNTS if t <= grouped.max_tokens):
        for crowd in (experts, grouped.top_k + 1):
            rows = grouped.rows(tokens)
            x = probe_rows(rows, k, grouped.w.dtype, grouped.w.device, seed + rows)
            ids = draw_ids(tokens, experts, grouped.top_k, crowd, seed).to(x.device)
            expected = grouped_reference(x, grouped.w, ids, grouped.slots_per_row)
            yield Case(
                domain=tokens,
                label=f"{tokens} tokens on {crowd} experts, seed {seed}",
                inputs=(x, ids),
                expected=(expected,),
            )


def _self_check(grouped: Grouped, seed: int) -> str | None:
    """Why the dense reference of one expert has another tree, or moves with its batch, or None."""
    w = grouped.w[0]
    setting = Setting(rows=2, n=w.shape[0], dtype=w.dtype, device=w.device)
    reason = reveal(linear, grouped.tree, setting)
    if reason is not None:
        return f"it adds in another tree: {reason}"
    x = probe_rows(130, w.shape[1], w.dtype, w.device, seed)
    wanted = linear(x, w)
    for own in (slice(0, 1), slice(3, 20), slice(63, 130)):
        got = linear(x[own], w)
        if not same_bits(got, wanted[own]):
            return f"a row's bits move with its batch: {first_difference(got, wanted[own])}"
    return None

"""Decides in which order the products of a dot product are added: the tree of each weight shape.

The tree of a linear follows from (N, K, dtype, arithmetic family) by `linear_tree`, a committed
rule: never from the row count, and never from a timing, so that two replicas cannot differ in it.
"""

from dataclasses import dataclass
from enum import Enum

import torch


class Family(Enum):
    """Which matrix unit adds: two families never share a numerics fingerprint.

    By the model of MMA-Sim (arXiv 2511.10909) one instruction adds a fused group of products and
    the accumulator, aligned to the largest exponent; groups chain. For 16-bit inputs the group is
    16 products on Hopper (`mma.sync` k16 and `wgmma` alike) and 8 on Ampere and Ada. Blackwell is
    modelled as Hopper; it has a family of its own until a card has shown it.
    """

    AMPERE = "sm8x"
    HOPPER = "sm90"
    BLACKWELL = "sm10x"


_GROUPS = {Family.AMPERE: 8, Family.HOPPER: 16, Family.BLACKWELL: 16}


def family_of(capability: tuple[int, int]) -> Family:
    """The family of a CUDA compute capability; ValueError for one that is not modelled."""
    match capability:
        case (8, _):
            return Family.AMPERE
        case (9, 0):
            return Family.HOPPER
        case (10 | 12, _):
            return Family.BLACKWELL
    raise ValueError(f"no arithmetic family is known for compute capability {capability}")


@dataclass(frozen=True, slots=True)
class Tree:
    """`terms` products in K order: fused groups of `group`, chained from +0 inside a chunk.

    `chunk` products make a chunk, a multiple of `group`; chunk sums are added in chunk order. The
    plain tree is one chunk: `chunk >= terms`. A bias is added to the float32 sum, which is rounded
    to the output's dtype once.
    """

    terms: int
    group: int
    chunk: int

    def __post_init__(self) -> None:
        if self.terms < 1 or self.group < 1 or self.chunk < 1 or self.chunk % self.group:
            raise ValueError(f"not a tree: {self}")

    @property
    def is_plain(self) -> bool:
        """Whether all products are one chain."""
        return self.chunk >= self.terms

    @property
    def name(self) -> str:
        """As plans and fingerprints write it."""
        kind = "plain" if self.is_plain else f"chunk{self.chunk}"
        return f"{kind}-k{self.group}"


def plain_tree(terms: int, group: int) -> Tree:
    """All `terms` products in one chain of fused groups."""
    return Tree(terms, group, chunk=-(-terms // group) * group)


def linear_tree(n: int, k: int, dtype: torch.dtype, family: Family) -> Tree:
    """The tree of y = x W^T with W [n, k]: plain, for every shape.

    Measured on an H200 over the shapes of Llama-3.1-8B, Qwen3-0.6B and Qwen3-14B: some schedule of
    the plain tree keeps up with split-K at every row count, so a second tree would buy nothing.
    """
    if n < 1 or k < 1:
        raise ValueError(f"a weight needs rows and columns, got [{n}, {k}]")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"no tree is declared for {dtype}: need bfloat16 or float16")
    return plain_tree(k, _GROUPS[family])

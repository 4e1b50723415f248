from functools import partial

import pytest
import torch
from isobatch_kernels.reveal import Setting, reveal, subtree
from isobatch_kernels.tree import Family, Tree, family_of, linear_tree, plain_tree

from tests.kernels.interpreted.mma_model import linear_in

TERMS = 200  # the last group is not whole
TREES = {
    "plain": plain_tree(TERMS, 16),
    "split in two": Tree(TERMS, 16, 112),
    "chunks of 64": Tree(TERMS, 16, 64),
    "chunks of 32": Tree(TERMS, 16, 32),
    "groups of 8": plain_tree(TERMS, 8),
    "groups of 32": plain_tree(TERMS, 32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("declared", TREES.values(), ids=TREES)
def test_a_tree_is_recognized_and_every_other_told_from_it(
    declared: Tree, dtype: torch.dtype
) -> None:
    setting = Setting(rows=1, n=24, dtype=dtype, device=torch.device("cpu"))

    runs = {tree: partial(linear_in, tree) for tree in TREES.values()}
    agreeing = [tree for tree, run in runs.items() if reveal(run, declared, setting) is None]

    assert agreeing == [declared]


def test_a_difference_in_one_row_alone_is_seen() -> None:
    def by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = linear_in(TREES["plain"], x, w)
        y[2] = linear_in(TREES["split in two"], x[2:3], w)[0]
        return y

    setting = Setting(rows=4, n=32, dtype=torch.bfloat16, device=torch.device("cpu"))
    found = reveal(by_row, TREES["plain"], setting)

    assert found is not None
    assert "units at terms" in found


@pytest.mark.parametrize(
    ("pair", "wanted"),
    [
        ((0, 1), range(16)),
        ((0, 17), range(32)),
        ((64, 65), range(64, 80)),
        ((64, 100), range(64, 112)),
        ((98, 100), range(64, 112)),
        ((0, 65), range(128)),
        ((64, 130), range(192)),
        ((192, 199), range(192, 200)),
    ],
)
def test_the_smallest_subtree_of_a_pair_in_chunks_of_64(
    pair: tuple[int, int], wanted: range
) -> None:
    assert subtree(TREES["chunks of 64"], *pair) == wanted


def test_the_tree_of_a_linear_is_a_matter_of_its_shape_and_the_card_alone() -> None:
    assert linear_tree(4096, 14336, torch.bfloat16, family_of((9, 0))).name == "plain-k16"
    assert linear_tree(4096, 14336, torch.float16, family_of((8, 9))).name == "plain-k8"
    assert linear_tree(1, 3, torch.float16, Family.HOPPER).is_plain
    assert Tree(4096, 16, 1024).name == "chunk1024-k16"


@pytest.mark.parametrize(
    "call",
    [
        lambda: linear_tree(0, 4, torch.bfloat16, Family.HOPPER),
        lambda: linear_tree(4, 4, torch.float32, Family.HOPPER),
        lambda: Tree(100, 16, 24),
        lambda: family_of((7, 5)),
        lambda: reveal(
            torch.mm, plain_tree(8, 2), Setting(1, 1, torch.float16, torch.device("cpu"))
        ),
    ],
)
def test_a_tree_that_is_not_declared_is_refused(call: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()  # type: ignore[operator]  # a table of calls

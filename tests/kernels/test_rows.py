import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isobatch_kernels.bits import same_bits
from isobatch_kernels.certification import CertificationRefused, Proof, Tensors, certify
from isobatch_kernels.inputs import FAMILIES, mixed_rows
from isobatch_kernels.rows import (
    BLOCK_ROWS,
    CertifiedRows,
    RowFunction,
    RowOperator,
    row_counts,
    row_operator,
    run_blocks,
)

WIDTH = 48
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))


def in_order(x: torch.Tensor) -> Tensors:
    """A linear that adds its products in the order of K, whatever the row count."""
    y = torch.zeros(x.shape[0], WIDTH)
    for k in range(WIDTH):
        y = y + x[:, k : k + 1] * WEIGHT[k]
    return (y,)


def halves_below(limit: int) -> RowFunction:
    """The same linear, but below `limit` rows it adds two halves of K apart, as split-K does."""

    def run(x: torch.Tensor) -> Tensors:
        if x.shape[0] >= limit:
            return in_order(x)
        half = x.clone()
        half[:, : WIDTH // 2] = 0
        return (in_order(x - half)[0] + in_order(half)[0],)

    return run


def neighbour_leaks(x: torch.Tensor) -> Tensors:
    return (x + x.mean(0, keepdim=True),)


def draw(rows: int, generator: torch.Generator) -> Tensors:
    return (mixed_rows(rows, WIDTH, torch.float32, generator, FAMILIES[:5]),)


def operator_of(function: RowFunction, max_rows: int = 130) -> RowOperator:
    return RowOperator(
        name="linear",
        shape=f"{WIDTH}x{WIDTH}",
        function=function,
        draw=draw,
        max_rows=max_rows,
    )


def prove(function: RowFunction, max_rows: int = 130) -> Proof:
    return certify(row_operator(operator_of(function, max_rows), seed=1))


def test_an_operator_of_one_order_is_admitted_as_it_is() -> None:
    proof = prove(in_order)

    assert proof.admitted["direct"] == frozenset(row_counts(130))
    assert proof.refused == {}


def test_a_split_at_one_row_is_found_and_padded() -> None:
    proof = prove(halves_below(2))

    assert "differs first at" in proof.refused["direct"]
    assert 1 not in proof.admitted["direct"]
    assert proof.admitted["padded-2"] == {1}


def test_blocks_that_depend_on_the_row_count_are_refused_where_they_differ() -> None:
    proof = prove(halves_below(33))

    served = set().union(*proof.admitted.values())
    assert served == {count for count in row_counts(130) if count >= 33}


def test_a_reference_whose_rows_feel_their_neighbours_is_refused() -> None:
    with pytest.raises(CertificationRefused, match="itself not independent of the batch"):
        prove(neighbour_leaks)


def test_a_candidate_that_raises_is_refused_not_fatal() -> None:
    def only_blocks(x: torch.Tensor) -> Tensors:
        if x.shape[0] != BLOCK_ROWS:
            raise RuntimeError("no kernel for this row count")
        return in_order(x)

    proof = prove(only_blocks)

    assert proof.admitted["direct"] == {BLOCK_ROWS}
    assert "no kernel for this row count" in proof.refused["direct"]


@settings(max_examples=40)
@given(rows=st.integers(0, 300), limit=st.sampled_from([0, 2, 9, 33, 65]))
def test_what_serves_has_the_reference_bits_at_every_row_count(rows: int, limit: int) -> None:
    function = halves_below(limit)
    serving = CertifiedRows(function, _proof_of(limit), BLOCK_ROWS)
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))

    if rows:
        assert same_bits(serving(x)[0], run_blocks(function, (x,))[0])
    else:
        assert serving(x)[0].shape == (0, WIDTH)


_PROOFS: dict[int, Proof] = {}


def _proof_of(limit: int) -> Proof:
    if limit not in _PROOFS:
        _PROOFS[limit] = prove(halves_below(limit))
    return _PROOFS[limit]

"""Run by tests/kernels/test_moe.py in a process of its own, with TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
import torch
from isobatch_kernels.bits import same_bits
from isobatch_kernels.certification import Schedule, Tensors
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.matmul import Tiling, linear
from isobatch_kernels.matmul_operator import prove_each
from isobatch_kernels.moe import (
    Experts,
    Routing,
    Scoring,
    combine,
    combine_reference,
    group_slots,
    grouped_linear,
    grouped_reference,
    mixture,
    route,
    route_reference,
)
from isobatch_kernels.moe_operator import GROUPED_TILINGS, Grouped, draw_ids, grouped_operator
from isobatch_kernels.tree import Tree, plain_tree

from tests.kernels.interpreted import mma_model

mma_model.install()

TOKENS, EXPERTS, TOP_K, N, K = 21, 5, 2, 70, 72
X = mixed_rows(TOKENS, K, torch.bfloat16, torch.Generator().manual_seed(1))
W = mixed_rows(EXPERTS * N, K, torch.bfloat16, torch.Generator().manual_seed(2)).view(-1, N, K)
IDS = draw_ids(TOKENS, EXPERTS, TOP_K, EXPERTS, seed=3)
EXPECTED = grouped_reference(X, W, IDS, TOP_K)
SMALL = Tiling(16, 32, 64, warps=1, stages=1, swapped=True)


@pytest.mark.parametrize("tiling", GROUPED_TILINGS, ids=lambda t: t.name)
def test_every_slot_has_the_bits_of_its_experts_dense_linear(tiling: Tiling) -> None:
    grouping = group_slots(IDS, EXPERTS, tiling.tokens)

    assert same_bits(grouped_linear(X, W, grouping, TOP_K, tiling), EXPECTED)


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_tokens_bits_do_not_depend_on_how_many_tokens_an_expert_gets(tokens: int) -> None:
    for start in range(0, TOKENS - tokens, 4):
        own = slice(start, start + tokens)
        grouping = group_slots(IDS[own], EXPERTS, SMALL.tokens)
        got = grouped_linear(X[own], W, grouping, TOP_K, SMALL)

        assert same_bits(got, EXPECTED[start * TOP_K : (start + tokens) * TOP_K])


def test_all_tokens_may_crowd_on_one_expert() -> None:
    ids = torch.full((TOKENS, 1), 3, dtype=torch.int32)
    got = grouped_linear(X, W, group_slots(ids, EXPERTS, 16), 1, SMALL)

    assert same_bits(got, linear(X, W[3]))


def test_experts_may_be_strided_and_k_need_not_be_whole() -> None:
    w = torch.full((EXPERTS, N + 3, K + 5), float("nan"), dtype=torch.bfloat16)
    w[:, :N, :K] = W
    tiling = GROUPED_TILINGS[-1]
    got = grouped_linear(X, w[:, :N, :K], group_slots(IDS, EXPERTS, tiling.tokens), TOP_K, tiling)

    assert same_bits(got, EXPECTED)
    with pytest.raises(ValueError, match="back to back"):
        grouped_linear(X, w[:, :N, :K], group_slots(IDS, EXPERTS, 16), TOP_K, SMALL)


@pytest.mark.parametrize("scoring", Scoring, ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_chooses_as_torch_does(scoring: Scoring, renormalize: bool) -> None:
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(4))
    routing = Routing(3, scoring, renormalize)

    weights, ids = route(logits, routing)
    wanted_weights, wanted_ids = route_reference(logits, routing)

    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=0)


def test_routing_of_a_token_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(9, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    weights, ids = route(logits, Routing(8))

    for token in range(9):
        own = slice(token, token + 1)
        alone_weights, alone_ids = route(logits[own], Routing(8))
        assert same_bits(alone_weights, weights[own])
        assert same_bits(alone_ids, ids[own])


def test_of_equal_scores_the_lower_expert_is_chosen_and_nan_comes_last() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [nan, -5.0, nan, -6.0], [nan] * 4])

    _, ids = route(logits, Routing(3, Scoring.SIGMOID))

    assert ids.tolist() == [[1, 2, 3], [1, 3, 0], [0, 1, 2]]


def test_slots_are_combined_in_their_order() -> None:
    y = mixed_rows(6 * 4, 1030, torch.bfloat16, torch.Generator().manual_seed(6))
    weights = torch.rand(6, 4, generator=torch.Generator().manual_seed(7))
    y.nan_to_num_(0, 0, 0)

    got, wanted = combine(y, weights), combine_reference(y, weights)

    # The interpreter rounds a product before it is added; the card does not.
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-5)
    for token in range(6):
        alone = combine(y[4 * token : 4 * token + 4], weights[token : token + 1])
        assert same_bits(alone, got[token : token + 1])


def test_a_whole_mixture_gives_a_token_its_bits_alone_and_torchs_values() -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(11, 32, generator=generator).half()
    up = (torch.randn(EXPERTS, 48, 32, generator=generator) / 6).half()
    down = (torch.randn(EXPERTS, 32, 24, generator=generator) / 5).half()
    logits = torch.randn(11, EXPERTS, generator=generator)

    def activation(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(h[:, :24]) * h[:, 24:]

    experts = Experts(up, down, activation)
    whole = mixture(x, experts, route(logits, Routing(TOP_K)), (SMALL, SMALL))

    weights, ids = route_reference(logits, Routing(TOP_K))
    hidden = activation(grouped_reference(x, up, ids, TOP_K, torch.nn.functional.linear))
    y = grouped_reference(hidden, down, ids, 1, torch.nn.functional.linear)
    torch.testing.assert_close(whole, combine_reference(y, weights), rtol=4e-3, atol=4e-3)
    for token in range(11):
        own = slice(token, token + 1)
        alone = mixture(x[own], experts, route(logits[own], Routing(TOP_K)), (SMALL, SMALL))
        assert same_bits(alone, whole[own])


def test_a_grouped_matmul_that_splits_a_crowded_experts_sum_is_refused() -> None:
    k = 128
    w = mixed_rows(EXPERTS * N, k, torch.bfloat16, torch.Generator().manual_seed(9)).view(-1, N, k)
    grouped = Grouped(w, TOP_K, TOP_K, plain_tree(k, 16), max_tokens=17)

    def crowded(x: torch.Tensor, ids: torch.Tensor) -> Tensors:
        def matmul(rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
            tree = Tree(k, 16, 64) if len(rows) > 8 else plain_tree(k, 16)
            return mma_model.linear_in(tree, rows, expert)

        return (grouped_reference(x, w, ids, TOP_K, matmul),)

    operator = grouped_operator(grouped, seed=10)
    own = tuple(c for c in operator.candidates if c.name == GROUPED_TILINGS[0].name)
    candidates = (*own, Schedule("crowded", crowded))
    proof = prove_each(replace(operator, candidates=candidates), lambda _, tokens: tokens > 3)

    assert proof.admitted[own[0].name] == frozenset({4, 7, 8, 16, 17})
    assert 17 not in proof.admitted["crowded"]
    assert "differs first at" in proof.refused["crowded"]

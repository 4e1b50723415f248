import pytest
import torch
from isobatch_kernels.attention import (
    PagedAttention,
    attention_operator,
    batches_for,
    split_requests,
)
from isobatch_kernels.certification import CertificationRefused, certify

HEADS, SIZE, LONGEST = 2, 8, 640
_generator = torch.Generator().manual_seed(0)
KEY = torch.randn(32, LONGEST, HEADS, SIZE, generator=_generator)
VALUE = torch.randn(32, LONGEST, HEADS, SIZE, generator=_generator)


def attention(*, split_decodes: bool = False, tile: int = LONGEST) -> PagedAttention:
    """Plain attention, one query at a time; with `split_decodes` a long decode alone is split.

    Several queries of a request of more than `tile` tokens are computed in two parts.
    """

    def call(
        query: torch.Tensor, query_lens: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        out, at = torch.empty_like(query), 0
        for count, length, row in zip(
            query_lens.tolist(), seq_lens.tolist(), rows.tolist(), strict=True
        ):
            for end in range(length - count + 1, length + 1):
                is_split = split_decodes and len(query_lens) > 8 and end > 100
                is_split |= count > 1 and length > tile
                out[at] = _one(query[at], row, end, 2 if is_split else 1)
                at += 1
        return out

    return PagedAttention("test", HEADS, SIZE, torch.float32, LONGEST, call)


def _one(query: torch.Tensor, row: int, end: int, parts: int) -> torch.Tensor:
    key, value = KEY[row, :end], VALUE[row, :end]
    weight = torch.exp(torch.einsum("hd,thd->th", query, key) - 8)
    sums = [
        (w[:, :, None] * v).sum(0)
        for w, v in zip(weight.chunk(parts), value.chunk(parts), strict=True)
    ]
    return torch.stack(sums).sum(0) / weight.sum(0)[:, None]


def test_attention_that_takes_each_query_alone_is_admitted() -> None:
    proof = certify(attention_operator(attention(), seed=1))

    assert proof.admitted["whole"] == {0}


@pytest.mark.parametrize(("tile", "admitted"), [(600, "whole-to-512"), (64, "by-token")])
def test_requests_are_left_whole_up_to_the_length_that_was_proved(tile: int, admitted: str) -> None:
    proof = certify(attention_operator(attention(tile=tile), seed=1))

    assert [name for name, domains in proof.admitted.items() if domains] == [admitted]


def test_long_requests_are_cut_into_decodes_and_short_ones_are_not() -> None:
    lens, seqs, owner = split_requests(torch.tensor([3, 2, 0, 1]), torch.tensor([9, 4, 7, 8]), 4)

    assert lens.tolist() == [1, 1, 1, 2, 1]
    assert seqs.tolist() == [7, 8, 9, 4, 8]
    assert owner.tolist() == [0, 0, 0, 1, 3]


def test_batches_reach_the_longest_context_that_is_served() -> None:
    assert max(s for batch in batches_for(LONGEST) for _, s in batch) == LONGEST
    assert max(s for batch in batches_for(2048) for _, s in batch) == 2048


def test_a_key_split_that_depends_on_the_batch_is_found_by_the_self_check() -> None:
    operator = attention_operator(attention(split_decodes=True), seed=1)

    with pytest.raises(CertificationRefused, match="alone differs from one in a batch"):
        certify(operator)

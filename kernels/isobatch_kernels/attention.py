"""Decides how paged attention is certified: one token at a time is the reference.

The reference treats every query token as a request of its own that decodes at its position, so that
decode equals prefill by construction, at any chunk boundary. The candidate is the library's batched
call over whole requests. Layouts and calls are the caller's: this module only draws batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from isobatch_kernels.bits import same_bits
from isobatch_kernels.certification import Case, Operator, Schedule, Tensors

AttentionCall = Callable[..., torch.Tensor]
"""(query [T, H, D], query_lens [B], seq_lens [B], rows [B]) -> [T, H, D].

`rows` names the request of the cache that each batch entry reads; it attends causally, its queries
being the last `query_lens` of its `seq_lens` tokens.
"""

BATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1), (1, 17), (1, 129), (1, 640)),
    ((5, 5), (1, 300), (64, 64), (1, 2)),
    ((200, 200),),
    ((64, 200),),
    ((72, 200), (1, 500), (1, 33)),
    ((1, 129), (128, 640), (3, 131), (1, 257)),
    tuple((1, 1 + 19 * i) for i in range(32)),
    ((257, 513), (255, 255)),
)
"""(query tokens, sequence length) of each request: decodes, prefills, chunks, and mixes of them."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One attention shape of the loaded model, with a filled cache behind `call`."""

    shape: str
    heads: int
    head_size: int
    dtype: torch.dtype
    max_seq_len: int
    call: AttentionCall


def per_token(call: AttentionCall, inputs: Tensors) -> Tensors:
    """The reference: each query token as a decoding request of its own."""
    query, query_lens, seq_lens, rows = inputs
    ends = [
        torch.arange(int(s) - int(q) + 1, int(s) + 1)
        for q, s in zip(query_lens, seq_lens, strict=True)
    ]
    ones = torch.ones(query.shape[0], dtype=torch.int32)
    lengths = torch.cat(ends).to(torch.int32)
    return (call(query, ones, lengths, torch.repeat_interleave(rows, query_lens)),)


def attention_operator(attention: PagedAttention, seed: int) -> Operator:
    """What certification needs of `attention`."""
    return Operator(
        name="attention",
        shape=attention.shape,
        tree="one-query-token",
        candidates=(Schedule("batched", lambda *inputs: (attention.call(*inputs),)),),
        cases=lambda: _cases(attention, seed),
        self_check=lambda: _self_check(attention, seed),
    )


def _cases(attention: PagedAttention, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    for index, batch in enumerate(BATCHES):
        inputs = _draw(attention, batch, generator)
        yield Case(0, f"batch {index} of seed {seed}", inputs, per_token(attention.call, inputs))


def _draw(
    attention: PagedAttention, batch: tuple[tuple[int, int], ...], generator: torch.Generator
) -> Tensors:
    longest = attention.max_seq_len
    pairs = [(min(q, s, longest), min(s, longest)) for q, s in batch]
    tokens = sum(q for q, _ in pairs)
    query = torch.randn(tokens, attention.heads, attention.head_size, generator=generator)
    rows = torch.randperm(32, generator=generator)[: len(pairs)]
    return (
        (query * torch.exp(0.5 * torch.randn(tokens, 1, 1, generator=generator))).to(
            attention.dtype
        ),
        torch.tensor([q for q, _ in pairs], dtype=torch.int32),
        torch.tensor([s for _, s in pairs], dtype=torch.int32),
        rows.to(torch.int32),
    )


def _self_check(attention: PagedAttention, seed: int) -> str | None:
    """Why a token decoded alone differs from one decoded beside others, or None."""
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = (1, 2, 31, 32, 33, 64, 127, 128, 129, 300, 511, 640)
    query, ones, seq_lens, rows = _draw(attention, tuple((1, s) for s in lengths), generator)
    together = attention.call(query, ones, seq_lens, rows)
    for at in range(query.shape[0]):
        one = slice(at, at + 1)
        alone = attention.call(query[one], ones[one], seq_lens[one], rows[one])
        if not same_bits(alone, together[one]):
            return f"a decode at length {int(seq_lens[at])} alone differs from one in a batch"
    return None

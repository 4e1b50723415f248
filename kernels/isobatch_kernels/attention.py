"""Decides how paged attention is certified: one token at a time is the reference.

The reference treats every query token as a request of its own that decodes at its position, so that
decode equals prefill by construction, at any chunk boundary. The candidates are the library's
batched call with requests left whole up to some length: a library cuts long contexts into tiles by
its caches and by the number of queries, so that beyond a tile a prefill may have other bits than a
decode. Layouts and calls are the caller's: this module only draws batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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

REQUESTS = 32
"""Requests of the cache that batches are drawn from."""

WHOLE_TO = (1 << 30, 1536, 1024, 768, 640, 512, 384, 256, 128, 0)
"""Lengths to which requests are left whole, best first; the last is the reference itself."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One attention shape of the loaded model, with a filled cache behind `call`."""

    shape: str
    heads: int
    head_size: int
    dtype: torch.dtype
    max_seq_len: int
    call: AttentionCall


def draw_keys_and_values(
    size: tuple[int, int, int, int], max_seq_len: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [requests, slots, kv_heads, head_size], float32, to prove attention on.

    Requests take turns to be plain, of a wide range, and cancelling two ways. Outputs in a short
    dtype hide most differences of a float32 sum: about one in 200,000 shows on random values
    (measured), so half of the requests hold values that cancel.
    """
    key, value = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    wide = torch.exp(1.5 * torch.randn(value[1::4].shape[:3], generator=generator))
    value[1::4] *= wide[..., None]
    # Where the pairs end differs, so that a context of any length has queries not far behind.
    ends = [max_seq_len * (n + 1) // 9 for n in range(8)]
    for index in range(2, size[0], 4):
        end = ends[index // 4 % len(ends)]
        _cancel(key[index : index + 1], value[index : index + 1], min(24, end // 3), end)
        _cancel(key[index + 1 : index + 2], value[index + 1 : index + 2], end // 2, end)
    return key, value


def _cancel(key: torch.Tensor, value: torch.Tensor, apart: int, until: int) -> None:
    """Make the tokens before `until` pairs, `apart` tokens apart, of one key and opposite values.

    The values are large: to a query past `until` they leave their rounding errors alone, beside
    the small values that follow. Near pairs cancel inside a tile, far ones across tiles.
    """
    for start in range(0, until - 2 * apart + 1, 2 * apart):
        one, other = slice(start, start + apart), slice(start + apart, start + 2 * apart)
        value[:, one] *= 2.0**12
        value[:, one].clamp_(-(2.0**15), 2.0**15)
        value[:, other] = -value[:, one]
        key[:, other] = key[:, one]


def split_requests(
    query_lens: torch.Tensor, seq_lens: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Requests of more than `most` tokens cut into their query tokens, each a decode.

    query_lens, seq_lens: [B] -> (query_lens, seq_lens, owner), each [pieces]: `owner` is a piece's
    request. The query tokens keep their order.
    """
    is_long = seq_lens > most
    pieces = torch.where(is_long, query_lens, torch.ones_like(query_lens)).long()
    owner = torch.repeat_interleave(torch.arange(len(pieces)), pieces)
    within = torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]
    whole_query, whole_seq, cut = query_lens[owner], seq_lens[owner], is_long[owner]
    decoded = (whole_seq - whole_query + within + 1).to(seq_lens.dtype)
    return (
        torch.where(cut, torch.ones_like(whole_query), whole_query),
        torch.where(cut, decoded, whole_seq),
        owner,
    )


def run_split(call: AttentionCall, most: int, inputs: Tensors) -> Tensors:
    """`call` with requests of more than `most` tokens by token; 0 is the reference."""
    query, query_lens, seq_lens, rows = inputs
    lens, seqs, owner = split_requests(query_lens, seq_lens, most)
    return (call(query, lens, seqs, rows[owner]),)


def schedule_name(most: int) -> str:
    """As plans write it: `whole-to-640`, `whole`, `by-token`."""
    if most == 0:
        return "by-token"
    return "whole" if most >= WHOLE_TO[0] else f"whole-to-{most}"


def attention_operator(attention: PagedAttention, seed: int) -> Operator:
    """What certification needs of `attention`."""
    return Operator(
        name="attention",
        shape=attention.shape,
        tree="one-query-token",
        candidates=tuple(
            Schedule(schedule_name(most), partial(_run, attention.call, most))
            for most in WHOLE_TO
            if most >= WHOLE_TO[0] or most < attention.max_seq_len
        ),
        cases=lambda: _cases(attention, seed),
        self_check=lambda: _self_check(attention, seed),
    )


def _run(call: AttentionCall, most: int, *inputs: torch.Tensor) -> Tensors:
    return run_split(call, most, inputs)


def _cases(attention: PagedAttention, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    for index, batch in enumerate(batches_for(attention.max_seq_len)):
        inputs = _draw(attention, batch, generator)
        expected = run_split(attention.call, 0, inputs)
        yield Case(0, f"batch {index} of seed {seed}", inputs, expected)


def batches_for(longest: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The batches to try where contexts reach `longest` tokens."""
    edges = sorted({most for most in WHOLE_TO if 0 < most < longest} | {longest})
    mixed = tuple(((7, most), (90, most), (1, most), (most // 2, most)) for most in edges)
    # Alone too, with few queries and many: a library's tiles follow their number.
    alone = tuple(
        ((query, most),)
        for most in edges
        for query in (most, most - most // 6, most // 2, most // 4, 48, 20)
    )
    return *BATCHES, *mixed, *alone, ((1, longest), (longest // 3, longest // 2), (33, longest - 1))


def _draw(
    attention: PagedAttention, batch: tuple[tuple[int, int], ...], generator: torch.Generator
) -> Tensors:
    longest = attention.max_seq_len
    pairs = [(min(q, s, longest), min(s, longest)) for q, s in batch]
    tokens = sum(q for q, _ in pairs)
    query = torch.randn(tokens, attention.heads, attention.head_size, generator=generator)
    rows = torch.randperm(REQUESTS, generator=generator)[: len(pairs)]
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
    lengths = [1, 2, 31, 32, 33, 64, 127, 128, 129, 300, 511, 640]
    lengths += range(attention.max_seq_len, lengths[-1], -max(1, attention.max_seq_len // 12))
    query, ones, seq_lens, rows = _draw(attention, tuple((1, s) for s in lengths), generator)
    together = attention.call(query, ones, seq_lens, rows)
    for at in range(query.shape[0]):
        one = slice(at, at + 1)
        alone = attention.call(query[one], ones[one], seq_lens[one], rows[one])
        if not same_bits(alone, together[one]):
            return f"a decode at length {int(seq_lens[at])} alone differs from one in a batch"
    return None

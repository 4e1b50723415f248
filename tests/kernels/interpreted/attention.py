"""Paged attention in Triton's interpreter: its numbers, its bits, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from isobatch_kernels import paged_attention
from isobatch_kernels.attention_proofs import workspace_of
from isobatch_kernels.attention_schedules import AttentionSchedule, Launch
from isobatch_kernels.attention_tree import AttentionShape, AttentionTree
from isobatch_kernels.bits import same_bits
from isobatch_kernels.paged_attention import (
    AttentionLauncher,
    PagedBatch,
    Workspace,
    attention_reference,
    run_launch,
)

import tests.kernels.interpreter  # noqa: F401  # mends the interpreter

TREE = AttentionTree(chunk=64, key_tile=16)  # small tiles: many chunks of few keys
FOLD = AttentionSchedule(rows=16, warps=4, stages=2)
TICKET = AttentionSchedule(16, 4, 2, split=True, ticket=True)
LLAMA = AttentionShape(4, 2, 32, torch.bfloat16, scale=32**-0.5)


@pytest.fixture(autouse=True)
def few_chunks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fold load two chunks at a time: more rounds of its loop, and less to interpret."""
    monkeypatch.setattr(paged_attention, "_CHUNKS_AHEAD", 2)


def paged_batch(
    shape: AttentionShape,
    lengths: list[tuple[int, int]],
    block_size: int = 16,
    seed: int = 0,
    longest: int | None = None,
) -> PagedBatch:
    """Requests of (query tokens, sequence length) over a cache whose unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    longest = longest or max(s for _, s in lengths)
    per_request = -(-longest // block_size)
    blocks = per_request * len(lengths) + 2
    table = torch.randperm(blocks, generator=generator)[: per_request * len(lengths)]
    table = table.reshape(len(lengths), per_request).to(torch.int32)
    # Keys and values side by side, as vLLM packs them: both caches are strided views.
    packed = torch.full(
        (blocks, block_size, shape.kv_heads, 2 * shape.head_size), torch.nan, dtype=shape.dtype
    )
    for index, (_, seq_len) in enumerate(lengths):
        content = torch.randn(
            seq_len, shape.kv_heads, 2 * shape.head_size,
            generator=torch.Generator().manual_seed(1000 * seed + seq_len),
        )  # fmt: skip
        slots = torch.arange(seq_len)
        packed[table[index, slots // block_size].long(), slots % block_size] = content.to(
            shape.dtype
        )
    tokens = sum(q for q, _ in lengths)
    # Of a generator of their own: a block size must not change what is asked.
    drawn = torch.Generator().manual_seed(seed + 1)
    fused = torch.randn(tokens, shape.heads * shape.head_size + 64, generator=drawn) * 2
    query = fused.to(shape.dtype)[:, : shape.heads * shape.head_size]
    query = query.reshape(tokens, shape.heads, shape.head_size)
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
    return PagedBatch(
        query=query,
        key_cache=packed[..., : shape.head_size],
        value_cache=packed[..., shape.head_size :],
        out=torch.full_like(query, torch.nan),
        block_table=table,
        cu_query_lens=starts.to(torch.int32),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32),
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=longest,
    )


def attend(
    shape: AttentionShape,
    batch: PagedBatch,
    schedule: AttentionSchedule = FOLD,
    splits: int = 1,
    tree: AttentionTree = TREE,
) -> torch.Tensor:
    batch = replace(batch, out=torch.full_like(batch.query, torch.nan))
    launch = Launch(schedule, 1, batch.max_query_len, splits)
    workspace = workspace_of(shape, tree, batch)
    run_launch(shape, tree, batch, launch, workspace)
    assert not workspace.tickets.any()
    return batch.out


def token(batch: PagedBatch, request: int, position: int) -> PagedBatch:
    """The token of `request` at `position`, as a decode of its own over the same cache."""
    end, seq_len = int(batch.cu_query_lens[request + 1]), int(batch.seq_lens[request])
    at = end - (seq_len - position)
    return replace(
        batch,
        query=batch.query[at : at + 1],
        out=batch.out[at : at + 1],
        block_table=batch.block_table[request : request + 1],
        cu_query_lens=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([position + 1], dtype=torch.int32),
        max_query_len=1,
    )


SHAPES = [
    pytest.param(LLAMA, id="gqa"),
    pytest.param(AttentionShape(5, 1, 40, torch.bfloat16, scale=0.2), id="odd-group-odd-size"),
    pytest.param(AttentionShape(2, 2, 16, torch.float16, scale=0.3, window=37), id="window"),
    pytest.param(AttentionShape(4, 2, 32, torch.bfloat16, scale=0.5, softcap=5.0), id="softcap"),
]
MIXED = [(5, 5), (1, 150), (33, 140), (1, 1), (70, 70)]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_is_attention(shape: AttentionShape) -> None:
    batch = paged_batch(shape, MIXED)

    got = attend(shape, batch).double()

    wanted = attention_reference(shape, batch)
    assert (got - wanted).norm() < 5e-3 * wanted.norm()


SCHEDULES = [
    pytest.param(AttentionSchedule(32, 4, 2), 1, 16, id="fold-32"),
    pytest.param(AttentionSchedule(64, 4, 2), 1, 16, id="fold-64"),
    pytest.param(AttentionSchedule(16, 4, 2, split=True), 2, 16, id="split-in-2"),
    pytest.param(AttentionSchedule(32, 4, 2, split=True), 5, 16, id="split-in-5"),
    pytest.param(AttentionSchedule(16, 4, 2), 1, 48, id="other-blocks"),
    pytest.param(AttentionSchedule(32, 4, 2, tma=True), 1, 32, id="boxes"),
    pytest.param(AttentionSchedule(16, 4, 2, split=True, tma=True), 3, 16, id="boxes-split"),
]


@pytest.mark.parametrize(("schedule", "splits", "block_size"), SCHEDULES)
@pytest.mark.parametrize(
    "shape", [SHAPES[2], pytest.param(replace(LLAMA, heads=6), id="group-of-3")]
)
def test_every_schedule_has_the_bits_of_the_reference(
    shape: AttentionShape, schedule: AttentionSchedule, splits: int, block_size: int
) -> None:
    lengths = [(3, 5), (1, 150), (18, 140)]
    wanted = attend(shape, paged_batch(shape, lengths))

    got = attend(shape, paged_batch(shape, lengths, block_size), schedule, splits)

    assert same_bits(got, wanted)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
@pytest.mark.parametrize("schedule", [FOLD, AttentionSchedule(16, 4, 2, split=True), TICKET])
def test_token_decoded_alone_has_the_bits_it_has_in_a_prefill(
    shape: AttentionShape, schedule: AttentionSchedule
) -> None:
    batch = paged_batch(shape, [(3, 90), (132, 132)])
    prefill = attend(shape, batch, AttentionSchedule(64, 4, 2))

    for position in (0, 15, 16, 63, 64, 127, 128, 131):
        alone = attend(shape, token(batch, 1, position), schedule, splits=2)
        assert same_bits(alone, prefill[3 + position : 4 + position]), position


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_to_store_folds_to_the_bits_of_the_reference(
    shape: AttentionShape, splits: int
) -> None:
    lengths = [(1, 300), (3, 5), (1, 64), (0, 0), (2, 190)]
    wanted = attend(shape, paged_batch(shape, lengths))

    assert same_bits(attend(shape, paged_batch(shape, lengths), TICKET, splits), wanted)


def test_tickets_are_refused_where_a_request_has_several_tiles() -> None:
    with pytest.raises(ValueError, match="requests of one tile each and 2 tickets"):
        attend(LLAMA, paged_batch(LLAMA, [(40, 40)]), TICKET)


@pytest.mark.parametrize("boundary", [1, 50, 64])
def test_bits_do_not_depend_on_where_a_prefill_is_cut(boundary: int) -> None:
    whole = paged_batch(LLAMA, [(100, 100)])
    wanted = attend(LLAMA, whole, AttentionSchedule(32, 4, 2))

    parts = [
        replace(
            whole,
            query=whole.query[start:end],
            out=whole.out[start:end],
            cu_query_lens=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            max_query_len=end - start,
        )
        for start, end in ((0, boundary), (boundary, 100))
    ]

    assert same_bits(torch.cat([attend(LLAMA, part) for part in parts]), wanted)


def test_neighbours_and_requests_without_tokens_do_not_reach_the_bits() -> None:
    alone = attend(LLAMA, paged_batch(LLAMA, [(2, 130)], seed=3))

    batch = paged_batch(LLAMA, [(1, 7), (0, 0), (2, 130), (20, 64), (0, 9)], seed=3)
    batch.query[1:3] = paged_batch(LLAMA, [(2, 130)], seed=3).query

    assert same_bits(attend(LLAMA, batch, AttentionSchedule(32, 4, 2))[1:3], alone)


def scratch() -> Workspace:
    return Workspace(torch.full((200_000,), torch.nan), torch.zeros(64, dtype=torch.int32))


def launcher(shape: AttentionShape, admitted: tuple[AttentionSchedule, ...]) -> AttentionLauncher:
    return AttentionLauncher(shape, admitted, scratch(), multiprocessors=16, block_size=16)


def test_launcher_gives_one_answer_by_any_admitted_schedules() -> None:
    split = AttentionSchedule(16, 4, 2, split=True)
    shape = replace(LLAMA, heads=8, kv_heads=1)
    lengths = [(1, 300), (20, 20), (1, 5), (2, 290)]
    answers = []
    others = ((split,), (TICKET,), (split, AttentionSchedule(32, 4, 2)))
    for admitted in ((FOLD,), *((FOLD, *other) for other in others)):
        batch = paged_batch(shape, lengths)
        launcher(shape, admitted)(batch)
        answers.append(batch.out)

    assert not answers[0].isnan().any()
    assert all(same_bits(answer, answers[0]) for answer in answers[1:])


def test_launcher_refuses_blocks_that_were_not_certified() -> None:
    with pytest.raises(ValueError, match="blocks of 32 slots; certified are 16"):
        launcher(LLAMA, (FOLD,))(paged_batch(LLAMA, [(1, 40)], 32))


def _int64(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64)


BAD = [
    pytest.param({"query": lambda x: x[:, :3]}, "query is", id="heads"),
    pytest.param({"query": lambda x: x.float()}, "query is torch.float32", id="dtype"),
    pytest.param({"out": lambda x: x[1:]}, "out is", id="out"),
    pytest.param({"key_cache": lambda x: x[:, :, :1]}, "key_cache is", id="kv-heads"),
    pytest.param({"value_cache": lambda x: x[:3]}, "need one shape", id="blocks"),
    pytest.param({"key_cache": lambda x: x.mT.contiguous().mT}, "key_cache must", id="columns"),
    pytest.param({"block_table": _int64}, "block_table is torch.int64", id="table"),
    pytest.param({"block_table": lambda x: x[:1]}, "block_table", id="requests"),
    pytest.param({"cu_query_lens": lambda x: x[1:]}, "cu_query_lens", id="starts"),
    pytest.param({"seq_lens": lambda x: x.to("meta")}, "seq_lens is", id="device"),
    pytest.param({"max_query_len": lambda _: 0}, "max_query_len 0", id="empty"),
    pytest.param({"max_seq_len": lambda _: 10_000}, "max_seq_len 10000", id="table-too-short"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_batch_is_refused_by_name_before_any_launch(
    change: dict[str, object], message: str
) -> None:
    batch = paged_batch(LLAMA, [(1, 40), (5, 30)])
    changed = {name: f(getattr(batch, name)) for name, f in change.items() if callable(f)}
    batch = replace(batch, **changed)

    with pytest.raises(ValueError, match=message):
        launcher(LLAMA, (FOLD,))(batch)

    assert batch.out.isnan().all()


def test_query_at_an_odd_address_is_refused() -> None:
    batch = paged_batch(LLAMA, [(1, 40)])
    odd = torch.empty(129, dtype=torch.bfloat16)[1:].reshape(1, 4, 32)

    with pytest.raises(ValueError, match="address modulo 16"):
        launcher(LLAMA, (FOLD,))(replace(batch, query=odd))


def test_launcher_without_a_reference_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing could serve"):
        launcher(LLAMA, (AttentionSchedule(32, 4, 2),))

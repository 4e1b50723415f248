"""Decides how the schedules of paged attention are certified: by `attention`'s token by token rule.

The reference is one schedule, the fold of 16 rows, given each query token as a request of its own;
so a schedule that is admitted has prefill = decode proved with it. Others' kernels can stand as
candidates: a `Schedule` whose `run` takes (query, query_lens, seq_lens, rows) and reads the same
cache through `FilledCache.batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from isobatch_kernels.attention import (
    REQUESTS,
    AttentionCall,
    PagedAttention,
    attention_operator,
    draw_keys_and_values,
)
from isobatch_kernels.attention_schedules import (
    REFERENCE,
    AttentionSchedule,
    Launch,
    chunks_of,
    partial_floats,
)
from isobatch_kernels.attention_tree import AttentionShape, AttentionTree
from isobatch_kernels.certification import Operator, Schedule, Tensors
from isobatch_kernels.paged_attention import PagedBatch, Workspace, check_batch, run_launch


@dataclass(frozen=True, slots=True)
class FilledCache:
    """A paged cache of `REQUESTS` full requests, packed as vLLM packs it, with unused NaN blocks.

    key, value: [blocks, block_size, kv_heads, head_size] on the device, views of one tensor;
    table: int32 [REQUESTS, max_blocks].
    """

    shape: AttentionShape
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    max_seq_len: int

    def batch(
        self,
        query: torch.Tensor,
        query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
    ) -> PagedBatch:
        """The step that `attention.AttentionCall` describes, its output filled with NaN."""
        device = self.key.device
        query = query.to(device)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)))
        return PagedBatch(
            query=query,
            key_cache=self.key,
            value_cache=self.value,
            out=torch.full_like(query, torch.nan),
            block_table=self.table[rows.to(device).long()],
            cu_query_lens=starts.to(torch.int32).to(device),
            seq_lens=seq_lens.to(device),
            max_query_len=int(query_lens.max()),
            max_seq_len=self.max_seq_len,
        )


def fill_cache(
    shape: AttentionShape, block_size: int, max_seq_len: int, device: torch.device, seed: int
) -> FilledCache:
    """A cache of `draw_keys_and_values`, its blocks in any order."""
    generator = torch.Generator().manual_seed(seed)
    per_request = -(-max_seq_len // block_size)
    size = (REQUESTS, per_request * block_size, shape.kv_heads, shape.head_size)
    key, value = draw_keys_and_values(size, max_seq_len, generator)
    used = REQUESTS * per_request
    order = torch.randperm(used + 8, generator=generator)
    packed = torch.full(
        (used + 8, block_size, shape.kv_heads, 2 * shape.head_size), torch.nan, dtype=shape.dtype
    )
    content = torch.cat((key, value), dim=-1).to(shape.dtype)
    packed[order[:used]] = content.reshape(used, *packed.shape[1:])
    packed = packed.to(device)
    return FilledCache(
        shape=shape,
        key=packed[..., : shape.head_size],
        value=packed[..., shape.head_size :],
        table=order[:used].reshape(REQUESTS, per_request).to(torch.int32).to(device),
        max_seq_len=max_seq_len,
    )


def schedule_call(
    cache: FilledCache, tree: AttentionTree, schedule: AttentionSchedule, splits: int
) -> AttentionCall:
    """`schedule` over `cache`, for every length of query; a split in `splits` parts."""

    def call(
        query: torch.Tensor,
        query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        batch = cache.batch(query, query_lens, seq_lens, rows)
        check_batch(cache.shape, batch)
        launches = _launches(cache.shape, schedule, batch, splits)
        workspace = workspace_of(cache.shape, tree, batch, is_split=schedule.split)
        for launch in launches:
            run_launch(cache.shape, tree, batch, launch, workspace)
        return batch.out

    return call


def _launches(
    shape: AttentionShape, schedule: AttentionSchedule, batch: PagedBatch, splits: int
) -> tuple[Launch, ...]:
    """`schedule` for every request; by ticket for those of one tile, beside the reference."""
    longest, few = batch.max_query_len, max(1, schedule.rows // shape.group)
    own = Launch(schedule, 1, longest, splits if schedule.split else 1)
    if not schedule.ticket or longest <= few:
        return (own,)
    return Launch(REFERENCE, few + 1, longest, 1), replace(own, max_query=few)


def workspace_of(
    shape: AttentionShape, tree: AttentionTree, batch: PagedBatch, *, is_split: bool = True
) -> Workspace:
    """What launches over `batch` need, its floats NaN; of folds alone next to nothing."""
    slots = batch.requests * batch.max_query_len if is_split else 0
    floats = partial_floats(shape, tree, slots, batch.max_seq_len)
    device = batch.query.device
    return Workspace(
        floats=torch.full((floats,), torch.nan, device=device),
        tickets=torch.zeros(batch.requests * shape.kv_heads, dtype=torch.int32, device=device),
    )


def reference_operator(cache: FilledCache, tree: AttentionTree, seed: int) -> Operator:
    """What certification needs to prove schedules of `tree` over `cache`: bring your candidates.

    A proof's only domain is 0: a schedule serves every batch or none.
    """
    shape = cache.shape
    reference = PagedAttention(
        shape=shape.name,
        heads=shape.heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        max_seq_len=cache.max_seq_len,
        call=schedule_call(cache, tree, REFERENCE, 1),
    )
    return replace(attention_operator(reference, seed), tree=tree.name, candidates=())


def as_candidate(cache: FilledCache, tree: AttentionTree, schedule: AttentionSchedule) -> Schedule:
    """`schedule` over `cache` as certification tries it."""
    parts = min(3, chunks_of(tree, cache.max_seq_len))
    return Schedule(schedule.name, _as_run(schedule_call(cache, tree, schedule, parts)))


def attention_operators(
    cache: FilledCache,
    tree: AttentionTree,
    candidates: tuple[AttentionSchedule, ...],
    others: tuple[Schedule, ...],
    seed: int,
) -> tuple[Operator, ...]:
    """One operator for each candidate, so that every one is tried, not the first alone."""
    base = reference_operator(cache, tree, seed)
    own = tuple(as_candidate(cache, tree, candidate) for candidate in candidates)
    return tuple(replace(base, candidates=(schedule,)) for schedule in own + others)


def _as_run(call: AttentionCall) -> Callable[..., Tensors]:
    return lambda *inputs: (call(*inputs),)

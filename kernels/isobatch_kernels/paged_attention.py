"""Performs paged attention by one reduction tree and any admitted schedule of it.

A token's output has the same bits decoded alone, inside a prefill, from a cold or a warm prefix
cache, at any chunk boundary and beside any neighbours: see `attention_tree` for the tree. That
holds for finite keys and values; an infinity or NaN in a value may reach earlier tokens of its own
request (0 * inf), never another request.
"""

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from isobatch_kernels.attention_kernels import fold, walk
from isobatch_kernels.attention_schedules import (
    REFERENCE,
    WORKSPACE_BYTES,
    AttentionSchedule,
    Bounds,
    Chooser,
    Launch,
    chunks_of,
    partial_floats,
)
from isobatch_kernels.attention_tree import ONES_COLUMNS, AttentionShape, AttentionTree, tree_of

_LOG2_E = 1.4426950408889634
_CHUNKS_AHEAD = 16  # that the fold loads at a time: 4 registers a chunk at a head size of 128
_TICKET_AHEAD = 4  # likewise for a fold by ticket: 32 registers a chunk at a head size of 128


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of launches on one stream, for all layers in turn.

    floats: float32, of one dimension; tickets: int32, of one dimension, all zero between launches.
    Both must outlive every CUDA graph that was captured with them.
    """

    floats: torch.Tensor
    tickets: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's tensors, all on one device.

    query, out: [tokens, heads, head_size]; key_cache, value_cache: [blocks, block_size, kv_heads,
    head_size], any strides with contiguous heads, so also the two halves of vLLM's packed cache;
    block_table: int32 [requests, max_blocks]; cu_query_lens: int32 [requests + 1], from 0;
    seq_lens: int32 [requests], query tokens included. `max_query_len` and `max_seq_len` bound what
    the device holds: the caller's word, never read back. A request of no query token is skipped.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    out: torch.Tensor
    block_table: torch.Tensor
    cu_query_lens: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def requests(self) -> int:
        """Requests, those of padding included."""
        return self.seq_lens.shape[0]

    @property
    def block_size(self) -> int:
        """Slots of a cache block."""
        return self.key_cache.shape[1]


def check_batch(shape: AttentionShape, batch: PagedBatch) -> None:
    """Raise `ValueError` naming the tensor that the kernels would not take."""
    size = shape.head_size
    if batch.query.dim() != 3 or batch.query.shape[1:] != (shape.heads, size):
        raise ValueError(
            f"query is {tuple(batch.query.shape)}, not [tokens, {shape.heads}, {shape.head_size}]"
        )
    if batch.out.shape != batch.query.shape:
        raise ValueError(f"out is {tuple(batch.out.shape)}, query {tuple(batch.query.shape)}")
    for name, cache in (("key_cache", batch.key_cache), ("value_cache", batch.value_cache)):
        if cache.dim() != 4 or cache.shape[2:] != (shape.kv_heads, size):
            raise ValueError(
                f"{name} is {tuple(cache.shape)}, not "
                f"[blocks, block_size, {shape.kv_heads}, {size}]"
            )
    if batch.key_cache.shape != batch.value_cache.shape or batch.block_size % 16:
        raise ValueError(
            f"caches are {tuple(batch.key_cache.shape)} and {tuple(batch.value_cache.shape)}: "
            "need one shape, of blocks of a multiple of 16 slots"
        )
    for name in ("query", "out", "key_cache", "value_cache"):
        _check_rows(name, getattr(batch, name), shape.dtype, batch.query.device)
    _check_index("block_table", batch.block_table, 2, batch)
    _check_index("cu_query_lens", batch.cu_query_lens, 1, batch)
    _check_index("seq_lens", batch.seq_lens, 1, batch)
    requests = batch.requests
    if batch.cu_query_lens.shape[0] != requests + 1 or batch.block_table.shape[0] < requests:
        raise ValueError(
            f"{requests} seq_lens need cu_query_lens [{requests + 1}] and as many rows of "
            f"block_table; got {tuple(batch.cu_query_lens.shape)}, {tuple(batch.block_table.shape)}"
        )
    if not 1 <= batch.max_query_len <= batch.max_seq_len:
        raise ValueError(f"max_query_len {batch.max_query_len} not in 1..{batch.max_seq_len}")
    if batch.max_seq_len > batch.block_table.shape[1] * batch.block_size:
        raise ValueError(
            f"max_seq_len {batch.max_seq_len} is beyond block_table "
            f"{tuple(batch.block_table.shape)} of {batch.block_size} slots a block"
        )


def _check_rows(name: str, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, not {dtype} on {device}")
    if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or x.data_ptr() % 16:
        raise ValueError(
            f"{name} must have contiguous rows at multiples of 16 bytes; strides {x.stride()}, "
            f"address modulo 16 is {x.data_ptr() % 16}"
        )


def _check_index(name: str, x: torch.Tensor, dimensions: int, batch: PagedBatch) -> None:
    if x.dtype != torch.int32 or x.device != batch.query.device or x.dim() != dimensions:
        raise ValueError(
            f"{name} is {x.dtype}{tuple(x.shape)} on {x.device}, not int32 of {dimensions} "
            f"dimensions on {batch.query.device}"
        )
    if x.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous along its last dimension; {x.stride()}")


def run_launch(
    shape: AttentionShape,
    tree: AttentionTree,
    batch: PagedBatch,
    launch: Launch,
    workspace: Workspace,
) -> None:
    """Write `batch.out` for the requests of `launch`.

    Of a split launch `workspace` must hold `partial_floats`, and of one by ticket a ticket for each
    request and KV head. Checks nothing else: see `check_batch`.
    """
    schedule = launch.schedule
    group, rows = shape.group, schedule.rows
    one_tile = launch.max_query * group <= rows
    tiles = batch.query.shape[0] * group // rows + batch.requests
    chunks = chunks_of(tree, batch.max_seq_len)
    parts = _partials(shape, batch.requests * launch.max_query * chunks, launch, workspace.floats)
    _require_tickets(batch.requests * shape.kv_heads, schedule, workspace, one_tile=one_tile)
    exp_scale, cap_in, cap_out = _scales(shape)
    windowed = shape.window > 0
    grid = (batch.requests if one_tile else tiles, shape.kv_heads, launch.splits)
    walk[grid](
        batch.query, _source(batch.key_cache, tree, schedule),
        _source(batch.value_cache, tree, schedule), batch.out, *parts, workspace.tickets,
        batch.block_table, batch.cu_query_lens, batch.seq_lens, exp_scale, cap_in, cap_out,
        batch.requests, launch.min_query, launch.max_query, shape.window, chunks,
        *batch.query.stride()[:2], *batch.out.stride()[:2], *batch.key_cache.stride()[:3],
        *batch.value_cache.stride()[:3], batch.block_table.stride(0),
        HEADS=shape.heads, GROUP=group, SIZE=shape.head_size, PADDED=shape.padded_head,
        BLOCK=batch.block_size, CHUNK=tree.chunk, KEY_TILE=tree.key_tile, ONES=ONES_COLUMNS,
        ROWS=rows, ONE_TILE=one_tile, SPLIT=schedule.split, TMA=schedule.tma,
        SOFTCAP=shape.softcap > 0, WINDOWED=windowed, TICKET=schedule.ticket, AHEAD=_TICKET_AHEAD,
        num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if schedule.split and not schedule.ticket:
        fold[(batch.requests * launch.max_query, shape.heads)](
            batch.out, *parts, batch.cu_query_lens, batch.seq_lens,
            launch.min_query, launch.max_query, shape.window, chunks, *batch.out.stride()[:2],
            HEADS=shape.heads, SIZE=shape.head_size, PADDED=shape.padded_head, CHUNK=tree.chunk,
            WINDOWED=windowed, AHEAD=_CHUNKS_AHEAD,
            num_warps=1, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def _require_tickets(
    needed: int, schedule: AttentionSchedule, workspace: Workspace, *, one_tile: bool
) -> None:
    if schedule.ticket and not (one_tile and workspace.tickets.numel() >= needed):
        raise ValueError(
            f"{schedule.name} needs requests of one tile each and {needed} tickets, not "
            f"{workspace.tickets.numel()}"
        )


def _scales(shape: AttentionShape) -> tuple[float, float, float]:
    """(factor of a score in exp2's argument, of the softcap's argument, of its result).

    Under a softcap the scores are in log2 units already when they reach the exponential.
    """
    if shape.softcap == 0:
        return shape.scale * _LOG2_E, 0.0, 0.0
    return 1.0, 2 * _LOG2_E * shape.scale / shape.softcap, shape.softcap * _LOG2_E


def _partials(
    shape: AttentionShape, cells: int, launch: Launch, workspace: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maxima, sums, accumulators) of a split, cut from `workspace`; any tensors for a fold."""
    if not launch.schedule.split:
        return workspace, workspace, workspace
    rows = cells * shape.heads
    start = -(-rows // 32) * 32
    if workspace.numel() < 2 * start + rows * shape.padded_head:
        raise ValueError(
            f"a split over {rows} partial results needs {2 * start + rows * shape.padded_head} "
            f"floats of workspace, not {workspace.numel()}"
        )
    return workspace, workspace[start:], workspace[2 * start :]


def _source(
    cache: torch.Tensor, tree: AttentionTree, schedule: AttentionSchedule
) -> torch.Tensor | TensorDescriptor:
    """`cache` as the walk reads it: by pointer, or as a matrix of slots in boxes of a key tile."""
    if not schedule.tma:
        return cache
    blocks, block_size, heads, size = cache.shape
    block_stride, slot_stride, head_stride, _ = cache.stride()
    if block_stride != block_size * slot_stride or block_size % tree.key_tile:
        raise ValueError(
            f"boxes of {tree.key_tile} slots need evenly spaced slots in blocks of whole boxes; "
            f"strides {cache.stride()}, {block_size} slots a block"
        )
    return TensorDescriptor(
        cache,
        [blocks * block_size, (heads - 1) * head_stride + size],
        [slot_stride, 1],
        [tree.key_tile, size],
    )


class AttentionLauncher:
    """Paged attention of one layer shape as it serves: checks, chooses, launches."""

    def __init__(
        self,
        shape: AttentionShape,
        admitted: tuple[AttentionSchedule, ...],
        workspace: Workspace,
        multiprocessors: int,
        block_size: int,
    ) -> None:
        """`admitted`: what certification let pass over blocks of `block_size`, best first."""
        floats, tickets = workspace.floats, workspace.tickets
        if (floats.dtype, tickets.dtype) != (torch.float32, torch.int32):
            raise ValueError(f"workspace is of {floats.dtype} and {tickets.dtype}")
        self.shape = shape
        self.tree = tree_of(shape)
        self.reference_only = False
        self._block_size = block_size
        self._workspace = workspace
        self._chooser = Chooser(
            shape,
            self.tree,
            admitted,
            multiprocessors,
            workspace_floats=floats.numel(),
            tickets=tickets.numel(),
        )

    def __call__(self, batch: PagedBatch) -> None:
        """Write `batch.out`; rows of it that belong to no request stay as they are.

        Raises `ValueError`, before any launch, for a batch that the kernels do not take.
        """
        check_batch(self.shape, batch)
        if batch.block_size != self._block_size:
            raise ValueError(
                f"the cache has blocks of {batch.block_size} slots; "
                f"certified are {self._block_size}"
            )
        tokens = batch.query.shape[0]
        if tokens == 0:
            return
        if self.reference_only:
            launch = Launch(REFERENCE, 1, batch.max_query_len, 1)
            run_launch(self.shape, self.tree, batch, launch, self._workspace)
            return
        bounds = Bounds(batch.requests, tokens, batch.max_query_len, batch.max_seq_len)
        for launch in self._chooser.launches(bounds):
            run_launch(self.shape, self.tree, batch, launch, self._workspace)


def allocate_workspace(
    shape: AttentionShape, max_requests: int, max_seq_len: int, device: torch.device
) -> Workspace:
    """Workspace for splits of decodes of up to `max_requests`, within `WORKSPACE_BYTES`."""
    tickets = max_requests * shape.kv_heads
    floats = partial_floats(shape, tree_of(shape), max_requests, max_seq_len)
    most = WORKSPACE_BYTES // 4 - tickets
    return Workspace(
        floats=torch.empty(min(floats, most), dtype=torch.float32, device=device),
        tickets=torch.zeros(tickets, dtype=torch.int32, device=device),
    )


def attention_reference(shape: AttentionShape, batch: PagedBatch) -> torch.Tensor:
    """Causal attention in float64 by plain torch: what the kernels approximate, by any order.

    -> [tokens, heads, head_size] float64, on the CPU. Reads tensors of the device: for tests.
    """
    out = torch.zeros(batch.query.shape, dtype=torch.float64)
    starts = batch.cu_query_lens.tolist()
    for index, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        slots = torch.arange(seq_len, device=batch.query.device)
        pages = batch.block_table[index, slots // batch.block_size].long()
        keys, values = (
            cache[pages, slots % batch.block_size].cpu().double().repeat_interleave(shape.group, 1)
            for cache in (batch.key_cache, batch.value_cache)
        )
        queries = batch.query[start:end].cpu().double()
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        position = torch.arange(seq_len - (end - start), seq_len)[:, None]
        key = torch.arange(seq_len)[None, :]
        seen = key <= position
        if shape.window:
            seen &= key > position - shape.window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out

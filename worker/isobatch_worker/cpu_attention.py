"""Performs vLLM's CPU attention on drawn caches, for certification."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from isobatch_kernels.attention import REQUESTS, PagedAttention, draw_keys_and_values
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parts of an attention layer and its cache that choose the kernel and its arithmetic."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    sliding_window: int  # -1: none
    softcap: float
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """As it stands in a plan."""
        return (
            f"heads={self.heads}/{self.kv_heads} size={self.head_size} block={self.block_size} "
            f"window={self.sliding_window} softcap={self.softcap} {self.dtype}"
        )


def shape_of(impl: Any, block_size: int, dtype: torch.dtype) -> AttentionShape:
    """The shape of vLLM's CPU attention implementation `impl`."""
    return AttentionShape(
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        scale=impl.scale,
        sliding_window=impl.sliding_window,
        softcap=float(impl.logits_soft_cap),
        block_size=block_size,
        dtype=dtype,
    )


def paged_attention(shape: AttentionShape, max_seq_len: int, seed: int) -> PagedAttention:
    """`shape` with a cache of requests of `max_seq_len` tokens behind it."""
    blocks = -(-max_seq_len // shape.block_size)
    table = torch.randperm(REQUESTS * blocks, generator=torch.Generator().manual_seed(seed)).to(
        torch.int32
    )
    table = table.view(REQUESTS, blocks)
    isa = _get_attn_isa(shape.dtype, shape.block_size, shape.head_size, "auto")

    @functools.cache  # filled at the first proof only: a kept plan needs none
    def filled() -> tuple[torch.Tensor, torch.Tensor]:
        return _filled_cache(shape, table, isa, max_seq_len, seed)

    def call(
        query: torch.Tensor, query_lens: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        starts[1:] = query_lens.cumsum(0)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(query_lens),
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_size,
            seq_lens=seq_lens,
            dtype=shape.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=shape.sliding_window,
            isa=isa,
            enable_kv_split=False,
        )
        output = torch.full_like(query, float("nan"))
        key_cache, value_cache = filled()
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=shape.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=shape.sliding_window,
            block_table=table[rows.long()].contiguous(),
            softcap=shape.softcap,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return output

    return PagedAttention(
        shape=f"{shape} isa={isa}",
        heads=shape.heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        max_seq_len=max_seq_len,
        call=call,
    )


def _filled_cache(
    shape: AttentionShape, table: torch.Tensor, isa: str, max_seq_len: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache, each [blocks, kv_heads, block_size, head_size] in vLLM's CPU layout."""
    generator = torch.Generator().manual_seed(seed + 2)
    per_request = table.shape[1] * shape.block_size
    size = (REQUESTS, per_request, shape.kv_heads, shape.head_size)
    key, value = draw_keys_and_values(size, max_seq_len, generator)
    # Slot by slot of each request, to where its table says.
    slots = table[..., None].long() * shape.block_size + torch.arange(shape.block_size)
    cache = torch.zeros(
        table.numel(), shape.kv_heads, shape.block_size * 2, shape.head_size, dtype=shape.dtype
    )
    key_cache, value_cache = cache.chunk(2, dim=2)
    flat = (x.to(shape.dtype).flatten(0, 1) for x in (key, value))
    ops.cpu_attn_reshape_and_cache(*flat, key_cache, value_cache, slots.flatten(), isa)
    return key_cache, value_cache

"""Decides the reduction tree of paged attention: a function of the model's shape, never of a batch.

The tree of one query row: keys lie at absolute positions, cut into *chunks*; a chunk is walked in
tiles of `key_tile` keys by online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al.
2022) from a fresh (maximum, sum, accumulator); chunks are merged in ascending order in float32. The
fixed split *size* is Thinking Machines' (2025), as against a fixed split count. Row sums are taken
by the tensor core, P times a tile of ones: a sum across a register layout would follow the number
of warps and query rows (measured: 30 of 6.1 M outputs moved).
"""

from dataclasses import dataclass

import torch

ONES_COLUMNS = 16
"""Columns of the tile of ones: the least that both kinds of tensor-core instruction take."""

HEAD_SIZES = range(16, 257, 8)
"""Head sizes taken: rows of 16 bytes, and accumulators that registers can hold."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer. `window` counts visible keys, the query's own among them; 0: all.

    `scale` multiplies the scores and `softcap` bounds them as `softcap * tanh(score / softcap)`;
    0: unbounded. Raises `ValueError` for what the kernels do not take.
    """

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} KV heads")
        if self.head_size not in HEAD_SIZES:
            raise ValueError(f"head size {self.head_size} is no multiple of 8 in 16..256")
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype {self.dtype} is neither bfloat16 nor float16")
        if not (self.scale > 0 and self.window >= 0 and self.softcap >= 0):
            raise ValueError(
                f"need scale > 0, window >= 0, softcap >= 0; got {self.scale}, {self.window}, "
                f"{self.softcap}"
            )

    @property
    def name(self) -> str:
        """As plans write it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.heads}/{self.kv_heads}x{self.head_size} {dtype} scale {self.scale:.8g} "
            f"window {self.window} softcap {self.softcap:g}"
        )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_head(self) -> int:
        """`head_size` up to a power of two: what a tile holds."""
        return 1 << (self.head_size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class AttentionTree:
    """What fixes the bits: `chunk` and `key_tile` in keys, both powers of two."""

    chunk: int
    key_tile: int

    def __post_init__(self) -> None:
        if self.chunk % self.key_tile or self.key_tile < 16 or self.key_tile & (self.key_tile - 1):
            raise ValueError(f"chunk {self.chunk} is not made of tiles of {self.key_tile}")

    @property
    def name(self) -> str:
        """As a plan and its fingerprint name it."""
        return f"chunks-{self.chunk}/tiles-{self.key_tile}/ones-{ONES_COLUMNS}/v1"


def tree_of(shape: AttentionShape) -> AttentionTree:
    """The committed rule. Changing it changes the bits of every model it reaches.

    Few KV heads want short chunks, for a lone decode to fill the card with (KV head, chunk) pairs.
    Many query heads to a KV head want long ones: a chunk's float32 partial result of each query
    head is traffic beside the chunk's keys and values. Hence 32 keys for each, in 128..512. A tile
    has 64 keys, or 32 where heads are so large that one of 64 would not fit a thread's registers.
    """
    wanted = 32 * max(shape.kv_heads, shape.group)
    chunk = min(512, max(128, 1 << (wanted - 1).bit_length()))
    return AttentionTree(chunk=chunk, key_tile=64 if shape.padded_head <= 128 else 32)

"""Performs: our paged attention as an attention backend of vLLM, in vLLM's own cache layout."""

from typing import Any, ClassVar

import torch
from isobatch_kernels.attention_tree import HEAD_SIZES, AttentionShape
from isobatch_kernels.certification import CertificationRefused
from isobatch_kernels.paged_attention import AttentionLauncher, PagedBatch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

BLOCK_SIZE = 64
"""Slots of a cache block: whole tiles of keys, so that one tensor copy brings each."""


class StrictMetadataBuilder(TritonAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is not followed by mypy
    """vLLM's, of which we use the batch's lengths and blocks; decodes run in full graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )


class StrictAttention(TritonAttentionImpl):  # type: ignore[misc]  # as above
    """Attention of one layer; `launcher` comes with certification and nothing runs before it."""

    launcher: AttentionLauncher | None = None

    def shape(self, dtype: torch.dtype) -> AttentionShape:
        """The shape to certify. Raises `CertificationRefused` for what the kernels do not do."""
        odd = {
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "keys of another layer": self.kv_sharing_target_layer_name is not None,
            "attention of an encoder": self.attn_type != AttentionType.DECODER,
            "a look back over chunks": self.chunk_lookback > -1,
        }
        found = [name for name, is_there in odd.items() if is_there]
        if found:
            raise CertificationRefused(f"attention with {', '.join(found)} is not certified")
        try:
            return AttentionShape(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                dtype=dtype,
                scale=self.scale,
                window=self.sliding_window[0] + 1,  # vLLM keeps window - 1, or -1 for none
                softcap=float(self.logits_soft_cap),
            )
        except ValueError as exc:
            raise CertificationRefused(f"attention: {exc}") from exc

    def forward(  # noqa: PLR0913, PLR0917  # vLLM has it so
        self,
        layer: torch.nn.Module,  # noqa: ARG002  # as above
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002  # as above
        value: torch.Tensor,  # noqa: ARG002  # as above
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,  # noqa: ARG002  # as above
        output_block_scale: torch.Tensor | None = None,  # noqa: ARG002  # as above
    ) -> torch.Tensor:
        """Query [T, H, D] over kv_cache [blocks, G, block, 2 * D] -> `output` [T, H, D]."""
        if attn_metadata is None:
            return output.fill_(0)  # vLLM's memory profile: there is no cache yet
        if self.launcher is None:
            raise CertificationRefused("attention runs that was not certified")
        tokens = attn_metadata.num_actual_tokens
        cache = kv_cache.transpose(1, 2)
        self.launcher(
            PagedBatch(
                query=query[:tokens],
                key_cache=cache[..., : self.head_size],
                value_cache=cache[..., self.head_size :],
                out=output[:tokens],
                block_table=attn_metadata.block_table,
                cu_query_lens=attn_metadata.query_start_loc,
                seq_lens=attn_metadata.seq_lens,
                max_query_len=attn_metadata.max_query_len,
                max_seq_len=max(attn_metadata.max_seq_len, attn_metadata.max_query_len),
            )
        )
        return output


class StrictAttentionBackend(TritonAttentionBackend):  # type: ignore[misc]  # as above
    """What vLLM asks of a backend. Cache layout and cache writes are those of its Triton one."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM keeps for a backend from elsewhere."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[StrictAttention]:
        """The layer."""
        return StrictAttention

    @staticmethod
    def get_builder_cls() -> type[StrictMetadataBuilder]:
        """The builder of a step's metadata."""
        return StrictMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Whole tiles of keys."""
        return [MultipleOf(BLOCK_SIZE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether blocks hold whole tiles of keys."""
        return block_size is None or block_size % BLOCK_SIZE == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the kernels take heads of this size."""
        return head_size in HEAD_SIZES

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders alone."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No."""
        return False

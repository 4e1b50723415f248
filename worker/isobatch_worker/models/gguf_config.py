"""Decides the Hugging Face config of a llama GGUF from its metadata."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from isobatch_worker.errors import UnsupportedModel
from isobatch_worker.models.gguf_metadata import REMEDY, Metadata


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What a llama model's metadata says of its computation."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    vocabulary: int
    rms_norm_eps: float
    rope_theta: float
    is_tied: bool  # the output layer is the embedding

    @classmethod
    def of(cls, metadata: Metadata, *, is_tied: bool) -> Self:
        """The shape that `metadata` gives. Raises `UnsupportedModel`."""
        hidden = metadata.integer("llama.embedding_length")
        heads = metadata.integer("llama.attention.head_count")
        kv_heads = metadata.optional_integer("llama.attention.head_count_kv") or heads
        if not heads or heads % kv_heads:
            raise UnsupportedModel(
                f"the GGUF has {heads} heads of {kv_heads} keys; expected a multiple: {REMEDY}"
            )
        head_dim = metadata.optional_integer("llama.attention.key_length") or hidden // heads
        rotated = metadata.optional_integer("llama.rope.dimension_count") or head_dim
        values = metadata.optional_integer("llama.attention.value_length") or head_dim
        if head_dim % 2 or rotated != head_dim or values != head_dim:
            raise UnsupportedModel(
                f"the GGUF has heads of width {head_dim}, {rotated} of it rotated, and values of "
                f"width {values}; expected one even width for all three: {REMEDY}"
            )
        return cls(
            hidden=hidden,
            feed_forward=metadata.integer("llama.feed_forward_length"),
            layers=metadata.integer("llama.block_count"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=metadata.integer("llama.context_length"),
            vocabulary=len(metadata.texts("tokenizer.ggml.tokens")),
            rms_norm_eps=_as_written(metadata.number("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=_as_written(metadata.number("llama.rope.freq_base", 10000.0)),
            is_tied=is_tied,
        )


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids with a role. `ends` is never empty: generation stops at any of them."""

    begin: int | None
    ends: tuple[int, ...]
    pad: int
    unknown: int | None

    @classmethod
    def of(cls, metadata: Metadata) -> Self:
        """The ids that `metadata` gives, each within the vocabulary. Raises `UnsupportedModel`."""
        end = metadata.integer("tokenizer.ggml.eos_token_id")
        end_of_turn = metadata.optional_integer("tokenizer.ggml.eot_token_id")
        pad = metadata.optional_integer("tokenizer.ggml.padding_token_id")
        ids = cls(
            begin=metadata.optional_integer("tokenizer.ggml.bos_token_id"),
            ends=(end,) if end_of_turn in (None, end) else (end, end_of_turn),
            pad=end if pad is None else pad,
            unknown=metadata.optional_integer("tokenizer.ggml.unknown_token_id"),
        )
        size = len(metadata.texts("tokenizer.ggml.tokens"))
        for one in (ids.begin, *ids.ends, ids.pad, ids.unknown):
            if one is not None and one >= size:
                raise UnsupportedModel(
                    f"the GGUF has {one} for a special token; expected one of its {size} tokens: "
                    f"{REMEDY}"
                )
        return ids

    def document(self) -> dict[str, Any]:
        """The ids as config.json and generation_config.json write them."""
        ends = self.ends[0] if len(self.ends) == 1 else list(self.ends)
        return {"bos_token_id": self.begin, "eos_token_id": ends, "pad_token_id": self.pad}


def config_document(shape: LlamaShape, ids: SpecialIds) -> dict[str, Any]:
    """config.json. `rope_theta` is there twice: transformers 4 reads it at the top, 5 below."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.is_tied,
        "vocab_size": shape.vocabulary,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        **ids.document(),
    }


def _as_written(value: float) -> float:
    """The shortest decimal that is the same float32: a GGUF's 9.9999997e-06 was written 1e-05."""
    return float(str(np.float32(value)))

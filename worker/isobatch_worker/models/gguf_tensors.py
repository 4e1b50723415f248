"""Decides which tensors a llama model has, and turns one of a GGUF's into the one of a folder."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isobatch_worker.errors import UnsupportedModel
from isobatch_worker.models.gguf_config import LlamaShape
from isobatch_worker.models.gguf_metadata import REMEDY


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor to write. `shape` is (out, in); `rope_heads` its heads where it is rotated."""

    name: str
    shape: tuple[int, ...]
    rope_heads: int | None = None

    @property
    def size_bytes(self) -> int:
        """Size in bfloat16."""
        return 2 * int(np.prod(self.shape))


def targets(shape: LlamaShape) -> dict[str, Target]:
    """GGUF name -> what it becomes, for every tensor of a model of `shape`, in file order."""
    hidden, vocabulary = shape.hidden, shape.vocabulary
    found = {"token_embd.weight": Target("model.embed_tokens.weight", (vocabulary, hidden))}
    for layer in range(shape.layers):
        found |= {
            f"blk.{layer}.{short}.weight": Target(
                f"model.layers.{layer}.{target.name}.weight", target.shape, target.rope_heads
            )
            for short, target in _layer(shape).items()
        }
    found["output_norm.weight"] = Target("model.norm.weight", (hidden,))
    if not shape.is_tied:
        found["output.weight"] = Target("lm_head.weight", (vocabulary, hidden))
    return found


def _layer(shape: LlamaShape) -> dict[str, Target]:
    hidden, wide = shape.hidden, shape.feed_forward
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_norm": Target("input_layernorm", (hidden,)),
        "attn_q": Target("self_attn.q_proj", (queries, hidden), shape.heads),
        "attn_k": Target("self_attn.k_proj", (keys, hidden), shape.kv_heads),
        "attn_v": Target("self_attn.v_proj", (keys, hidden)),
        "attn_output": Target("self_attn.o_proj", (hidden, queries)),
        "ffn_norm": Target("post_attention_layernorm", (hidden,)),
        "ffn_gate": Target("mlp.gate_proj", (wide, hidden)),
        "ffn_up": Target("mlp.up_proj", (wide, hidden)),
        "ffn_down": Target("mlp.down_proj", (hidden, wide)),
    }


def require_same_tensors(
    wanted: Mapping[str, Target], present: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a GGUF with a tensor too many, too few, or of another shape (out, in)."""
    expected = {name: target.shape for name, target in wanted.items()}
    for name in sorted(expected.keys() | present.keys()):
        if expected.get(name) != present.get(name):
            raise UnsupportedModel(
                f"the GGUF has {_described(present.get(name))} {name}; expected "
                f"{_described(expected.get(name))} by its metadata: {REMEDY}"
            )


def _described(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"the shape {shape} for"


def undo_rope_order(w: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """w: [out, in] of Q or K -> the same rows in Hugging Face's order.

    llama.cpp rotates neighbouring pairs of a head's rows, transformers its first half with its
    second; so a GGUF holds rows 0, d/2, 1, d/2 + 1, … of each head of width d.
    """
    out, columns = w.shape
    return w.reshape(heads, out // heads // 2, 2, columns).swapaxes(1, 2).reshape(out, columns)


def bfloat16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """`x` rounded to bfloat16, nearest even, as its bits; any NaN becomes the one that torch has."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    # In 64 bits a carry out of the largest NaNs would be kept; in 32 it wraps, and they are
    # replaced below.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)

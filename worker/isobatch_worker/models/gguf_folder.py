"""Performs the conversion of a llama GGUF to a Hugging Face folder with bfloat16 weights."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from isobatch_worker.errors import ModelUnavailable
from isobatch_worker.models.progress import Progress

CONVERTER = "v1"
"""Part of the cache's key: raise it when the output changes."""

_SPECIAL = 3  # gguf.TokenType.CONTROL
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` to the empty `folder`. Raises `ModelUnavailable` if not llama."""
    reader = gguf.GGUFReader(source)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields["general.architecture"]
    if architecture != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise ModelUnavailable(
            f"{source.name} is of architecture {architecture!r}; only llama with a BPE tokenizer "
            "is converted: use a Hugging Face folder with file:///path"
        )
    names = _write_weights(reader, fields, folder / "model.safetensors", progress)
    _write_json(folder / "config.json", _config(fields, is_tied="lm_head.weight" not in names))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_json(folder / "tokenizer.json", _tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))


def bfloat16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """`x` rounded to bfloat16, nearest even, as its bits."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def undo_rope_order(w: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Q or K [out, in] with the halves of each head, which llama.cpp interleaves, in order."""
    out, columns = w.shape
    return w.reshape(heads, out // heads // 2, 2, columns).swapaxes(1, 2).reshape(out, columns)


def tensor_name(name: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`. Raises KeyError for an unknown one."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_OF_LAYER[parts[2]]}.{parts[3]}"
    return f"{_WHOLE[parts[0]]}.{parts[1]}"


def _weight(tensor: Any, fields: dict[str, Any]) -> npt.NDArray[np.uint16]:
    w = gguf.dequantize(tensor.data, tensor.tensor_type)
    if ".attn_q." in tensor.name:
        w = undo_rope_order(w, fields["llama.attention.head_count"])
    if ".attn_k." in tensor.name:
        w = undo_rope_order(w, fields["llama.attention.head_count_kv"])
    return bfloat16_bits(w)


def _write_weights(
    reader: Any, fields: dict[str, Any], target: Path, progress: Progress
) -> set[str]:
    """Write the safetensors file by hand, tensor by tensor: numpy has no bfloat16."""
    header: dict[str, Any] = {}
    offset = 0
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        size = 2 * int(np.prod(shape))
        header[tensor_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for done, tensor in enumerate(reader.tensors, 1):
            file.write(_weight(tensor, fields).tobytes())
            progress(done, len(reader.tensors))
    return set(header)


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    end = fields["tokenizer.ggml.eos_token_id"]
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": end,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", end),
    }


def _config(fields: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps float32: seven digits give back the decimal number that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": is_tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(fields),
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _SPECIAL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, ids = fields["tokenizer.ggml.tokens"], _special_ids(fields)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "chat_template": fields.get("tokenizer.chat_template"),
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1))

"""The models that the card serves by shape alone: public configurations and drawn weights."""

import itertools
import json
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}


def write_config(name: str, folder: Path) -> Path:
    """A model folder that holds the configuration of `name` and nothing else."""
    model = folder / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPES[name]))
    return model


def draw_weights() -> None:
    """Have vLLM's dummy loader draw weights of a real scale: its own of 1e-3 hide differences."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    count = itertools.count()

    def draw(layer: torch.nn.Module, *_: object, **__: object) -> None:
        for name, weight in layer.named_parameters(recurse=False):
            if weight.dim() == 1:
                weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(weight.device).manual_seed(next(count))
            is_embedding = type(layer).__name__ == "VocabParallelEmbedding"
            scale = 0.5 if is_embedding else 1.2 / weight.shape[-1] ** 0.5
            weight.data.normal_(0, scale, generator=generator)

    dummy_loader.initialize_dummy_weights = draw

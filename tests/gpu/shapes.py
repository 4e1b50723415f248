"""The linears of the models that the GPU programs measure, by their public configurations."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k] of `model`; `max_rows` is the most that a server gives it in one call."""

    model: str
    layer: str
    n: int
    k: int
    max_rows: int = 8192


_LOGIT_ROWS = 1024  # a server computes logits for its sampled tokens alone


def _dense(model: str, hidden: int, qkv: int, attention: int, gate_up: int) -> list[Shape]:
    return [
        Shape(model, "qkv", qkv, hidden),
        Shape(model, "o", hidden, attention),
        Shape(model, "gate_up", gate_up, hidden),
        Shape(model, "down", hidden, gate_up // 2),
    ]


SHAPES = (
    *_dense("Llama-3.1-8B", hidden=4096, qkv=6144, attention=4096, gate_up=28672),
    Shape("Llama-3.1-8B", "lm_head", 128256, 4096, _LOGIT_ROWS),
    *_dense("Qwen3-14B", hidden=5120, qkv=7168, attention=5120, gate_up=34816),
    *_dense("Qwen3-0.6B", hidden=1024, qkv=4096, attention=2048, gate_up=6144),
    Shape("Qwen3-30B-A3B", "qkv", 5120, 2048),
    Shape("Qwen3-30B-A3B", "o", 2048, 4096),
    Shape("Qwen3-30B-A3B", "router", 128, 2048),
    Shape("Qwen3-0.6B", "lm_head", 151936, 1024, _LOGIT_ROWS),
    Shape("Qwen3-30B-A3B", "lm_head", 151936, 2048, _LOGIT_ROWS),
    Shape("Qwen3-14B", "lm_head", 151936, 5120, _LOGIT_ROWS),
)
"""In the order they are measured: what matters most comes before the budget ends."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The weights [experts, n, k] of one matmul of a mixture."""

    model: str
    layer: str
    experts: int
    n: int
    k: int
    top_k: int
    slots_per_row: int


EXPERT_SHAPES = (
    ExpertShape("Qwen3-30B-A3B", "up", 128, 1536, 2048, 8, 8),
    ExpertShape("Qwen3-30B-A3B", "down", 128, 2048, 768, 8, 1),
    ExpertShape("Mixtral-8x7B", "up", 8, 28672, 4096, 2, 2),
    ExpertShape("Mixtral-8x7B", "down", 8, 4096, 14336, 2, 1),
)

"""Performs: vLLM's layers on our operators, by vLLM's own registry of out-of-tree layers.

A model that builds one of these layers gets ours in its place. What ours does not take is refused
when the loaded model is looked over, by `coverage`.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)


class StrictRMSNorm(RMSNorm):  # type: ignore[misc]  # vLLM is not followed by mypy
    """RMSNorm, plain or after adding a residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """X [..., D] -> [..., D], or (that of x + residual, x + residual)."""
        if residual is None:
            return torch.ops.isobatch.rms_norm(x, self.weight, self.variance_epsilon)
        return torch.ops.isobatch.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    def refusal(self) -> str | None:
        """Why this one is not what the kernel computes, or None."""
        if self.variance_size_override is not None or not self.has_weight:
            return "a variance over part of a row, or no weight"
        return None


class StrictSiluAndMul(SiluAndMul):  # type: ignore[misc]  # as above
    """SiLU of the first half of a row, times the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, 2 * D] -> [T, D]."""
        y: torch.Tensor = torch.ops.isobatch.silu_and_mul(x)
        return y

    def refusal(self) -> str | None:
        """Nothing can be unlike."""
        return None


class _StrictRotary:
    """What our rotary embeddings have in common; a table of cosines and sines does the scaling."""

    cos_sin_cache: torch.Tensor
    head_size: int
    rotary_dim: int
    is_neox_style: bool

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [T], query [T, H * D], key [T, G * D] -> query and key, turned."""
        turned: tuple[torch.Tensor, torch.Tensor] = torch.ops.isobatch.rope(
            positions, query, key, self.cos_sin_cache, self.head_size
        )
        return turned

    def refusal(self) -> str | None:
        """Why this one is not what the kernel computes, or None."""
        return None if self.is_neox_style else "pairs of neighbouring columns (GPT-J style)"


class StrictRotaryEmbedding(_StrictRotary, RotaryEmbedding):  # type: ignore[misc]  # as above
    """The plain one."""


class StrictLinearScalingRotary(_StrictRotary, LinearScalingRotaryEmbedding):  # type: ignore[misc]  # as above
    """Positions divided by a constant, in the table."""


class StrictLlama3Rotary(_StrictRotary, Llama3RotaryEmbedding):  # type: ignore[misc]  # as above
    """Frequencies scaled as Llama 3.1 has them, in the table."""


class StrictYaRNRotary(_StrictRotary, YaRNScalingRotaryEmbedding):  # type: ignore[misc]  # as above
    """Frequencies scaled as YaRN has them, in the table."""


STRICT_LAYERS: dict[type, type] = {
    RMSNorm: StrictRMSNorm,
    SiluAndMul: StrictSiluAndMul,
    RotaryEmbedding: StrictRotaryEmbedding,
    LinearScalingRotaryEmbedding: StrictLinearScalingRotary,
    Llama3RotaryEmbedding: StrictLlama3Rotary,
    YaRNScalingRotaryEmbedding: StrictYaRNRotary,
}


def register_layers() -> None:
    """Have vLLM build our layers. Idempotent."""
    for theirs, ours in STRICT_LAYERS.items():
        if theirs.__name__ not in op_registry_oot:
            register: Callable[[type], type] = CustomOp.register_oot(name=theirs.__name__)
            register(ours)

"""Decides which operators of a model loaded on a card must be certified, or that it is not covered.

Every layer is a linear, one of ours that stands for vLLM's, attention, or exact (it moves numbers
without arithmetic). Anything else is refused by name: strict fails closed.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from isobatch_kernels.certification import CertificationRefused
from isobatch_kernels.linear_plan import LinearShape

from isobatch_worker.cuda.attention import StrictAttention
from isobatch_worker.cuda.layers import STRICT_LAYERS, StrictRMSNorm, StrictSiluAndMul

EXACT = frozenset(
    {"VocabParallelEmbedding", "LogitsProcessor", "ApplyRotaryEmb", "Identity", "Dropout"}
)
_LINEARS = frozenset(
    {
        *("ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear", "QKVParallelLinear"),
        *("MergedColumnParallelLinear", "ParallelLMHead", "VocabParallelEmbedding"),
    }
)
"""Classes that call their method alone; others of vLLM's choose kernels of their own first."""
_LINEAR_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})


@dataclass(slots=True)
class Found:
    """What a model is made of: shapes to certify, and the attention layers to serve."""

    linears: dict[tuple[int, int, torch.dtype, bool], LinearShape] = field(default_factory=dict)
    norms: set[int] = field(default_factory=set)  # widths
    has_activation: bool = False
    rotaries: list[Any] = field(default_factory=list)
    attentions: list[StrictAttention] = field(default_factory=list)


def cover(model: torch.nn.Module, max_tokens: int, max_requests: int) -> Found:
    """What of `model` is to be certified; a step has up to `max_tokens` of `max_requests` requests.

    Raises `CertificationRefused` with the layers that nobody has described.
    """
    found = Found()
    unknown: set[str] = set()
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        limit = max_requests if module is head else max_tokens
        reason = _add(found, module, limit, is_head=module is head)
        if reason is not None:
            unknown.add(reason)
    if unknown:
        raise CertificationRefused(
            "the model holds layers that isobatch does not certify: "
            f"{', '.join(sorted(unknown))}; serve it from the throughput pool only"
        )
    return found


def _add(found: Found, module: torch.nn.Module, max_rows: int, *, is_head: bool) -> str | None:
    """Add `module` to `found`; its name where it is not covered."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__name__}"
    if kind in STRICT_LAYERS.values():
        return _add_row_layer(found, module, name)
    if kind.__name__ == "Attention":
        found.attentions.append(module.impl)  # type: ignore[arg-type]  # ours, or it is refused
        return None if isinstance(module.impl, StrictAttention) else name
    if type(getattr(module, "quant_method", None)).__name__ in _LINEAR_METHODS:
        if kind.__name__ not in _LINEARS:
            return name
        # An embedding looks rows up; one whose weight is also the head's is a linear too.
        if is_head or kind.__name__ != "VocabParallelEmbedding":
            _add_linear(found, module, max_rows)
        return None
    is_leaf = next(module.children(), None) is None
    return name if is_leaf and kind.__name__ not in EXACT else None


def _add_row_layer(found: Found, module: torch.nn.Module, name: str) -> str | None:
    refusal: str | None = module.refusal()  # type: ignore[operator]  # a method of all of ours
    if refusal is not None:
        return f"{name} ({refusal})"
    if isinstance(module, StrictRMSNorm):
        found.norms.add(module.weight.shape[0])
    elif isinstance(module, StrictSiluAndMul):
        found.has_activation = True
    else:
        found.rotaries.append(module)
    return None


def _add_linear(found: Found, module: torch.nn.Module, max_rows: int) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    (n, k), dtype = weight.shape, weight.dtype
    has_bias = getattr(module, "bias", None) is not None and not getattr(
        module, "skip_bias_add", False
    )
    key = (n, k, dtype, has_bias)
    before = found.linears.get(key)
    most = max(max_rows, before.max_rows if before else 0)
    found.linears[key] = LinearShape(n, k, dtype, has_bias, most)

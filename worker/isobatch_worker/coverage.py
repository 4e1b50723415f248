"""Decides which operators of a loaded model must be certified, or that the model is not covered.

Every leaf module is a linear, one of the row-wise operators named here, attention, or exact (it
moves numbers without arithmetic). Anything else is refused by name: strict fails closed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from isobatch_kernels.certification import CertificationRefused, Tensors
from isobatch_kernels.inputs import mixed_rows
from isobatch_kernels.rows import RowOperator

EXACT = frozenset(
    {"VocabParallelEmbedding", "LogitsProcessor", "ApplyRotaryEmb", "Identity", "Dropout"}
)
ATTENTION = "Attention"
_ACTIVATIONS = "vllm.model_executor.layers.activation"
_ROTARY = "vllm.model_executor.layers.rotary_embedding"


@dataclass(frozen=True, slots=True)
class Shapes:
    """What of the model's config the drawn inputs need. Sizes are of one rank."""

    dtype: torch.dtype
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    max_tokens: int  # rows of one step at most
    max_positions: int


@dataclass(frozen=True, slots=True)
class Covered:
    """A module of the model with an operator that it computes, of `arity` tensors."""

    module: torch.nn.Module
    operator: RowOperator
    kind: str
    arity: int


def cover(
    model: torch.nn.Module,
    shapes: Shapes,
    linear: Callable[[torch.nn.Module, Shapes], RowOperator | None],
) -> tuple[Covered, ...]:
    """The modules to certify, in the model's order; `linear` describes a linear layer, else None.

    Raises `CertificationRefused` with the types that nobody has described.
    """
    covered: list[Covered] = []
    unknown: set[str] = set()
    for module in model.modules():
        operator = linear(module, shapes)
        if operator is not None:
            covered.append(Covered(module, operator, "linear", 1))
            continue
        found = _row_operators(module, shapes)
        covered.extend(found)
        name = type(module).__name__
        is_leaf = next(module.children(), None) is None
        if is_leaf and not found and name not in EXACT and name != ATTENTION:
            unknown.add(f"{type(module).__module__}.{name}")
    if unknown:
        raise CertificationRefused(
            "the model holds layers that isobatch does not certify: "
            f"{', '.join(sorted(unknown))}; serve it from the throughput pool only"
        )
    return tuple(covered)


def _row_operators(module: torch.nn.Module, shapes: Shapes) -> list[Covered]:
    name = type(module).__name__
    if name == "RMSNorm":
        return [_norm(module, shapes, residual=False), _norm(module, shapes, residual=True)]
    if type(module).__module__ == _ACTIVATIONS and name.endswith("AndMul"):
        return [_activation(module, shapes)]
    if type(module).__module__.startswith(_ROTARY) and name != "ApplyRotaryEmb":
        return [_rotary(module, shapes)]
    return []


def _norm(module: torch.nn.Module, shapes: Shapes, *, residual: bool) -> Covered:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    width = weight.shape[0]
    forward = module.forward

    def run(*inputs: torch.Tensor) -> Tensors:
        out = forward(*inputs)
        return tuple(out) if residual else (out,)

    def draw(rows: int, generator: torch.Generator) -> Tensors:
        return tuple(
            mixed_rows(rows, width, shapes.dtype, generator) for _ in range(2 if residual else 1)
        )

    name = "add-rms-norm" if residual else "rms-norm"
    shape = f"width={width} {shapes.dtype}"
    operator = RowOperator(name, shape, run, draw, shapes.max_tokens)
    return Covered(module, operator, name, 2 if residual else 1)


def _activation(module: torch.nn.Module, shapes: Shapes) -> Covered:
    width = 2 * shapes.intermediate
    forward = module.forward

    def draw(rows: int, generator: torch.Generator) -> Tensors:
        return (mixed_rows(rows, width, shapes.dtype, generator),)

    name = type(module).__name__
    operator = RowOperator(
        name, f"width={width} {shapes.dtype}", lambda x: (forward(x),), draw, shapes.max_tokens
    )
    return Covered(module, operator, "activation", 1)


def _rotary(module: torch.nn.Module, shapes: Shapes) -> Covered:
    forward = module.forward
    query, key = shapes.heads * shapes.head_size, shapes.kv_heads * shapes.head_size

    def draw(rows: int, generator: torch.Generator) -> Tensors:
        positions = torch.randint(0, shapes.max_positions, (rows,), generator=generator)
        return (
            positions,
            mixed_rows(rows, query, shapes.dtype, generator),
            mixed_rows(rows, key, shapes.dtype, generator),
        )

    name = type(module).__name__
    shape = f"heads={shapes.heads}/{shapes.kv_heads} size={shapes.head_size} {shapes.dtype}"
    operator = RowOperator(name, shape, lambda *x: tuple(forward(*x)), draw, shapes.max_tokens)
    return Covered(module, operator, "rotary", 3)

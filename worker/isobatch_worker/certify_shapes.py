"""Performs the certification of operator shapes without a model, on what this machine has."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from isobatch_worker.certificate import Subject, subject_of
from isobatch_worker.errors import ShapeError
from isobatch_worker.models.progress import Step
from isobatch_worker.plan_view import PlanView, view_operator
from isobatch_worker.shapes import ActivationOf, Asked, AttentionOf, LinearOf, NormOf

_SEED = 20260101  # of the inputs drawn; any constant will do, a constant keeps proofs repeatable
_MAX_ROWS = 2048  # of one call: what a step of a worker batches by default
_LONGEST = 2048  # keys of a request
_CPU_BLOCK_SIZE = 128  # slots of a cache block, vLLM's default on a CPU


def certify_shapes(asked: Sequence[Asked], dtype: str, step: Step) -> PlanView:
    """Prove each of `asked`, `step` being told. Nothing is kept: a plan is a model's.

    Raises `ShapeError` for what this machine's operators do not take, `CertificationRefused`.
    """
    started = time.monotonic()
    kind: torch.dtype = getattr(torch, dtype)
    is_cuda = torch.cuda.is_available()
    subjects = list(_on_cuda(asked, kind) if is_cuda else _on_cpu(asked, kind))
    operators = []
    for done, subject in enumerate(subjects):
        name, shape, _ = subject.key
        step(f"certifying {name} {shape} ({done + 1} of {len(subjects)})")
        operators.append(view_operator(subject.prove()))
    return PlanView(
        fingerprint=None,
        device=_device(is_cuda=is_cuda),
        from_cache=False,
        seconds=time.monotonic() - started,
        operators=tuple(operators),
    )


def _device(*, is_cuda: bool) -> str:
    from isobatch_worker.environment import cpu_arithmetic, cuda_arithmetic  # vLLM: takes seconds

    return (cuda_arithmetic(torch.device("cuda")) if is_cuda else cpu_arithmetic()).device


def _on_cpu(asked: Sequence[Asked], dtype: torch.dtype) -> Iterator[Subject]:
    """VLLM's own operators, as the strict pool has them on a CPU."""
    from isobatch_kernels.attention import attention_operator
    from isobatch_kernels.rows import row_operator
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    from isobatch_worker.coverage import Shapes, cover
    from isobatch_worker.cpu_attention import AttentionShape, paged_attention
    from isobatch_worker.prepare import library_rows

    for one in asked:
        if isinstance(one, AttentionOf):
            scale = one.size**-0.5
            shape = AttentionShape(
                one.heads, one.kv_heads, one.size, scale, -1, 0.0, _CPU_BLOCK_SIZE, dtype
            )
            yield subject_of(attention_operator(paged_attention(shape, _LONGEST, _SEED), _SEED))
            continue
        if isinstance(one, LinearOf):
            if one.has_bias:
                raise ShapeError("on a CPU a bias is added apart and exactly: leave out +bias")
            yield subject_of(row_operator(library_rows(one.n, one.k, dtype, _MAX_ROWS), _SEED))
            continue
        with set_current_vllm_config(VllmConfig()):
            layer = SiluAndMul() if isinstance(one, ActivationOf) else RMSNorm(one.width)
        sizes = Shapes(dtype, one.width, one.width, 1, 1, 1, _MAX_ROWS, _LONGEST)
        for covered in cover(layer.to(dtype), sizes, lambda *_: None):
            yield subject_of(row_operator(covered.operator, _SEED))


def _on_cuda(asked: Sequence[Asked], dtype: torch.dtype) -> Iterator[Subject]:
    """Our kernels, as the strict pool has them on a card."""
    from isobatch_kernels.attention_plan import plan_attention
    from isobatch_kernels.attention_tree import AttentionShape, tree_of
    from isobatch_kernels.linear_plan import LinearShape, plan_linear
    from isobatch_kernels.row_proofs import activation_kernel, kernel_operator, norm_kernels
    from isobatch_kernels.tree import family_of, linear_tree

    from isobatch_worker.certificate import proved_at_every_count
    from isobatch_worker.cuda.attention import BLOCK_SIZE

    device = torch.device("cuda", torch.cuda.current_device())
    for one in asked:
        try:
            match one:
                case LinearOf(n, k, has_bias):
                    linear = LinearShape(n, k, dtype, has_bias, 8192)
                    tree = linear_tree(n, k, dtype, family_of(torch.cuda.get_device_capability()))
                    prove = partial(plan_linear, linear, device, _SEED)
                    yield Subject(("linear", linear.name, tree.name), prove)
                case AttentionOf(heads, kv_heads, size):
                    shape = AttentionShape(heads, kv_heads, size, dtype, size**-0.5)
                    prove = partial(plan_attention, shape, BLOCK_SIZE, device, _SEED)
                    yield Subject(("attention", shape.name, tree_of(shape).name), prove)
                case NormOf(width) | ActivationOf(width):
                    kernels = (
                        norm_kernels(width, dtype, device)
                        if isinstance(one, NormOf)
                        else (activation_kernel(width, dtype),)
                    )
                    for kernel in kernels:
                        operator = kernel_operator(kernel, _MAX_ROWS, device, _SEED)
                        key = (operator.name, operator.shape, operator.tree)
                        yield Subject(key, partial(proved_at_every_count, operator))
        except ValueError as exc:
            raise ShapeError(f"{one}: {exc}") from exc

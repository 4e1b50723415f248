"""Performs the certification of operator shapes without a model, on what this machine has."""

import time
from collections.abc import Iterator, Sequence

import torch

from isobatch_worker.certificate import SEED, Subject, lone_subject, prove_all, subject_of
from isobatch_worker.errors import ShapeError
from isobatch_worker.models.progress import Step
from isobatch_worker.plan_view import PlanView, view_operator
from isobatch_worker.shapes import ActivationOf, Asked, AttentionOf, LinearOf, NormOf

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
    proofs = prove_all(subjects, step)
    return PlanView(
        fingerprint=None,
        device=_device(is_cuda=is_cuda),
        from_cache=False,
        seconds=time.monotonic() - started,
        operators=tuple(map(view_operator, proofs)),
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
            yield subject_of(attention_operator(paged_attention(shape, _LONGEST, SEED), SEED))
            continue
        if isinstance(one, LinearOf):
            if one.has_bias:
                raise ShapeError("on a CPU a bias is added apart and exactly: leave out +bias")
            yield subject_of(row_operator(library_rows(one.n, one.k, dtype, _MAX_ROWS), SEED))
            continue
        with set_current_vllm_config(VllmConfig()):
            layer = SiluAndMul() if isinstance(one, ActivationOf) else RMSNorm(one.width)
        sizes = Shapes(dtype, one.width, one.width, 1, 1, 1, _MAX_ROWS, _LONGEST)
        for covered in cover(layer.to(dtype), sizes, lambda *_: None):
            yield subject_of(row_operator(covered.operator, SEED))


def _on_cuda(asked: Sequence[Asked], dtype: torch.dtype) -> Iterator[Subject]:
    """Our kernels, as the strict pool has them on a card."""
    from isobatch_kernels.attention_tree import AttentionShape
    from isobatch_kernels.linear_plan import LinearShape
    from isobatch_kernels.row_proofs import activation_kernel, kernel_operator, norm_kernels

    from isobatch_worker.cuda.attention import BLOCK_SIZE
    from isobatch_worker.cuda.prepare import attention_subject, linear_subject

    device = torch.device("cuda", torch.cuda.current_device())
    for one in asked:
        try:
            match one:
                case LinearOf(n, k, has_bias):
                    yield linear_subject(LinearShape(n, k, dtype, has_bias, 8192), device)
                case AttentionOf(heads, kv_heads, size):
                    shape = AttentionShape(heads, kv_heads, size, dtype, size**-0.5)
                    yield attention_subject(shape, BLOCK_SIZE, device)
                case NormOf(width):
                    for kernel in norm_kernels(width, dtype, device):
                        yield lone_subject(kernel_operator(kernel, _MAX_ROWS, device, SEED))
                case ActivationOf(width):
                    kernel = activation_kernel(width, dtype)
                    yield lone_subject(kernel_operator(kernel, _MAX_ROWS, device, SEED))
        except ValueError as exc:
            raise ShapeError(f"{one}: {exc}") from exc

"""Performs y = x W^T (+ b) by the library, as torch calls it, in one of two settings.

cuBLASLt held to no split of K and no reduced-precision reduction has the plain tree's bits at
nearly every row count on Hopper; default cuBLAS has them where its heuristic splits nothing. Both
are candidates, never more: which algorithm the library takes is its own affair, so each serves
only the row counts where it was proved, on operands placed as they were in the proof.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from isobatch_kernels.matmul import check_linear

LIBRARY_ALIGNMENT = 256
"""Bytes. torch tells cuBLASLt how far a pointer is aligned, up to 256, and its heuristic reads it;
allocations of torch are aligned further."""

_matmul = torch.backends.cuda.matmul


@dataclass(frozen=True, slots=True)
class Library:
    """One setting of torch's switches. `may_split` allows split-K and reduced precision in it."""

    name: str
    backend: str
    may_split: bool


CUBLASLT = Library("cublaslt-no-split", "cublaslt", may_split=False)
CUBLAS = Library("cublas", "cublas", may_split=True)
LIBRARIES = (CUBLASLT, CUBLAS)


@contextmanager
def switched_to(library: Library) -> Iterator[None]:
    """Set torch's process-wide BLAS switches to `library`, and back at the end.

    Not for two threads at once: the switches are the process's.
    """
    backend = torch.backends.cuda.preferred_blas_library()
    bfloat16 = (
        _matmul.allow_bf16_reduced_precision_reduction,
        _matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    float16 = (
        _matmul.allow_fp16_reduced_precision_reduction,
        _matmul.allow_fp16_reduced_precision_reduction_split_k,
    )
    allowed = (library.may_split, library.may_split)
    try:
        torch.backends.cuda.preferred_blas_library(library.backend)
        _matmul.allow_bf16_reduced_precision_reduction = allowed
        _matmul.allow_fp16_reduced_precision_reduction = allowed
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(backend)
        _matmul.allow_bf16_reduced_precision_reduction = bfloat16
        _matmul.allow_fp16_reduced_precision_reduction = float16


def placement_refusal(name: str, x: torch.Tensor) -> str | None:
    """Why `x` [rows, K], called `name`, is not placed as in the library's proofs, or None."""
    if not x.is_contiguous():
        return f"{name} is not contiguous: shape {list(x.shape)}, strides {list(x.stride())}"
    if x.data_ptr() % LIBRARY_ALIGNMENT:
        return f"{name} starts at an address that is no multiple of {LIBRARY_ALIGNMENT} bytes"
    return None


def library_linear(
    library: Library, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """X [M, K], w [N, K], bias [N] -> [M, N] by `library`.

    Raises ValueError for operands that are not contiguous and aligned to `LIBRARY_ALIGNMENT`.
    """
    check_linear(x, w, bias)
    refusal = placement_refusal("x", x) or placement_refusal("w", w)
    if refusal is not None:
        raise ValueError(f"{library.name}: {refusal}")
    with switched_to(library):
        return torch.nn.functional.linear(x, w, bias)

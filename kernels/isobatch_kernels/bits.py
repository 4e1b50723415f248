"""Decides whether two tensors are the same bits, and names tensors by their bits."""

import hashlib
from collections.abc import Iterable

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """`x` seen as integers of its element size: same shape, no copy for a contiguous tensor."""
    x = x.contiguous()
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return x.view(_INTEGER_OF_SIZE[x.element_size()])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both have one shape, one dtype and equal bits: -0.0 differs from 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.equal(as_bits(left), as_bits(right)))


def first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """Index of the first element whose bits differ; None if none does. Shapes must agree."""
    different = (as_bits(left) != as_bits(right)).nonzero()
    return tuple(int(i) for i in different[0]) if len(different) else None


def bits_digest(tensors: Iterable[torch.Tensor]) -> str:
    """`sha256:…` over dtype, shape and bits of `tensors`, in order."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(as_bits(x.cpu()).numpy().tobytes())
    return "sha256:" + digest.hexdigest()

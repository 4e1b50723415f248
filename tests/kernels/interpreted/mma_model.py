"""A model of the matrix units' arithmetic, and Triton's interpreter made to use it.

After MMA-Sim (arXiv 2511.10909): an instruction adds a group of products and the accumulator as
fixed-point numbers of 25 bits under the largest of them, truncated; the sum is rounded to float32
toward zero. The model takes the largest value's own exponent, so it is not bit-exact to a card; it
has what matters here, an order that shows and terms that are rounded away.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from isobatch_kernels.tree import Tree
from numpy.typing import NDArray
from triton.runtime import interpreter

_FRACTION_BITS = 25
_GROUP = 16

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def fused_add(products: Float64, acc: Float32) -> Float32:
    """products [..., G], acc [...] -> [...]: one instruction's sum."""
    terms = np.concatenate((products, acc[..., None].astype(np.float64)), axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(terms).max(axis=-1, keepdims=True)
        quantum = np.exp2(np.frexp(largest)[1].astype(np.float64) - 1 - _FRACTION_BITS)
        exact = (np.trunc(terms / quantum) * quantum).sum(axis=-1)
        is_finite = np.isfinite(largest[..., 0])
        exact = np.where(is_finite, exact, terms.sum(axis=-1))
        rounded = exact.astype(np.float32)
        is_beyond = (np.abs(rounded.astype(np.float64)) > np.abs(exact)) & is_finite
        return np.where(is_beyond, np.nextafter(rounded, np.float32(0)), rounded)


def chain(a: Float64, b: Float64, acc: Float32, group: int = _GROUP) -> Float32:
    """a [M, K], b [K, N], acc [M, N] -> [M, N]: groups of K in order."""
    for start in range(0, a.shape[1], group):
        own = slice(start, start + group)
        if a[:, own].any() and b[own].any():  # nothing but zeros adds nothing
            acc = fused_add(a[:, None, own] * b[own].T[None, :, :], acc)
    return acc


def linear_in(tree: Tree, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K], w [N, K] -> [M, N] in x.dtype, added in `tree`."""
    a, b = x.double().numpy(), w.double().numpy().T
    total: Float32 | None = None
    for start in range(0, tree.terms, tree.chunk):
        own = slice(start, start + tree.chunk)
        zero = np.zeros((a.shape[0], b.shape[1]), np.float32)
        part = chain(a[:, own], b[own], zero, tree.group)
        total = part if total is None else total + part
    return torch.from_numpy(total).to(x.dtype)


def _float32(handle: Any) -> Float32:
    x = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(x, np.float32)


def _create_dot(_builder: Any, a: Any, b: Any, acc: Any, *_unused: Any) -> Any:
    total = chain(_float32(a).astype(np.float64), _float32(b).astype(np.float64), acc.data)
    return interpreter.TensorHandle(total, acc.dtype.scalar)


def install() -> None:
    """Give this process's Triton interpreter the model's `tl.dot`, and rounding to nearest even.

    Its own `tl.dot` multiplies the bit patterns of bfloat16 and lets numpy choose the order of the
    sum; its casts to bfloat16 truncate.
    """
    own_cast = interpreter.InterpreterBuilder.cast_impl

    def cast(builder: Any, source: Any, wanted: Any) -> Any:
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.bfloat16):
            return own_cast(builder, source, wanted)
        x = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(x.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.cast_impl = cast

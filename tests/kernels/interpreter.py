"""Triton's interpreter, mended, for tests that run in a process of their own.

Import beside the kernels, with TRITON_INTERPRET=1 set before Triton is imported at all. The stock
interpreter multiplies the bit patterns of bfloat16, truncates where the device rounds to nearest
even, and takes a dot product by a library whose order follows the tile's shape. Here a product is
summed over K in one order, so that a test of bits tests the kernel's tree; the rounding inside the
tensor core is the device's business and proved there.
"""

import functools
import os

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1", "these tests run by test_interpreted.py"

FloatArray = npt.NDArray[np.float32]


def _float32(handle: interpreter.TensorHandle) -> FloatArray:
    if handle.dtype.scalar == tl.bfloat16:
        widened: FloatArray = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return widened
    return np.asarray(handle.data, dtype=np.float32)


def _dot(
    _builder: object,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    d: interpreter.TensorHandle,
    _precision: object,
    _imprecise: object,
) -> interpreter.TensorHandle:
    left, right, total = _float32(a), _float32(b), d.data.astype(np.float32)
    for k in range(left.shape[-1]):
        total = total + left[..., :, k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


_stock_cast = interpreter.InterpreterBuilder.cast_impl


def _cast(
    builder: object, source: interpreter.TensorHandle, wanted: tl.dtype
) -> interpreter.TensorHandle:
    if source.dtype.scalar != tl.float32 or wanted.scalar != tl.bfloat16:
        return _stock_cast(builder, source, wanted)
    bits = np.ascontiguousarray(source.data).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = np.where(np.isnan(source.data), 0x7FC0, rounded)
    return interpreter.TensorHandle(quiet.astype(np.uint16), wanted.scalar)


def _umulhi(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The high word of a product of 64-bit words by halves; the stock one loops in Python."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    high: npt.NDArray[np.uint64] = a1 * b1 + (middle >> half) + (other >> half)
    return high


@functools.cache
def _patch_library() -> None:
    """Patch what Triton's own library functions see; the interpreter never restores that."""
    interpreter._patch_lang(tl.zeros.fn)


def _call(function: interpreter.InterpretedFunction, *values: object, **named: object) -> object:
    """One kernel function called by another.

    The stock interpreter patches the whole language anew at each such call, which takes most of a
    test's time. The launch has patched what a kernel's module sees, and restores it.
    """
    _patch_library()
    return function.rewrite()(*values, **named)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.np_umulhi_u64 = _umulhi
interpreter.InterpretedFunction.__call__ = _call

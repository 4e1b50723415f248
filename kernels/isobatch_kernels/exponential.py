"""Performs the sampling noise on the device: the bits of `noise.exponential_noise`, row by row.

Integers are Philox4x64-10 (Salmon et al., SC 2011) keyed with the seed and counted from the
position, exactly as on the CPU. The logarithm is the trouble: numpy's float64 log is correctly
rounded by no standard, nor is CUDA's. Both are within 1 ulp of float64 and the result is rounded to
float32, so they can part only where the float64 value lies within an ulp of a rounding boundary of
float32, about once in 2^28 draws. That is not never: `SAMPLER` is therefore a constant of its own,
to stand in the fingerprint in place of the CPU's.
"""

# Triton's language: arguments are untyped, constants upper case.
# ruff: noqa: ANN001, ANN202, N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

SAMPLER = "exponential-race/philox4x64/seed+position/triton-log64/v1"
BLOCK = 256  # counters a program: four draws each


@triton.jit
def _multiply(a, b):
    """The 128-bit product of unsigned 64-bit a and b: (high, low)."""
    return tl.umulhi(a, b), a * b


@triton.jit
def _philox(c0, c3, key):
    """Ten rounds of Philox4x64 on the counter (c0, 0, 0, c3) with the key (key, 0)."""
    M0: tl.constexpr = 0xD2E7470EE14C6C93
    M1: tl.constexpr = 0xCA5A826395121157
    W0: tl.constexpr = 0x9E3779B97F4A7C15
    W1: tl.constexpr = 0xBB67AE8584CAA73B
    c1 = tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    k0 = key + tl.zeros_like(c0)
    k1 = tl.zeros_like(c0)
    m0 = tl.full(c0.shape, M0, tl.uint64)
    m1 = tl.full(c0.shape, M1, tl.uint64)
    w0 = tl.full(c0.shape, W0, tl.uint64)
    w1 = tl.full(c0.shape, W1, tl.uint64)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, m0)
        high1, low1 = _multiply(c2, m1)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _exponential_kernel(seeds_ptr, positions_ptr, y_ptr, y_row, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row).to(tl.uint64)
    # numpy counts up before it draws: its first four numbers are of counter 1.
    counter = (block + 1).to(tl.uint64)
    words = _philox(counter, position + tl.zeros_like(counter), seed)
    for i in tl.static_range(4):
        whole = ((words[i] >> 11) + 1).to(tl.int64).to(tl.float64)
        noise = -tl.log(whole * 1.1102230246251565e-16)
        noise = tl.maximum(noise, 1.1102230246251565e-16)
        column = block * 4 + i
        tl.store(y_ptr + row * y_row + column, noise.to(tl.float32), mask=column < columns)


def exponential_rows(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """seeds, positions: [T] int64 -> [T, vocabulary] float32, standard exponential, never zero.

    Row r is a function of (seeds[r], positions[r]) alone; positions count the prompt and are not
    negative. Raises `ValueError` for another shape, dtype or device.
    """
    for name, x in (("seeds", seeds), ("positions", positions)):
        if x.dim() != 1 or x.dtype != torch.int64 or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype}{tuple(x.shape)}, not contiguous int64 [T]")
    if seeds.shape != positions.shape or seeds.device != positions.device or vocabulary < 1:
        raise ValueError(
            f"seeds {tuple(seeds.shape)} on {seeds.device}, positions {tuple(positions.shape)} on "
            f"{positions.device}, vocabulary {vocabulary}"
        )
    y = torch.empty((seeds.shape[0], vocabulary), dtype=torch.float32, device=seeds.device)
    if y.shape[0]:
        _exponential_kernel[(y.shape[0], triton.cdiv(vocabulary, 4 * BLOCK))](
            seeds, positions, y, y.stride(0), vocabulary,
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y

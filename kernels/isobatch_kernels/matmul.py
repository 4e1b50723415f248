"""Performs y = x W^T (+ b) by one tiling of the plain tree; refuses what it does not take.

A `Tiling` is a schedule: every tiling gives the bits of `tree.plain_tree`, and `REFERENCE`, which
takes any stride and alignment, is the one that the others are certified against.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import triton
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from isobatch_kernels.matmul_kernels import pointer_kernel, tma_kernel

_TMA_BYTES = 16  # what Hopper's tensor copies ask of a base address and of a row stride
_INTERPRETED_PROGRAMS = 3  # of a persistent launch without a card: few, so that each loops


class Loads(Enum):
    """How a kernel reads its operands."""

    POINTER = "pointer"
    TMA = "tma"


@dataclass(frozen=True, slots=True)
class Tiling:
    """A schedule of the plain tree: `tokens` x `features` outputs a tile, `depth` terms a load.

    `swapped` makes the weights the MMA's M side, whose least useful size is 64 (`wgmma`), so that
    few tokens waste none of it. `group` token tiles run side by side, for the weights' sake.
    """

    tokens: int
    features: int
    depth: int
    warps: int
    stages: int
    loads: Loads = Loads.TMA
    swapped: bool = False
    persistent: bool = False
    group: int = 8

    @property
    def name(self) -> str:
        """As plans write it: `tma-swap-t16-f64-k128-w4-s5`."""
        kind = f"{self.loads.value}{'-swap' * self.swapped}{'-persistent' * self.persistent}"
        tile = f"t{self.tokens}-f{self.features}-k{self.depth}"
        return f"{kind}-{tile}-w{self.warps}-s{self.stages}"

    def tiles(self, rows: int, features: int) -> int:
        """How many tiles cover an output of [rows, features]."""
        return -(-rows // self.tokens) * -(-features // self.features)


REFERENCE = Tiling(64, 128, 64, warps=4, stages=3, loads=Loads.POINTER)


def check_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise a ValueError that names the first thing about the operands which no tiling takes."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"need x [M, K] and w [N, K], got {list(x.shape)} and {list(w.shape)}")
    if 0 in w.shape:
        raise ValueError(f"need w [N, K] with N, K >= 1, got {list(w.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        raise ValueError(f"need bfloat16 or float16 in x and w alike, got {x.dtype} and {w.dtype}")
    for name, operand in (("x", x), ("w", w)):
        if operand.shape[1] > 1 and operand.stride(1) != 1:
            raise ValueError(f"the last dimension of {name} has stride {operand.stride(1)}, not 1")
    if bias is not None:
        _check_bias(bias, w)
    devices = {t.device for t in (x, w, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"x, w and bias are on different devices: {sorted(map(str, devices))}")
    check_device("x", x)


def check_device(name: str, x: torch.Tensor) -> None:
    """Raise a ValueError where `x`, called `name`, is not where a kernel can run."""
    if not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name} is on {x.device}: the kernels need a CUDA device")


def _check_bias(bias: torch.Tensor, w: torch.Tensor) -> None:
    if bias.shape != (w.shape[0],) or bias.dtype != w.dtype or bias.stride(0) != 1:
        raise ValueError(
            f"need bias [{w.shape[0]}] of {w.dtype}, contiguous; "
            f"got {list(bias.shape)} of {bias.dtype} with stride {bias.stride()}"
        )


def tma_refusal(name: str, x: torch.Tensor) -> str | None:
    """Why `x` [rows, K], called `name`, cannot be read by tensor copies, or None."""
    if x.data_ptr() % _TMA_BYTES:
        return f"{name} starts at an address that is no multiple of {_TMA_BYTES} bytes"
    row_bytes = _row_stride(x) * x.element_size()
    if row_bytes <= 0 or row_bytes % _TMA_BYTES:
        return f"rows of {name} are {row_bytes} bytes apart, no positive multiple of {_TMA_BYTES}"
    return None


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    tiling: Tiling = REFERENCE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """X [M, K], w [N, K], bias [N] -> [M, N], all bfloat16 or all float16; M may be 0.

    Rows may be strided, columns must be contiguous. Accumulates in float32 by the plain tree,
    adds the bias in float32, rounds once. Writes to `out` where given: its rows may be strided.
    Raises ValueError for operands that the tiling does not take, before any launch, and
    RuntimeError where the kernel cannot be compiled for the device.
    """
    check_linear(x, w, bias)
    rows, features = x.shape[0], w.shape[0]
    if out is None:
        out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    elif out.shape != (rows, features) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"need out [{rows}, {features}] of {x.dtype} with contiguous columns")
    elif out.device != x.device:
        raise ValueError(f"out is on {out.device}, x on {x.device}")
    if rows:
        _launch(x, w, bias, tiling, out)
    return out


def _launch(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling, out: torch.Tensor
) -> None:
    has_bias, bias = bias is not None, out if bias is None else bias
    shape = (x.shape[0], w.shape[0], x.shape[1])
    tiles = tiling.tiles(shape[0], shape[1])
    options = {
        "HAS_BIAS": has_bias,
        "SWAP": tiling.swapped,
        "TOKENS": tiling.tokens,
        "FEATURES": tiling.features,
        "DEPTH": tiling.depth,
        "GROUP": tiling.group,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    if tiling.loads is Loads.TMA:
        refusal = tma_refusal("x", x) or tma_refusal("w", w)
        if refusal is not None:
            raise ValueError(f"{tiling.name}: {refusal}")
        programs = min(tiles, _processors(x.device)) if tiling.persistent else tiles
        x_tile = _descriptor(x, tiling.tokens, tiling.depth)
        w_tile = _descriptor(w, tiling.features, tiling.depth)
        options["PERSISTENT"] = tiling.persistent
        launch = partial(tma_kernel[(programs,)], x_tile, w_tile, bias, out, *shape, out.stride(0))
    else:
        strides = (_row_stride(x), _row_stride(w), out.stride(0))
        options["WHOLE_K"] = shape[2] % tiling.depth == 0
        launch = partial(pointer_kernel[(tiles,)], x, w, bias, out, *shape, *strides)
    try:
        launch(**options)
    except TritonError as exc:
        raise RuntimeError(f"{tiling.name}: {type(exc).__name__}: {exc}") from exc


def _row_stride(x: torch.Tensor) -> int:
    """Elements from row to row; for a single row, whose stride says nothing, what would fit."""
    return -(-x.shape[1] // 8) * 8 if x.shape[0] == 1 else x.stride(0)


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [_row_stride(x), 1], [rows, columns])


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count

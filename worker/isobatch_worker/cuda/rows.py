"""Decides on which shapes the row kernels of layers and sampling are certified."""

import torch
from isobatch_kernels.certification import Operator
from isobatch_kernels.row_proofs import (
    RowKernel,
    activation_kernel,
    kernel_operator,
    norm_kernels,
    rotary_kernel,
)

from isobatch_worker.cuda.coverage import Found

_MAX_ROWS = 2048  # proved; one program computes one row, so more rows are more programs
_HEADS = (8, 2)  # of a drawn query and key: a program takes 8 of either


def layer_operators(
    found: Found, dtype: torch.dtype, intermediate: int, device: torch.device, seed: int
) -> list[Operator]:
    """The row kernels of `found`, `intermediate` columns wide where they follow a gate."""
    kernels: list[RowKernel] = []
    for width in sorted(found.norms):
        kernels += norm_kernels(width, dtype, device)
    if found.has_activation:
        kernels.append(activation_kernel(intermediate, dtype))
    for module in found.rotaries:
        kernels.append(rotary_kernel(_HEADS, module.head_size, module.cos_sin_cache, dtype))
    distinct = {(kernel.name, kernel.shape): kernel for kernel in kernels}
    return [kernel_operator(kernel, _MAX_ROWS, device, seed) for kernel in distinct.values()]

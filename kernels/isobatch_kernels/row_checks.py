"""Decides whether tensors of rows are what a row kernel takes, before any launch."""

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(operator: str, *tensors: torch.Tensor) -> None:
    """Raise `ValueError` naming the first of `tensors` that `operator` would not take.

    All must be [T, D], D > 0, with contiguous columns, of one floating dtype, on one device.
    """
    first = tensors[0]
    for index, x in enumerate(tensors):
        if x.dim() != 2 or x.shape[1] == 0 or x.stride(1) != 1:
            raise ValueError(
                f"{operator}: tensor {index} is {tuple(x.shape)} with strides {x.stride()}, "
                "not [T, D] with contiguous columns"
            )
        if x.dtype not in _DTYPES or x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"{operator}: tensor {index} is {x.dtype} on {x.device}; need one of {_DTYPES}, "
                f"as the first is {first.dtype} on {first.device}"
            )


def settle_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, D] or [T, H, D], or a copy of one alignment: one kernel for a length of rows.

    Triton specializes on alignment, alignment decides how many columns a thread holds, and that is
    the order of a sum across threads: a view at an odd address would have bits of its own.
    """
    if is_settled(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def is_settled(x: torch.Tensor) -> bool:
    """Whether the rows of `x` are aligned as those of a fresh contiguous tensor of its width."""
    strides = x.stride()[:-1]
    if x.shape[-1] % 16:
        # Rows of odd lengths are never aligned, whatever the address of the first.
        return any(stride % 16 for stride in strides)
    return all(stride % 16 == 0 for stride in strides) and x.data_ptr() % 16 == 0

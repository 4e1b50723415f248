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

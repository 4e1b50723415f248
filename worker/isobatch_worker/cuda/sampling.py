"""Performs: what the strict sampler computes with on a card."""

import torch
from isobatch_kernels.certification import Tensors
from isobatch_kernels.exponential import exponential_rows
from isobatch_kernels.log_softmax import log_softmax

from isobatch_worker.sampler import Draw, Means

_WORD = 1 << 64


def on_card(device: torch.device) -> Means:
    """Our log-softmax and noise; vLLM's filters, as far as they are admitted."""
    return Means(device, _log_softmax, _softmax, race, few=64, every=256)


def _log_softmax(x: torch.Tensor) -> Tensors:
    return (log_softmax(x),)


def _softmax(x: torch.Tensor) -> Tensors:
    return (log_softmax(x).exp_(),)


def race(probabilities: torch.Tensor, draws: list[Draw]) -> None:
    """Divide every row by its noise, [B, V] in place; a greedy row's is never looked at."""
    seeds = torch.tensor([_signed(draw.seed or 0) for draw in draws])
    positions = torch.tensor([draw.position for draw in draws])
    device = probabilities.device
    noise = exponential_rows(
        seeds.to(device, non_blocking=True),
        positions.to(device, non_blocking=True),
        probabilities.shape[1],
    )
    probabilities.div_(noise)


def _signed(seed: int) -> int:
    """The 64-bit two's complement that `seed` has, as int64 holds it."""
    word = seed % _WORD
    return word - _WORD if word >= _WORD // 2 else word

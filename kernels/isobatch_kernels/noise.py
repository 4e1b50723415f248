"""Decides the sampling noise: a stateless function of (seed, absolute position).

Philox4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is keyed with the
seed and counted from the position, so that a token's noise does not depend on how many tokens were
drawn before it in this process: preemption, restart and another replica change nothing.
"""

import numpy as np
import torch

SAMPLER = "exponential-race/philox4x64/seed+position/v1"
_MASK = (1 << 64) - 1


def exponential_noise(seed: int, position: int, vocabulary: int) -> torch.Tensor:
    """[vocabulary] float32, standard exponential, for the token at `position` (prompt included).

    Integers come from Philox; the logarithm is taken in float64 by one library on one row, and
    rounded once. Never zero: the smallest uniform is 2^-53.
    """
    # uint64 arrays: numpy takes a list with an integer above 2^63 as floats and drops its low bits.
    key = np.array([seed & _MASK, 0], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, position], dtype=np.uint64))
    uniform = ((bits.random_raw(vocabulary) >> 11) + 1).astype(np.float64) * 2.0**-53
    return torch.from_numpy(-np.log(uniform)).clamp_min_(2.0**-53).float()

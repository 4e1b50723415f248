import numpy as np
import pytest
import torch
from isobatch_kernels.noise import exponential_noise


def test_noise_is_a_function_of_seed_and_position_alone() -> None:
    first = exponential_noise(7, 100, 1000)
    for position in range(5):
        exponential_noise(7, position, 1000)

    assert torch.equal(exponential_noise(7, 100, 1000), first)


@pytest.mark.parametrize(("seed", "position"), [(8, 100), (7, 101), (-7, 100), (2**63 - 1, 0)])
def test_another_seed_or_position_gives_other_noise(seed: int, position: int) -> None:
    same = exponential_noise(7, 100, 1000) == exponential_noise(seed, position, 1000)

    assert same.sum() < 10


def test_large_and_negative_seeds_differ_in_every_bit() -> None:
    seeds = [-1, -2, 2**63 - 1, 2**63 - 2, 2**53, 2**53 + 1]
    draws = {exponential_noise(seed, 0, 4).numpy().tobytes() for seed in seeds}

    assert len(draws) == len(seeds)


def test_noise_is_standard_exponential_and_never_zero() -> None:
    noise = exponential_noise(1, 0, 200_000).numpy()

    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 0.01
    quantiles = np.quantile(noise, [0.1, 0.5, 0.9])
    assert np.allclose(quantiles, -np.log([0.9, 0.5, 0.1]), rtol=0.02)

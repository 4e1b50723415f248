"""The gateway's speed on the machine at hand, by a sample in CI and with --full by the whole load.

The figures kept are those of `run`. Bounds of the sample are scaled by how much slower than at the
kept run this machine does a fixed piece of Python; the whole is held to the row itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.benchmarks import machine
from tests.benchmarks.run import run
from tests.benchmarks.scenarios import FULL, SAMPLE, Pair, Scenario, added_first_byte_ms
from tests.benchmarks.stub import raise_file_limit

FIRST_BYTE_MS = 0.8
FIRST_BYTE_P99_MS = 3.0
CHUNK_US = 45.0
GROWTH = 1.3  # of a request's cost beside open streams, which is flat but for noise
DELAY_P99_MS = 20.0
MEMORY_GROWTH = 1.05  # over the 40 s of 2,500 open streams


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured, and how much of slower machines and rougher samples the bounds allow."""

    name: str
    scenarios: dict[str, Scenario]
    figures: dict[str, list[Pair]]
    slowness: float
    median_slack: float
    tail_slack: float


@pytest.fixture(scope="module", params=["sample", pytest.param("whole", marks=pytest.mark.full)])
def speed(request: pytest.FixtureRequest) -> Speed:
    raise_file_limit()
    is_whole = request.param == "whole"
    scenarios = FULL if is_whole else SAMPLE
    _, results = run(["isobatch"], scenarios)
    return Speed(
        name=request.param,
        scenarios=scenarios,
        figures=results["isobatch"],
        # Read right after the load: 1 on the machine of the kept figures or a faster one.
        slowness=1.0 if is_whole else machine.slowness(),
        # Of 12 s, not of the kept 60, a median is rougher; the 24 slowest of 2,400 are as much the
        # shared cores' as ours.
        median_slack=1.0 if is_whole else 1.5,
        tail_slack=1.0 if is_whole else 3.0,
    )


def costs(pairs: Sequence[Pair]) -> list[float]:
    return [p.through.cpu_ms_per_request for p in pairs if p.through.cpu_ms_per_request is not None]


def test_every_answer_comes_whole(speed: Speed) -> None:
    assert set(speed.figures) == set(speed.scenarios)
    for name, pairs in speed.figures.items():
        assert pairs
        for pair in pairs:
            assert (pair.through.errored, pair.through.lost) == (0, 0), (name, pair)


def test_the_first_byte_comes_soon(speed: Speed, report_figure: Any) -> None:
    added = added_first_byte_ms(speed.figures["first byte"])

    assert added is not None
    report_figure(
        f"first byte added by the gateway, {speed.name}, ms",
        f"p50 {added.p50:.2f} p99 {added.p99:.2f}",
    )
    assert added.p50 <= FIRST_BYTE_MS * speed.median_slack * speed.slowness
    assert added.p99 <= FIRST_BYTE_P99_MS * speed.tail_slack * speed.slowness


def test_a_chunk_costs_little(speed: Speed) -> None:
    (pair,) = speed.figures["chunk cost"]

    assert pair.through.cpu_us_per_chunk is not None
    assert pair.through.cpu_us_per_chunk <= CHUNK_US * speed.slowness


def test_the_cost_of_a_request_does_not_grow_with_open_streams(speed: Speed) -> None:
    besides = [name for name in speed.figures if name.startswith("request beside ")]
    (alone,) = costs(speed.figures["request beside 0 streams"])

    assert len(besides) > 1
    for name in besides:
        (beside,) = costs(speed.figures[name])
        assert beside <= GROWTH * alone, name


@pytest.mark.parametrize("speed", [pytest.param("whole", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("streams", [1500, 2500])
def test_open_streams_are_served_on_time(speed: Speed, streams: int, report_figure: Any) -> None:
    (pair,) = speed.figures[f"{streams} streams"]

    delay = pair.through.chunk_delay_ms
    start_mb, end_mb = pair.through.memory_start_mb, pair.through.memory_end_mb
    assert delay is not None
    assert start_mb is not None
    assert end_mb is not None
    memory = f"{start_mb:.0f} MB, then {end_mb:.0f}"
    report_figure(f"{streams} open streams, delay of a chunk, ms", f"p99 {delay.p99:.1f}; {memory}")
    assert pair.through.ok == streams
    assert delay.p99 <= DELAY_P99_MS
    assert end_mb <= MEMORY_GROWTH * start_mb

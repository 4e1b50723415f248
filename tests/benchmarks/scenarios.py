"""Decides the loads of the gateway benchmark, and which figures are read off what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.load import Load, Outcome, Percentiles, percentiles

RAMP_PER_SECOND = 250.0


def first_byte(seconds: int) -> Load:
    """200 requests a second of 20 chunks, 5 ms apart."""
    return Load(
        rate=200,
        requests=200 * seconds,
        chunks=20,
        interval_ms=5,
        window_start=0.5,
        window_end=seconds,
    )


def chunk_cost(seconds: int) -> Load:
    """4,000 chunks a second: 200 streams of 20 chunks a second, all open through the window."""
    return Load(
        rate=100,
        requests=200,
        chunks=20 * (seconds + 4),
        interval_ms=50,
        window_start=3,
        window_end=3 + seconds,
    )


def open_streams(streams: int, seconds: int) -> Load:
    """`streams` streams of 5 chunks a second, all open through the window."""
    ramp = streams / RAMP_PER_SECOND
    return Load(
        rate=RAMP_PER_SECOND,
        requests=streams,
        chunks=5 * (int(ramp) + seconds + 2),
        interval_ms=200,
        window_start=ramp + 1,
        window_end=ramp + 1 + seconds,
    )


def request_cost(held: int, seconds: int) -> Load:
    """50 requests a second of one chunk, beside `held` open and silent streams."""
    return Load(
        rate=50,
        requests=50 * seconds,
        chunks=1,
        interval_ms=1,
        window_start=0,
        window_end=seconds + 1,
        held=held,
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, how often it is run, and whether the stub alone is measured beside each run."""

    load: Load
    rounds: int = 1
    is_beside_direct: bool = False


FULL = {
    # Many short rounds: on a shared host the median of rounds says more than a long one.
    "first byte": Scenario(first_byte(6), rounds=7, is_beside_direct=True),
    "chunk cost": Scenario(chunk_cost(15)),
    "2500 streams": Scenario(open_streams(2500, 40)),
    "1500 streams": Scenario(open_streams(1500, 20)),
    "request beside 0 streams": Scenario(request_cost(0, 15)),
    "request beside 300 streams": Scenario(request_cost(300, 15)),
    "request beside 1000 streams": Scenario(request_cost(1000, 15)),
}
QUICK = {
    "first byte": Scenario(first_byte(4), rounds=3, is_beside_direct=True),
    "chunk cost": Scenario(chunk_cost(6)),
}
SAMPLE = {
    **QUICK,
    "request beside 0 streams": Scenario(request_cost(0, 5)),
    "request beside 300 streams": Scenario(request_cost(300, 5)),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: through the target, and, where it was asked for, without it just before."""

    through: Outcome
    direct: Outcome | None


@dataclass(frozen=True, slots=True)
class Times:
    """p50, p95 and p99 in ms, each the median of the rounds'."""

    p50: float
    p95: float
    p99: float


def added_first_byte_ms(pairs: Sequence[Pair]) -> Times | None:
    """First byte through the target less first byte of the stub alone; None if either is absent."""
    both = [
        (pair.through.first_byte_ms, pair.direct.first_byte_ms)
        for pair in pairs
        if pair.direct is not None
    ]
    rounds = [
        Times(through.p50 - direct.p50, through.p95 - direct.p95, through.p99 - direct.p99)
        for through, direct in both
        if through is not None and direct is not None
    ]
    return middle(rounds)


def first_byte_ms(outcomes: Sequence[Outcome]) -> Times | None:
    """First byte over the rounds."""
    return middle([o.first_byte_ms for o in outcomes if o.first_byte_ms is not None])


def middle(rounds: Sequence[Times | Percentiles]) -> Times | None:
    """Of each figure the (lower) median over `rounds`: one that was really measured."""
    columns = [percentiles([getattr(r, name) for r in rounds]) for name in ("p50", "p95", "p99")]
    p50, p95, p99 = columns
    if p50 is None or p95 is None or p99 is None:
        return None
    return Times(p50.p50, p95.p50, p99.p50)

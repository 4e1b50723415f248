"""Decides what a load is and what came of it: plain data that the client reads and writes as JSON.

All percentiles are exact: every value is kept and sorted, none is put in a bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LATE_MS = 5.0  # a request sent this long after its time is late: the generator did not keep up


@dataclass(frozen=True, slots=True)
class Load:
    """An open-loop load: requests leave on time, whatever the answers do.

    First `held` streams are opened, silent after their first chunk; then `requests` leave at
    `rate` a second, each for `chunks` chunks, `interval_ms` apart. Chunks, CPU time and memory are
    read from `window_start` to `window_end`, in seconds after the first of these requests.
    """

    rate: float
    requests: int
    chunks: int
    interval_ms: float
    window_start: float
    window_end: float
    held: int = 0

    @property
    def duration(self) -> float:
        """Seconds from the first request to the last chunk, if nothing delays any."""
        return self.requests / self.rate + self.chunks * self.interval_ms / 1000

    @property
    def window_seconds(self) -> float:
        """Length of the window."""
        return self.window_end - self.window_start


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Exact percentiles of `count` values."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a load. Times in ms but for CPU seconds; memory in MB (10^6 bytes).

    `lost`: answers that broke off, ended short of chunks, or had not ended when time was up.
    `errored`: answers with another status than 200. `late`: requests sent `LATE_MS` or more after
    their time. CPU and memory are of the processes watched, None where none was.
    """

    ok: int
    errored: int
    lost: int
    late: int
    first_byte_ms: Percentiles | None
    answer_ms: Percentiles | None
    chunk_delay_ms: Percentiles | None
    window_seconds: float
    chunks_in_window: int
    cpu_seconds: float | None
    memory_start_mb: float | None
    memory_end_mb: float | None
    first_problem: str | None

    @property
    def cpu_us_per_chunk(self) -> float | None:
        """CPU microseconds for each chunk of the window."""
        if self.cpu_seconds is None or self.chunks_in_window == 0:
            return None
        return self.cpu_seconds / self.chunks_in_window * 1e6

    @property
    def cpu_ms_per_request(self) -> float | None:
        """CPU milliseconds for each answer, where the window holds them all."""
        if self.cpu_seconds is None or self.ok == 0:
            return None
        return self.cpu_seconds / self.ok * 1e3


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Nearest-rank percentiles of `values`; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return None

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Percentiles(len(ordered), rank(0.50), rank(0.95), rank(0.99), ordered[-1])

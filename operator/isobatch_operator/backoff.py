"""Decides when a replica that failed may be started again."""

from collections.abc import Sequence
from dataclasses import dataclass

from isobatch_operator.observed import Failure


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential: the first wait, the longest, and the life after which the count starts anew."""

    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    reset_after_seconds: float = 120.0


def streak(failures: Sequence[Failure], backoff: Backoff) -> int:
    """How many failures in a row there were since a replica last lived long enough."""
    count = 0
    for failure in reversed(failures):
        count += 1
        if failure.lived_seconds >= backoff.reset_after_seconds:
            break
    return count


def restart_at(failures: Sequence[Failure], backoff: Backoff) -> float:
    """The earliest time of the next start; 0.0 when nothing failed."""
    if not failures:
        return 0.0
    doublings = min(streak(failures, backoff) - 1, 32)  # 2**32 is past any limit
    wait = min(backoff.first_seconds * 2.0**doublings, backoff.longest_seconds)
    return failures[-1].at + wait

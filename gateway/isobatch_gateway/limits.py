"""Decides admission: requests a minute, requests at once, and who waits for a place."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from isobatch_contracts.fields import duration_seconds
from isobatch_contracts.resource import TierLimits


@dataclass(frozen=True, slots=True)
class TooMany:
    """Over a limit, with no queue to wait in. `retry_after` is in seconds."""

    limit: str
    retry_after: int


@dataclass(frozen=True, slots=True)
class WaitedTooLong:
    """No place came free in the queue's time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens of a rate limit at one moment; full at first, so that a burst of a minute passes."""

    tokens: float
    at: float


def take(bucket: Bucket | None, per_minute: int, now: float) -> tuple[Bucket, float]:
    """The bucket after one request, and the seconds it would have to wait (0: admitted)."""
    full = float(per_minute)
    if bucket is None:
        bucket = Bucket(full, now)
    # A limit that was lowered meanwhile empties the bucket to its new size.
    tokens = min(full, bucket.tokens + (now - bucket.at) * full / 60)
    if tokens >= 1:
        return Bucket(tokens - 1, now), 0.0
    return Bucket(tokens, now), (1 - tokens) * 60 / full


@dataclass(slots=True)
class Gate:
    """The admission of one tier of one service or key.

    Limits are given anew with every request, so that a new table needs no new gate.
    """

    running: int = 0
    _bucket: Bucket | None = None
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def admit_rate(self, limits: TierLimits, now: float) -> TooMany | None:
        """Count one request against requestsPerMinute."""
        if limits.requests_per_minute is None:
            return None
        self._bucket, wait = take(self._bucket, limits.requests_per_minute, now)
        if wait == 0.0:
            return None
        return TooMany("requestsPerMinute", max(1, math.ceil(wait)))

    def try_enter(self, limits: TierLimits) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if limits.concurrent is not None and (self.running >= limits.concurrent or self._waiting):
            return False
        self.running += 1
        return True

    async def enter(self, limits: TierLimits) -> TooMany | WaitedTooLong | None:
        """Take a place, waiting in the queue if there is one. None: the place is taken."""
        if self.try_enter(limits):
            return None
        if len(self._waiting) >= limits.queue_size:
            return TooMany("concurrent", 1)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        timeout = duration_seconds(limits.queue_timeout)
        try:
            async with asyncio.timeout(timeout):
                await place
        except BaseException as exc:
            self._give_up(place)
            if isinstance(exc, TimeoutError):
                return WaitedTooLong(timeout)
            raise
        return None

    def leave(self) -> None:
        """Give a place back; the first in the queue gets it."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)  # the place passes on: `running` stays
                return
        self.running -= 1

    def _give_up(self, place: asyncio.Future[None]) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
        elif place.done() and not place.cancelled():
            self.leave()  # the place came in the very moment of giving up

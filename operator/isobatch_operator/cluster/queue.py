"""Performs the queue of names: each at most once, never two looks at one at a time."""

import asyncio
import heapq
from collections.abc import Callable

from isobatch_operator.cluster.names import Key


class Queue:
    """Names that are to be looked at, now or later."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is a monotonic one, in seconds."""
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Look at `key` after `delay` seconds, or earlier if that was asked for before."""
        at = self._clock() + delay
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
            self._changed.set()

    async def get(self) -> Key:
        """The next name that is due; `done` gives it back."""
        while True:
            key, wait = self._next()
            if key is not None and wait is not None and wait <= 0:
                del self._due[key]  # its entry in the heap is stale from now on
                self._busy.add(key)
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        """`key` was looked at: it may be looked at again."""
        self._busy.discard(key)
        self._changed.set()

    def _next(self) -> tuple[Key | None, float | None]:
        """Who is due first of those that nobody looks at, and in how many seconds."""
        passed = []
        found: tuple[Key | None, float | None] = None, None
        while self._heap:
            at, key = self._heap[0]
            if self._due.get(key) != at:
                heapq.heappop(self._heap)  # it was taken, or an earlier time was asked for since
            elif key in self._busy:
                passed.append(heapq.heappop(self._heap))
            else:
                found = key, at - self._clock()
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

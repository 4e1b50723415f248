"""Performs: runs a coroutine at once, without a task, as far as it goes without waiting.

A server's `send` waits only while its client's buffer is full, and its `receive` only while the
body is not there: nearly always the first step is the last, and nothing has to wake up for it.
"""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """It never waited."""

    value: Result


class Rest(Generic[Result]):
    """What remains of a coroutine that had to wait: awaiting it finishes it."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Result]:
        waits_for = self._waits_for
        step: Callable[[Any], Any]
        while True:
            try:
                value = yield waits_for
                step = self._coroutine.send
            except BaseException as exc:  # noqa: BLE001  # the coroutine decides what it means
                value, step = exc, self._coroutine.throw
            try:
                waits_for = step(value)
            except StopIteration as end:
                return cast("Result", end.value)


def begin(awaitable: Awaitable[Result]) -> Done[Result] | Rest[Result]:
    """Run `awaitable` until it waits. ASGI promises an awaitable; every server's is a coroutine."""
    coroutine = cast("Coroutine[Any, Any, Result]", awaitable)
    try:
        waits_for = coroutine.send(None)
    except StopIteration as end:
        return Done(end.value)
    return Rest(coroutine, waits_for)

"""Performs: ends work from outside, for a stated reason, wherever it waits."""

import asyncio
from types import TracebackType
from typing import Self

from isobatch_gateway.errors import Interrupted


class Interruptible:
    """A block of one task that `end` leaves at once by raising its reason.

    As `asyncio.timeout` does it, but for any reason: the client left, the gateway drains. `end` is
    called from the event loop, never from within the block.
    """

    __slots__ = ("_reason", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._reason: Interrupted | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def end(self, reason: Interrupted) -> None:
        """Leave the block with `reason`; nothing if it is over or already ending."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._reason is None or task is None:
            return
        task.uncancel()
        if isinstance(error, asyncio.CancelledError):
            raise self._reason from error

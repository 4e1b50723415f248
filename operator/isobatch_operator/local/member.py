"""Performs the life of one supervised process: start, probe, stop, and what its end means."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from isobatch_operator.local.log_files import last_lines_of_run, rotate_grown
from isobatch_operator.local.processes import Child, Launch
from isobatch_operator.local.programs import Pace
from isobatch_operator.local.state import ProcessRecord
from isobatch_operator.observed import (
    Failure,
    Ready,
    ReplicaState,
    Starting,
    Stopping,
)
from isobatch_operator.readiness import Probe, advance

WRONG_USE = 2
"""The exit code with which our programs say that trying again is no use."""


class Member:
    """A child process with its readiness. `ask` is one probe of it."""

    def __init__(
        self, launch: Launch, ask: Callable[[], Awaitable[Probe]], pace: Pace, now: float
    ) -> None:
        """Start it. Raises OSError if the program cannot be run."""
        self.child = Child(launch)
        self.state: ReplicaState = Starting(now)
        self._ask = ask
        self._pace = pace
        self._task: asyncio.Task[Probe] | None = None
        self._asked_at = 0.0
        self._stopped_because: str | None = None
        self._ready_at: float | None = None

    @property
    def log(self) -> Path:
        """Where it writes."""
        return self.child.launch.log

    def observe(self, now: float) -> Failure | None:
        """Bring `state` up to date. The failure, if it ended and nobody had asked it to."""
        rotate_grown(self.log)
        code = self.child.exit_code()
        if code is not None:
            self._forget_probe()
            return self._failure(code, now)
        if isinstance(self.state, Stopping):
            if now - self.state.since >= self._pace.grace_seconds:
                self.child.kill()
            return None
        self._take_probe(now)
        if isinstance(self.state, Ready) and self._ready_at is None:
            self._ready_at = now
        self._send_probe(now)
        return None

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, with everything it forked."""
        return self.child.exit_code() is not None

    def stop(self, now: float, failure: str | None = None) -> None:
        """Ask it to end; `observe` kills it after the grace. Its end is a failure if `failure`."""
        self._forget_probe()
        if not isinstance(self.state, Stopping):
            self.state = Stopping(now)
            self._stopped_because = failure
            self.child.terminate()

    def kill(self) -> None:
        """End it now."""
        self._forget_probe()
        self.child.kill()

    def record(self) -> ProcessRecord:
        """What is written down, to find it after our own death."""
        child = self.child
        return ProcessRecord(
            name=child.launch.name, pid=child.pid, created_at=child.created_at, log=str(self.log)
        )

    def last_line(self) -> str:
        """The last line of its log: what it is doing, or what it died of."""
        return next(iter(last_lines_of_run(self.log, 1)), "")

    def _take_probe(self, now: float) -> None:
        if self._task is not None and self._task.done():
            self.state = advance(self.state, self._task.result(), now)
            self._task = None

    def _send_probe(self, now: float) -> None:
        is_ready = isinstance(self.state, Ready)
        every = self._pace.every_ready_seconds if is_ready else self._pace.every_starting_seconds
        if self._task is None and now - self._asked_at >= every:
            self._asked_at = now
            self._task = asyncio.ensure_future(self._ask())

    def _forget_probe(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _failure(self, code: int, now: float) -> Failure | None:
        lived = 0.0 if self._ready_at is None else now - self._ready_at
        if isinstance(self.state, Stopping):
            reason = self._stopped_because
            return None if reason is None else Failure(now, lived, reason)
        return Failure(now, lived, f"{ending(code)}: {self.last_line()}", code == WRONG_USE)


def ending(code: int) -> str:
    """What an exit code says, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"

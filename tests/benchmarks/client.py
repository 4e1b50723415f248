"""Performs an open-loop load and prints what came of it as JSON.

`python -m tests.benchmarks.client` reads an `Order` from standard input.
"""

import asyncio
import dataclasses
import gc
import json
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import uvloop
from pydantic import TypeAdapter

from tests.benchmarks import wire
from tests.benchmarks.load import LATE_MS, Load, Outcome, percentiles
from tests.benchmarks.machine import Usage, usage
from tests.benchmarks.stub import raise_file_limit

GRACE_SECONDS = 15.0  # after the last chunk is due; what has not ended by then is lost
HELD_INTERVAL_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class Order:
    """One load, where it goes, and the processes whose cost is read."""

    load: Load
    port: int
    headers: str = ""
    watched: tuple[int, ...] = ()


@dataclass(slots=True)
class Tally:
    """What has come so far."""

    ok: int = 0
    errored: int = 0
    lost: int = 0
    late: int = 0
    first_byte_ns: "array[int]" = field(default_factory=lambda: array("q"))
    answer_ns: "array[int]" = field(default_factory=lambda: array("q"))
    delays_ns: "array[int]" = field(default_factory=lambda: array("q"))
    is_window_open: bool = False
    first_problem: str | None = None

    def problem(self, text: str) -> None:
        """Keep the first thing that went wrong."""
        if self.first_problem is None:
            self.first_problem = text


class Connection(asyncio.Protocol):
    """One connection, kept alive: sends one request at a time and reads its stream."""

    def __init__(self, tally: Tally, on_idle: Callable[["Connection"], None]) -> None:
        self._tally = tally
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._sent_ns = 0
        self._expected = 0
        self._received = 0
        self._rest = b""
        self._is_measured = False
        self.is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own inherits nothing

    def ask(self, request: bytes, chunks: int, *, is_measured: bool) -> bool:
        """Send `request`; False if the other side has closed this connection."""
        if self._transport is None or self._transport.is_closing():
            return False
        self.is_busy = True
        self._expected, self._received, self._rest = chunks, 0, b""
        self._is_measured = is_measured
        self._sent_ns = wire.clock_ns()
        self._transport.write(request)
        return True

    def data_received(self, data: bytes) -> None:
        """Count the marks in `data`; the answer ends with the last chunk of the coding."""
        now = wire.clock_ns()
        if not self._rest and not self._received and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data)
            return
        data = self._rest + data
        ages, end = wire.delays_ns(data, now)
        self._rest = data[end:]
        if ages and self._is_measured:
            if not self._received:
                self._tally.first_byte_ns.append(now - self._sent_ns)
            if self._tally.is_window_open:
                self._tally.delays_ns.extend(ages)
        self._received += len(ages)
        if self._rest.endswith(wire.LAST_CHUNK):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that was open is lost."""
        self._transport = None
        if self.is_busy:
            self.is_busy = False
            self._tally.lost += self._is_measured
            self._tally.problem(f"connection lost after {self._received} chunks: {exc}")

    def close(self) -> None:
        """Leave; what has not ended is lost."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self.is_busy = False
        if self._received == self._expected:
            self._tally.ok += self._is_measured
            if self._is_measured:
                self._tally.answer_ns.append(wire.clock_ns() - self._sent_ns)
        else:
            self._tally.lost += self._is_measured
            self._tally.problem(f"{self._received} chunks of {self._expected}")
        self._on_idle(self)

    def _fail(self, data: bytes) -> None:
        self.is_busy = False
        self._tally.errored += self._is_measured
        self._tally.problem(data[:400].decode(errors="replace"))
        self.close()


class Generator:
    """Sends the requests of one order on time."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._idle: list[Connection] = []
        self._connections: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self.tally = Tally()

    async def run(self) -> Outcome:
        """Perform the load and wait until all has ended, or time is up."""
        load = self._order.load
        loop = asyncio.get_running_loop()
        await self._hold()
        start = loop.time() + 0.1
        for number in range(load.requests):
            loop.call_at(start + number / load.rate, self._send, start + number / load.rate)
        await asyncio.sleep(start + load.window_start - loop.time())
        before, opened = self._read(), loop.time()
        self.tally.is_window_open = True
        await asyncio.sleep(start + load.window_end - loop.time())
        self.tally.is_window_open = False
        after, closed = self._read(), loop.time()
        await self._finish(start + load.duration + GRACE_SECONDS)
        return _outcome(self.tally, before, after, closed - opened)

    async def _hold(self) -> None:
        for _ in range(self._order.load.held):
            await self._open(self._request(HELD_INTERVAL_MS, 2), 2, is_measured=False)
        if self._order.load.held:
            await asyncio.sleep(1)

    def _send(self, due: float) -> None:
        load = self._order.load
        request = self._request(load.interval_ms, load.chunks)
        self.tally.late += (asyncio.get_running_loop().time() - due) * 1000 >= LATE_MS
        while self._idle:
            if self._idle.pop().ask(request, load.chunks, is_measured=True):
                return
        task = asyncio.create_task(self._open(request, load.chunks, is_measured=True))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, request: bytes, chunks: int, *, is_measured: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self.tally, self._idle.append), "127.0.0.1", self._order.port
            )
        except OSError as exc:
            self.tally.lost += is_measured
            self.tally.problem(f"cannot connect: {exc}")
            return
        self._connections.append(connection)
        connection.ask(request, chunks, is_measured=is_measured)

    def _request(self, interval_ms: float, chunks: int) -> bytes:
        self._numbers += 1
        address = f"127.0.0.1:{self._order.port}"
        return wire.request(self._numbers, interval_ms, chunks, self._order.headers, address)

    def _read(self) -> Usage | None:
        return usage(self._order.watched) if self._order.watched else None

    async def _finish(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        total = self._order.load.requests
        while loop.time() < deadline:
            if self.tally.ok + self.tally.errored + self.tally.lost >= total:
                break
            await asyncio.sleep(0.05)
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0.1)
        # Requests that never got a connection: none of the callbacks above has counted them.
        self.tally.lost = total - self.tally.ok - self.tally.errored


def _outcome(
    tally: Tally, before: Usage | None, after: Usage | None, window_seconds: float
) -> Outcome:
    return Outcome(
        ok=tally.ok,
        errored=tally.errored,
        lost=tally.lost,
        late=tally.late,
        first_byte_ms=percentiles([ns / 1e6 for ns in tally.first_byte_ns]),
        answer_ms=percentiles([ns / 1e6 for ns in tally.answer_ns]),
        chunk_delay_ms=percentiles([ns / 1e6 for ns in tally.delays_ns]),
        window_seconds=window_seconds,
        chunks_in_window=len(tally.delays_ns),
        cpu_seconds=after.cpu_seconds - before.cpu_seconds if before and after else None,
        memory_start_mb=before.memory_mb if before else None,
        memory_end_mb=after.memory_mb if after else None,
        first_problem=tally.first_problem,
    )


if __name__ == "__main__":
    raise_file_limit()
    gc.disable()  # a pause of ours would be measured as the target's
    asked = TypeAdapter(Order).validate_json(sys.stdin.read())
    print(json.dumps(dataclasses.asdict(uvloop.run(Generator(asked).run()))))

"""Performs: carries one answer from its replica to the client.

The first bytes are held until it is known that they are good, because a request can be given to
another replica only before its client has seen anything. After that a chunk goes from the read of
the upstream socket to the write of the client's within one callback.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol

from isobatch_gateway.eager import Rest, begin
from isobatch_gateway.errors import (
    ClientStalled,
    ConnectionDied,
    FirstByteTimedOut,
    IdleTimedOut,
    ServerFailed,
    UpstreamError,
)
from isobatch_gateway.sse import DONE, EventBuffer, server_error_code
from isobatch_gateway.upstream.connection import Connection, RawHeaders
from isobatch_gateway.upstream.message import header

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HOLD = 1024 * 1024  # bytes of an unstreamed answer that are held until it is complete
_MOST_HELD = 256 * 1024  # bytes that wait for the client before the replica has to


class Writer(Protocol):
    """Where the chunks go: ASGI's `send`, and a shorter way that may decline."""

    @property
    def send(self) -> Send:
        """ASGI's own."""

    @property
    def write(self) -> Callable[[bytes], bool]:
        """Write a chunk at once and say True, or False if that cannot be done."""


class Opening(NamedTuple):
    """What is known before the client sees anything. `is_whole`: the answer is in it entirely."""

    status: int
    headers: RawHeaders
    is_stream: bool
    is_whole: bool
    size: int


class Relay:
    """The sink of one attempt. `first` and then, unless the answer is whole, `pass_on`."""

    def __init__(self, connection: Connection, first_byte: float, idle: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._status = 0
        self._headers: RawHeaders = []
        self._events: EventBuffer | None = None
        self._held = bytearray()
        self._hold = _HOLD
        self._has_ended = False
        self._error: UpstreamError | None = None
        self._signal: asyncio.Future[None] | None = None
        self._client: Writer | None = None  # set while chunks go straight to the client
        self._rest: Rest[None] | None = None
        self.last_read = 0.0  # loop time of the last byte from the replica
        self._quiet_since = self._loop.time()
        self._idle = idle
        self._quiet_limit = first_byte
        self._late: type[UpstreamError] = FirstByteTimedOut
        # One timer, which looks at the time of the last read and sleeps on: a chunk moves no timer.
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(
            min(first_byte, idle), self._look
        )
        self._tail = b""
        self._is_delimited = True
        self.bytes_out = 0

    async def first(self) -> Opening:
        """Wait for enough of the answer to know what it is. Raises `UpstreamError`."""
        while not self._is_ready():
            await self._wait()
        if self._error is not None:
            raise self._error
        is_stream = self._events is not None
        code = server_error_code(bytes(self._held[:4096])) if is_stream else None
        if code is not None:
            self.abandon()
            raise ServerFailed(f"the stream began with an error {code}")
        return Opening(self._status, self._headers, is_stream, self._has_ended, len(self._held))

    @property
    def held(self) -> bytes:
        """The bytes held so far: of a whole answer its body."""
        return bytes(self._held)

    def take_held(self) -> bytes:
        """The bytes held so far; the caller passes them on."""
        data = self.held
        self._held.clear()
        self.bytes_out += len(data)
        return data

    async def pass_on(self, client: Writer, write: float) -> None:
        """Send the body, the end of it excepted. Raises `UpstreamError` or `ClientStalled`."""
        self._late, self._quiet_limit = IdleTimedOut, self._idle
        self._quiet_since = self._loop.time()
        while True:
            if self._held:
                data = bytes(self._held)
                self._held.clear()
                await self._finish(self._begin_chunk(client, data), write)
                continue
            if self._error is not None:
                raise self._error
            if self._has_ended:
                break
            self._connection.resume_reading()
            self._client = client
            await self._wait()
            self._client = None
            if self._rest is not None:
                rest, self._rest = self._rest, None
                await self._finish(rest, write)
        if not self._is_delimited and self._events is not None and DONE not in self._tail:
            # Where only the end of the connection ends the body, a death looks like an end.
            raise ConnectionDied("the stream ended without [DONE]")

    def abandon(self) -> None:
        """Give the answer up; the replica sees its connection closed."""
        self._stop_watching()
        if not self._has_ended and self._error is None:
            self._connection.abort()

    def fail(self, error: UpstreamError) -> None:
        """End the attempt from outside, as a failure of the replica."""
        self.abandon()
        self.on_failure(error)

    # Sink

    def on_head(self, status: int, headers: RawHeaders) -> None:
        """Status and headers came."""
        self._status, self._headers = status, headers
        self.last_read = time.monotonic()  # the loop's own clock, read directly
        if (header(headers, b"content-type") or b"").startswith(b"text/event-stream"):
            self._events = EventBuffer()
            self._is_delimited = any(
                name in (b"content-length", b"transfer-encoding") for name, _ in headers
            )
        length = header(headers, b"content-length")
        if self._events is None and length is not None and length.isdigit():
            self._hold = _HOLD if int(length) <= _HOLD else 1

    def on_body(self, data: bytes) -> None:
        """One read's worth of the body came."""
        self.last_read = time.monotonic()  # the loop's own clock, read directly
        if self._events is not None:
            data = self._events.feed(data)
            if not data:
                return
        if self._client is not None:
            self._rest = self._begin_chunk(self._client, data)
            if self._rest is None:
                return
            self._client = None
            self._connection.pause_reading()
        else:
            self._held += data
            if len(self._held) > _MOST_HELD and self._is_ready():
                self._connection.pause_reading()
        self._wake()

    def on_end(self) -> None:
        """The answer is complete."""
        if self._events is not None:
            self._held += self._events.rest()
        self._has_ended = True
        self._stop_watching()
        self._wake()

    def on_failure(self, error: UpstreamError) -> None:
        """The answer will not be completed."""
        self._error = self._error or error
        self._stop_watching()
        self._wake()

    def _is_ready(self) -> bool:
        if self._error is not None or self._has_ended:
            return True
        if self._status == 0:
            return False
        if self._events is not None:
            return bool(self._held)
        return len(self._held) >= self._hold

    async def _finish(self, rest: Rest[None] | None, write: float) -> None:
        if rest is None:
            return
        try:
            async with asyncio.timeout(write):
                await rest
        except TimeoutError as exc:
            raise ClientStalled(f"nothing was read in {write} s") from exc
        # The replica was kept waiting by us: its silence begins now.
        self._quiet_since = self._loop.time()

    def _begin_chunk(self, client: Writer, data: bytes) -> Rest[None] | None:
        """Send one chunk; what remains of it if the client's buffer is full."""
        self.bytes_out += len(data)
        if not self._is_delimited:
            self._tail = data[-64:]
        if client.write(data):
            return None
        message = {"type": "http.response.body", "body": data, "more_body": True}
        begun = begin(client.send(message))
        return begun if isinstance(begun, Rest) else None

    async def _wait(self) -> None:
        self._signal = self._loop.create_future()
        try:
            await self._signal
        finally:
            self._signal = None

    def _wake(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

    def _look(self) -> None:
        quiet = self._loop.time() - max(self.last_read, self._quiet_since)
        is_held_back = self._late is IdleTimedOut and self._client is None
        if quiet < self._quiet_limit or is_held_back:
            wait = self._idle if is_held_back else min(self._idle, self._quiet_limit - quiet)
            self._timer = self._loop.call_later(max(wait, 0.01), self._look)
        else:
            self.fail(self._late(f"silent for {quiet:.0f} s"))

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

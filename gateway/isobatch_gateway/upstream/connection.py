"""Performs: one HTTP/1.1 connection to a replica, one exchange at a time.

Bytes go to a `Sink` from within `data_received`: no queue, task or future stands between a read of
the socket and what is done with it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from isobatch_gateway.errors import BadAnswer, ConnectionDied, UpstreamError

RawHeaders = list[tuple[bytes, bytes]]

_MOST_HEAD = 256 * 1024  # bytes before the headers of an answer are complete


class Sink(Protocol):
    """Who takes an answer. Calls come in this order; `on_end` or `on_failure` is the last one."""

    def on_head(self, status: int, headers: RawHeaders) -> None:
        """Status and headers, once; informational answers are not passed on."""

    def on_body(self, data: bytes) -> None:
        """What one read of the socket brought of the body."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_failure(self, error: UpstreamError) -> None:
        """The answer will not be completed."""


class Connection(asyncio.Protocol):
    """A connection. `release` is called with it whenever it is fit for another exchange."""

    def __init__(self, release: Callable[["Connection"], None]) -> None:
        self._release = release
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._is_head_request = False
        self._is_informational = False
        self._has_head = False
        self._is_delimited = False  # by a length or by chunks; else the body ends with the stream
        self._is_complete = False
        self._keeps_alive = False
        self._is_reading = True
        self.has_answered = False  # whether any byte came in this exchange
        self.exchanges = 0
        self.idle_since = 0.0
        self.verified: str | None = None  # fingerprint that the process behind it was seen to have

    @property
    def is_open(self) -> bool:
        """Whether requests can be written to it."""
        return self._transport is not None and not self._transport.is_closing()

    def start(self, request: bytes, sink: Sink, *, is_head: bool = False) -> None:
        """Send `request`; its answer goes to `sink`. The connection must be idle."""
        assert self._sink is None
        self._sink = sink
        self._headers = []
        self._head_bytes = 0
        self._is_head_request = is_head
        self._has_head = self._is_informational = False
        self._is_delimited = self._is_complete = False
        self.has_answered = False
        self.exchanges += 1
        if self._transport is None or self._transport.is_closing():
            self._fail(ConnectionDied("closed before the request was sent"))
            return
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once, whatever is under way; the sink hears nothing more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.close()

    def pause_reading(self) -> None:
        """Let the replica wait: TCP's own flow control holds it back."""
        if self._is_reading and self.is_open:
            self._is_reading = False
            cast("asyncio.Transport", self._transport).pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if not self._is_reading and self.is_open:
            self._is_reading = True
            cast("asyncio.Transport", self._transport).resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop with one read; at most one `on_body` follows from it."""
        if self._sink is None:
            self.abort()  # nothing was asked: whatever this is, it would be taken for an answer
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._is_complete:
                self._fail(BadAnswer(f"not HTTP: {type(exc).__name__}"))
                return
            self._keeps_alive = False
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD:
                self._fail(BadAnswer("headers without end"))
                return
        if self._parts:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._sink.on_body(body)
        if self._is_complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop once the connection is closed."""
        if self._sink is None:
            return
        if exc is None and self._has_head and not self._is_delimited:
            self._keeps_alive = False
            self._finish()
            return
        self._fail(ConnectionDied("closed in the middle" if self.has_answered else "closed"))

    # httptools callbacks

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._is_complete:
            self._keeps_alive = False  # more than was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if not self._is_complete:
            self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self._is_complete or self._sink is None:
            return
        status = self._parser.get_status_code()
        self._is_informational = status < 200
        if self._is_informational:
            return
        self._has_head = True
        self._is_delimited = status in (204, 304) or any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self._headers
        )
        self._sink.on_head(status, self._headers)
        if self._is_head_request:
            # The parser would wait for the body that these headers describe.
            self._is_complete = True

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if not self._is_complete:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._is_informational:
            self._is_informational = False
            self._headers = []
        elif not self._is_complete:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        if self._keeps_alive and self._is_delimited and not self._is_head_request and self.is_open:
            self.resume_reading()
            self._release(self)
        elif self._transport is not None:
            self._transport.close()
        if sink is not None:
            sink.on_end()

    def _fail(self, error: UpstreamError) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_failure(error)

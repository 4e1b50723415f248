"""Performs: HTTP/1.1 as the gateway speaks it: uvicorn's protocol, with bounds."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
from isobatch_contracts import errors
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from isobatch_gateway.client import ABORT, TELL, WRITE
from isobatch_gateway.refusals import Refusal, error_body, error_headers
from isobatch_gateway.settings import Bounds, Timeouts
from isobatch_gateway.transports import HeadHolder, Unframed

_LINGER = 2.0  # seconds that a refused client's bytes are still read, so that it sees the answer
_DISCARD = 60.0  # seconds for the rest of a body that was refused
_OF_AN_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


class _OutOfBoundsError(Exception):
    """Raised through the parser to stop it; the protocol knows why."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on a request's head, in size and in time.

    uvicorn has none with httptools: a head without end would fill the memory. Nor does it take a
    body with an offer to upgrade, which Java's client makes with every request; RFC 9110 lets a
    server ignore the offer (section 7.8), and the request be as if it had not been made.
    """

    bounds = Bounds()
    timeouts = Timeouts()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0
        self._refusal: Refusal | None = None
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._discard_until: float | None = None
        self._on_gone: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn declares it
        self._await_head(self.timeouts.keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._forget_timer()
        on_gone, self._on_gone = self._on_gone, None
        super().connection_lost(exc)
        if on_gone is not None:
            on_gone()

    def data_received(self, data: bytes) -> None:
        """Called by the loop with one read."""
        if self._is_refused:
            return  # the answer is out; reading on keeps a reset from overtaking it
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.header_bytes + self.bounds.url_bytes:
                self._refuse(_too_many_headers(self.bounds))
            elif self._head_timer is None:
                # A head that came in one piece, as most do, needs no timer.
                self._await_head(self.timeouts.head)
        elif self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self._discard()

    def _parse(self, data: bytes) -> None:
        while data and not self._is_refused:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                # The parser stopped behind the head.
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_offer(self) -> bytes:
        """The head that was parsed, but for its offer to upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _OF_AN_UPGRADE]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self._abort, TELL: self._tell, WRITE: self._write_chunk}  # type: ignore[dict-item]  # ours alone
        self._is_in_head = True
        self._head_bytes = 0
        self._discard_until = None
        self._forget_timer()

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        super().on_url(url)
        if len(self.url) > self.bounds.url_bytes:
            self._refusal = Refusal(
                errors.URL_TOO_LONG,
                f"The URL is longer than {self.bounds.url_bytes} bytes.",
                closes=True,
            )
            raise _OutOfBoundsError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too: nobody waits for those, so they are dropped."""
        if not self._is_in_head:
            return
        super().on_header(name, value)
        if len(self.headers) > self.bounds.headers:
            self._refusal = _too_many_headers(self.bounds)
            raise _OutOfBoundsError

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._is_in_head = False
        self._forget_timer()
        size = sum(len(name) + len(value) for name, value in self.headers)
        if size > self.bounds.header_bytes:
            self._refusal = _too_many_headers(self.bounds)
            raise _OutOfBoundsError
        self._refusal = _misframed(self.headers, self.parser)
        if self._refusal is not None:
            raise _OutOfBoundsError
        if self.parser.should_upgrade():
            return  # it is parsed again without its offer
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.keep_alive = False
            self.cycle.transport = cast("asyncio.Transport", Unframed(self.transport))
        elif self.scope["method"] != "HEAD":  # whose answer has no body to wait for
            self.cycle.transport = cast("asyncio.Transport", HeadHolder(self.transport, self.cycle))

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle.more_body = False
            if not self.pipeline:
                self._await_head(self.timeouts.keep_alive)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # ours says it in our shape
        """Called by uvicorn when the parser stopped."""
        refusal, self._refusal = self._refusal, None
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                # A request is being answered: nothing may be written in between.
                self.transport.close()
                return
            # Its own body is what is broken, and nobody has begun to answer.
            cycle.disconnected = True
            cycle.message_event.set()
        self._refuse(
            refusal
            or Refusal(
                errors.MALFORMED_REQUEST, "This is not a valid HTTP/1.1 request.", closes=True
            )
        )

    def _refuse(self, refusal: Refusal) -> None:
        self._is_refused = True
        self._forget_timer()
        body = error_body(refusal)
        head = [STATUS_LINE[refusal.kind.status]]
        for name, value in error_headers(refusal, body):
            head += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*head, b"\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(_LINGER, self.transport.close)

    def _await_head(self, seconds: float) -> None:
        self._forget_timer()
        self._head_timer = self.loop.call_later(seconds, self._give_up_head)

    def _give_up_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _discard(self) -> None:
        """Bound the time that the rest of a refused body may take."""
        now = self.loop.time()
        if self._discard_until is None:
            self._discard_until = now + _DISCARD
        if now > self._discard_until:
            self.transport.close()
        else:
            self._await_head(self.timeouts.body)

    def _write_chunk(self, data: bytes) -> bool:
        """What `send` does with a chunk in the middle of an answer, without its coroutine."""
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _tell(self, on_gone: Callable[[], None]) -> None:
        """Of pipelined requests one is served at a time: it is the one that is told."""
        if self.transport.is_closing():
            self.loop.call_soon(on_gone)
        else:
            self._on_gone = on_gone

    def _abort(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()


def _too_many_headers(bounds: Bounds) -> Refusal:
    return Refusal(
        errors.HEADERS_TOO_LARGE,
        f"The request has more than {bounds.headers} headers or {bounds.header_bytes} bytes of "
        "them. Send fewer.",
        closes=True,
    )


def _misframed(headers: list[tuple[bytes, bytes]], parser: Any) -> Refusal | None:
    """Why it is not certain whose the request is, or where it ends; RFC 9112, 3.2 and 6.1."""
    said = None
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and parser.get_http_version() != "1.0"):
        said = f"The request has {hosts} Host headers; send one."
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        said = "The only Transfer-Encoding that is taken is chunked."
    if parser.get_method() == b"CONNECT":
        said = "This is no proxy: CONNECT is not taken."
    return None if said is None else Refusal(errors.MALFORMED_REQUEST, said, closes=True)

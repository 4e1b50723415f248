"""Performs: the HTTP server: bounds on what is parsed, the listening socket, signals and drain."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn
from isobatch_contracts import errors
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from isobatch_gateway.client import ABORT, TELL, WRITE
from isobatch_gateway.errors import SettingsInvalid
from isobatch_gateway.refusals import Refusal, error_body, error_headers
from isobatch_gateway.settings import Bounds, Settings, Timeouts

_BACKLOG = 4096
_LINGER = 2.0  # seconds that a refused client's bytes are still read, so that it sees the answer
_DISCARD = 60.0  # seconds for the rest of a body that was refused


class _OutOfBoundsError(Exception):
    """Raised through the parser to stop it; the protocol knows why."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on a request's head, in size and in time.

    uvicorn has none with httptools: a head without end would fill the memory.
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
        super().data_received(data)
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
        """Called by the parser."""
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
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._refusal = _hosts(hosts)
            raise _OutOfBoundsError
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # whose answer has no body to wait for
            self.cycle.transport = cast(
                "asyncio.Transport", _HeadHolder(self.transport, self.cycle)
            )

    def on_message_complete(self) -> None:
        """Called by the parser."""
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


def _hosts(count: int) -> Refusal:
    """RFC 9112, section 3.2."""
    return Refusal(
        errors.MALFORMED_REQUEST, f"The request has {count} Host headers; send one.", closes=True
    )


class _HeadHolder:
    """Holds an answer's head until the first bytes of its body: one write for both.

    The body follows at once, as nothing is begun before its first bytes are there. It stands in
    for the transport until then.
    """

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self._head = b""

    def write(self, data: bytes) -> None:
        """Hold a final answer's head; write it together with what follows."""
        if not self._head and not data.startswith(b"HTTP/1.1 100 "):
            self._head = data
            return
        self._transport.write(self._head + data)
        if self._head:
            self._cycle.transport = self._transport

    def close(self) -> None:
        """Write what is held, and close."""
        if self._head and self._cycle.transport is not self._transport:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport says."""
        return self._transport.is_closing()


class GatewayServer(uvicorn.Server):
    """uvicorn's server with our own way to stop: fail readiness, drain, then close."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again at the end, and exit by them."""
        yield


class Stopping:
    """Turns the first signal into a drain and the second into an end."""

    def __init__(
        self,
        server: GatewayServer,
        drain: Callable[[], None],
        is_idle: Callable[[], bool],
        end_all: Callable[[], None],
        settings: Settings,
    ) -> None:
        self._server = server
        self._drain = drain
        self._is_idle = is_idle
        self._end_all = end_all
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self.was_forced = False

    def signalled(self) -> None:
        """Called by the loop at SIGTERM and SIGINT."""
        if self._task is None:
            self._task = asyncio.create_task(self._stop())
            return
        self.was_forced = True
        self._task.cancel()
        self._server.should_exit = self._server.force_exit = True

    async def _stop(self) -> None:
        self._drain()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._settings.drain_delay)
        deadline = loop.time() + self._settings.timeouts.drain
        # An event would cost every request something; a drain happens once.
        while not self._is_idle() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._end_all()
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises `SettingsInvalid`, which names who has the port if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without, each answer of
    # two writes would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        holder = port_holder(port)
        by = f" by {holder}" if holder else ""
        problem = f"is taken{by}" if exc.errno == 98 else f"cannot be used: {exc.strerror}"
        raise SettingsInvalid(f"port {port} on {host} {problem}; choose another with --port") from (
            exc
        )
    listener.settimeout(0)
    return listener


def port_holder(port: int, proc: Path = Path("/proc")) -> str | None:
    """`process 123 (name)` if Linux lets us see who listens on `port`."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                if str(handle.readlink()) in inodes:
                    name = (process / "comm").read_text().strip()
                    return f"process {process.name} ({name})"
    return None


def server_for(app: Any, settings: Settings) -> GatewayServer:
    """The server of `app`, not started."""
    protocol = type(
        "Protocol", (BoundedProtocol,), {"bounds": settings.bounds, "timeouts": settings.timeouts}
    )
    return GatewayServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(settings.timeouts.keep_alive),
            timeout_graceful_shutdown=5,
        )
    )


SIGNALS = (signal.SIGTERM, signal.SIGINT)

"""Performs: whole answers over our connections, and the same as a transport under httpx.

For control calls (readiness, load figures, probes); a client's request never passes here.
"""

import asyncio
from dataclasses import dataclass

import httpx

from isobatch_gateway.errors import (
    BadAnswer,
    ConnectFailed,
    ConnectionDied,
    ConnectTimedOut,
    FirstByteTimedOut,
    UpstreamError,
)
from isobatch_gateway.upstream.connection import Connection, RawHeaders
from isobatch_gateway.upstream.message import request_bytes
from isobatch_gateway.upstream.pool import ConnectionPool, Pools

_MOST_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    status: int
    headers: RawHeaders
    body: bytes


class _Collector:
    """A sink that keeps the whole answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._status = 0
        self._headers: RawHeaders = []
        self._body = bytearray()
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: RawHeaders) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > _MOST_BYTES:
            self._connection.abort()
            self.on_failure(BadAnswer(f"more than {_MOST_BYTES} bytes"))

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, self._headers, bytes(self._body)))

    def on_failure(self, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


async def ask(
    connection: Connection, request: bytes, seconds: float, *, is_head: bool = False
) -> Answer:
    """The answer to `request` on an idle `connection`. Raises `UpstreamError`."""
    sink = _Collector(connection)
    connection.start(request, sink, is_head=is_head)
    try:
        async with asyncio.timeout(seconds):
            return await sink.answer
    except TimeoutError as exc:
        connection.abort()
        raise FirstByteTimedOut(f"no answer in {seconds} s") from exc
    except asyncio.CancelledError:
        connection.abort()
        raise


class PoolTransport(httpx.AsyncBaseTransport):
    """httpx over the gateway's own pools."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Called by httpx; bodies are read and given whole."""
        body = await request.aread()
        pool = self._pools.at(f"http://{request.url.netloc.decode('ascii')}")
        skipped = (b"host", b"content-length", b"transfer-encoding", b"connection")
        raw = request_bytes(
            request.method,
            request.url.raw_path.decode("ascii"),
            pool.authority,
            [(name, value) for name, value in request.headers.raw if name.lower() not in skipped],
            body,
        )
        seconds = request.extensions.get("timeout", {}).get("read") or 60.0
        try:
            answer = await self._ask(pool, raw, seconds, is_head=request.method == "HEAD")
        except ConnectFailed as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc
        except ConnectTimedOut as exc:
            raise httpx.ConnectTimeout(str(exc), request=request) from exc
        except FirstByteTimedOut as exc:
            raise httpx.ReadTimeout(str(exc), request=request) from exc
        except UpstreamError as exc:
            raise httpx.RemoteProtocolError(str(exc), request=request) from exc
        return httpx.Response(
            answer.status,
            # The body is whole already: what framed it on the wire is over.
            headers=[pair for pair in answer.headers if pair[0] != b"transfer-encoding"],
            content=answer.body,
            request=request,
        )

    async def _ask(
        self, pool: ConnectionPool, raw: bytes, seconds: float, *, is_head: bool
    ) -> Answer:
        kept = pool.idle()
        if kept is not None:
            try:
                return await ask(kept, raw, seconds, is_head=is_head)
            except ConnectionDied:
                if kept.has_answered:
                    raise
        return await ask(await pool.connect(), raw, seconds, is_head=is_head)

"""The HTTP/1.1 client, against servers that say exactly what they are told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import httpx
import pytest
import pytest_asyncio
from isobatch_gateway.errors import (
    BadAnswer,
    ConnectFailed,
    ConnectionDied,
    FirstByteTimedOut,
    UpstreamError,
)
from isobatch_gateway.upstream.connection import Connection, RawHeaders
from isobatch_gateway.upstream.control import PoolTransport, ask
from isobatch_gateway.upstream.message import passed_on, request_bytes
from isobatch_gateway.upstream.pool import ConnectionPool, Pools

from tests.gateway.fakes import until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
GET = request_bytes("GET", "/", "x", [], b"")


class Servers:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, handler: Handler) -> ConnectionPool:
        writers: list[asyncio.StreamWriter] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await handler(reader, writer)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 2.0)

        async def stop() -> None:
            pool.close()
            server.close()
            for writer in writers:
                writer.transport.abort()

        self._stack.push_async_callback(stop)
        return pool

    async def saying(self, *answers: bytes, closes: bool = False) -> ConnectionPool:
        """A server that gives the n-th request of a connection the n-th of `answers`."""

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for said in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(said)
            if closes:
                writer.close()
            else:
                await reader.read()

        return await self.start(handler)


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        yield Servers(stack)


@pytest.mark.parametrize(
    ("said", "closes", "status", "body", "is_kept"),
    [
        pytest.param(OK, False, 200, b"ok", True, id="length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            False,
            200,
            b"ok",
            True,
            id="chunked",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2;a=b\r\nok\r\n0\r\nx: y\r\n\r\n",
            False,
            200,
            b"ok",
            True,
            id="chunk extension and trailer",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
            True,
            200,
            b"ok",
            False,
            id="connection: close",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nok", True, 200, b"ok", False, id="until the end"),
        pytest.param(
            b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
            True,
            200,
            b"ok",
            False,
            id="HTTP/1.0",
        ),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b"", True, id="204"),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK,
            False,
            200,
            b"ok",
            True,
            id="informational first",
        ),
        pytest.param(OK + b"more", False, 200, b"ok", False, id="more than was asked for"),
    ],
)
async def test_an_answer_is_read_whole(
    servers: Servers, said: bytes, closes: bool, status: int, body: bytes, is_kept: bool
) -> None:
    pool = await servers.saying(said, closes=closes)

    answer = await ask(await pool.connect(), GET, 5)

    assert (answer.status, answer.body) == (status, body)
    assert (pool.idle() is not None) == is_kept


@pytest.mark.parametrize(
    ("said", "closes", "error"),
    [
        pytest.param(b"", True, ConnectionDied, id="nothing"),
        pytest.param(b"HTTP/1.1 200", True, ConnectionDied, id="half a head"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", True, ConnectionDied, id="short body"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
            True,
            ConnectionDied,
            id="no last chunk",
        ),
        pytest.param(b"SSH-2.0-x\r\n", False, BadAnswer, id="no HTTP"),
        pytest.param(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            False,
            UpstreamError,
            id="upgrade",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 60_000, False, BadAnswer, id="endless headers"
        ),
        pytest.param(b"", False, FirstByteTimedOut, id="silence"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(
    servers: Servers, said: bytes, closes: bool, error: type[UpstreamError]
) -> None:
    pool = await servers.saying(said, closes=closes)
    seconds = 0.3 if error is FirstByteTimedOut else 30  # only silence is to run out of time

    with pytest.raises(error):
        await ask(await pool.connect(), GET, seconds)
    assert pool.idle() is None


async def test_a_connection_is_used_again_while_it_is_fresh(servers: Servers) -> None:
    pool = await servers.saying(OK, OK)
    first = await pool.connect()
    await ask(first, GET, 5)

    again = pool.idle()
    assert again is first
    assert (await ask(again, GET, 5)).body == b"ok"
    again.idle_since -= 60
    assert pool.idle() is None
    await until(lambda: not first.is_open)


async def test_idle_connections_that_the_server_closed_are_not_offered(servers: Servers) -> None:
    pool = await servers.saying(OK, closes=True)
    connection = await pool.connect()
    await ask(connection, GET, 5)

    await until(lambda: not connection.is_open)
    pool.prune()
    assert pool.idle() is None


async def test_nobody_there_is_a_failed_connection() -> None:
    with pytest.raises(ConnectFailed):
        await ConnectionPool("http://127.0.0.1:1", 1.0).connect()


async def test_a_reader_that_pauses_holds_the_server_back(servers: Servers) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000

    pool = await servers.start(flood)
    connection = await pool.connect()

    class Slow:
        taken, is_over = 0, False

        def on_head(self, status: int, headers: RawHeaders) -> None:
            assert (status, len(headers)) == (200, 1)
            connection.pause_reading()

        def on_body(self, data: bytes) -> None:
            self.taken += len(data)

        def on_end(self) -> None:
            self.is_over = True

        def on_failure(self, error: UpstreamError) -> None:
            raise error

    slow = Slow()
    connection.start(GET, slow)
    await until(lambda: sent > 0)
    before = -1

    def is_still() -> bool:
        nonlocal before
        was, before = before, sent
        return was == sent

    await until(is_still)
    assert sent < 50_000_000
    connection.resume_reading()
    await until(lambda: slow.is_over)
    assert slow.taken == 100_000_000


async def test_httpx_speaks_over_our_connections(servers: Servers) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"
    pool = await servers.saying(OK, OK, head)
    pools = Pools(2.0)
    async with httpx.AsyncClient(
        transport=PoolTransport(pools), base_url=f"http://{pool.authority}"
    ) as client:
        got = await client.get("/a?b=c")
        posted = await client.post("/", content=b"")
        assert (got.text, posted.text) == ("ok", "ok")
        assert (await client.head("/")).headers["content-length"] == "10"
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1/")
    pools.close()


async def test_httpx_survives_a_kept_connection_that_was_closed(servers: Servers) -> None:
    pool = await servers.saying(OK, b"", closes=True)
    pools = Pools(2.0)
    async with httpx.AsyncClient(
        transport=PoolTransport(pools), base_url=f"http://{pool.authority}"
    ) as client:
        assert (await client.get("/")).text == "ok"
        assert (await client.get("/")).text == "ok"
    pools.close()


def test_hop_by_hop_internal_and_replaced_headers_are_not_passed_on() -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"connection", b"X-Hop"),
        (b"x-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"server", b"uvicorn"),
        (b"x-isobatch-seed", b"1"),
        (b"x-served-by", b"me"),
        (b"openai-version", b"2020"),
    ]

    assert passed_on(headers) == [
        (b"content-type", b"application/json"),
        (b"openai-version", b"2020"),
    ]


async def test_bytes_that_nobody_asked_for_close_a_connection(servers: Servers) -> None:
    async def early(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    pool = await servers.start(early)
    connection: Connection = await pool.connect()

    await until(lambda: not connection.is_open)

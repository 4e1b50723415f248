"""Requests that no client should send: each gets a clear answer, and the next one is served."""

import asyncio
import contextlib
import itertools
import json
from dataclasses import replace

import httpx
import pytest
from isobatch_gateway.settings import Bounds

from tests.gateway.fakes import CHAT, HELLO, QUICK, Exchange, Gateway, Stage, answer, until

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()


class Raw:
    """A client that says exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, gateway: Gateway) -> "Raw":
        return cls(*await asyncio.open_connection("127.0.0.1", gateway.port))

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(15):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(15):
            return await self.reader.read() == b""

    async def ask(self, *pieces: bytes) -> tuple[int, dict[str, str], str]:
        """Send `pieces`; status, headers and error code of the answer."""
        for piece in pieces:
            self.writer.write(piece)
            with contextlib.suppress(ConnectionError):
                await self.writer.drain()
        status, headers, body = await self.answer()
        return status, headers, json.loads(body)["error"]["code"]


def request(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)


async def is_serving(gateway: Gateway) -> bool:
    return (await gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        pytest.param(b'{"model": "m"', 400, "body", id="broken"),
        pytest.param(b"", 400, "body", id="empty"),
        pytest.param(b"[1]", 400, "body", id="array"),
        pytest.param(b'{"model": "\xc3\x28"}', 400, "body", id="invalid UTF-8"),
        pytest.param(b"\x00\x00", 400, "body", id="NUL bytes"),
        pytest.param(b'{"model": "m\x00"}', 400, "body", id="NUL in a string"),
        pytest.param(b'{"model": "m\\u0000"}', 404, "model_not_found", id="escaped NUL"),
        pytest.param(b"[" * 100_000, 400, "body", id="nested deeply"),
        pytest.param(
            b'{"consistency_tier": "strict", "model": "m", "consistency_tier": "standard"}',
            400,
            "consistency_tier",
            id="tier twice",
        ),
        pytest.param(
            b'{"consistency_tier": "strict", "model": "m", "\\u0063onsistency_tier": "standard"}',
            400,
            "consistency_tier",
            id="tier twice, once escaped",
        ),
    ],
)
async def test_a_bad_body_leaves_the_connection_usable(
    stage: Stage, body: bytes, status: int, code: str
) -> None:
    gateway, _, throughput = await stage.pair()
    raw = await Raw.connect(gateway)

    got = await raw.ask(request(body))
    assert (got[0], got[2]) == (status, code)
    assert throughput.seen == []

    raw.writer.write(request(json.dumps(HELLO).encode()))
    assert (await raw.answer())[0] == 200


async def test_a_tier_that_is_only_spoken_of_is_no_second_one(stage: Stage) -> None:
    gateway, strict, _ = await stage.pair()
    spoken = [{"role": "user", "content": [{"type": "text", "consistency_tier": "x"}]}]

    got = await gateway.chat(consistency_tier="strict", messages=spoken)

    assert got.status_code == 200
    assert len(strict.seen) == 1


@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}XX",
        b"transfer-encoding: xchunked\r\n\r\n{}",
        b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["size", "end of a chunk", "unknown coding", "both lengths"],
)
async def test_a_body_framed_wrongly_is_answered(stage: Stage, rest: bytes) -> None:
    gateway, _, throughput = await stage.pair()
    raw = await Raw.connect(gateway)

    got = await raw.ask(HEAD + rest)

    assert (got[0], got[2]) == (400, "malformed_request")
    assert throughput.seen == []
    assert await is_serving(gateway)


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"], ids=["none", "two"])
async def test_a_request_without_its_one_host_is_refused(stage: Stage, hosts: bytes) -> None:
    gateway, _, _ = await stage.pair()
    raw = await Raw.connect(gateway)

    got = await raw.ask(b"GET /healthz HTTP/1.1\r\n" + hosts + b"\r\n")

    assert (got[0], got[2]) == (400, "malformed_request")
    assert await is_serving(gateway)


@pytest.mark.parametrize("tier", ["strict", "standard"])
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prompt": [5, 1000]}, "prompt holds the token id 1000; the model's are 0 to 999"),
        ({"prompt": [[5], [7, -1]]}, "prompt holds the token id -1"),
        ({"stop_token_ids": [4096], "min_tokens": 2}, "stop_token_ids holds the token id 4096"),
        ({"allowed_token_ids": [3, 10**30]}, "allowed_token_ids holds the token id 1000000000"),
    ],
    ids=["prompt", "one-of-several", "stop", "allowed"],
)
async def test_token_ids_that_the_model_has_not_never_reach_it(
    stage: Stage, tier: str, asked: dict[str, object], named: str
) -> None:
    gateway, strict, throughput = await stage.pair()
    body = {"model": HELLO["model"], "prompt": "x", **asked}

    refused = await gateway.http.post(
        "/v1/completions", json=body, headers={"X-Consistency-Tier": tier}
    )

    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, next(iter(asked)))
    assert error["message"].startswith(named)
    assert strict.seen == throughput.seen == []
    ids = {**body, "prompt": [0, 999], "stop_token_ids": [999], "allowed_token_ids": None}
    assert (await gateway.http.post("/v1/completions", json=ids)).status_code == 200


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 7], ids=["whole", "body-apart", "in-pieces"])
async def test_an_offer_to_upgrade_is_ignored_and_the_request_served(
    stage: Stage, pieces: int
) -> None:
    gateway, _, worker = await stage.pair()
    raw = await Raw.connect(gateway)
    body = json.dumps(HELLO).encode()
    asked = HEAD + OFFER + request(body).removeprefix(HEAD)
    cut = {1: [], 2: [len(asked) - len(body)], 7: [len(asked) * n // 7 for n in range(1, 7)]}
    for start, end in itertools.pairwise([0, *cut[pieces], len(asked)]):
        raw.writer.write(asked[start:end])
        await raw.writer.drain()
        await asyncio.sleep(0.01)

    assert (await raw.answer())[0] == 200
    raw.writer.write(request(body) + asked + request(body))
    assert [(await raw.answer())[0] for _ in range(3)] == [200] * 3
    assert len(worker.seen) == 4


async def test_what_stands_in_a_body_is_no_request_whatever_is_offered(stage: Stage) -> None:
    gateway, _, worker = await stage.pair()
    raw = await Raw.connect(gateway)
    inner = request(json.dumps(HELLO).encode())

    raw.writer.write(HEAD + OFFER + b"content-length: %d\r\n\r\n" % len(inner))
    await raw.writer.drain()
    await asyncio.sleep(0.05)

    status, _, code = await raw.ask(inner)
    assert (status, code) == (400, "body")
    assert worker.seen == []


async def test_a_trailer_is_no_header(stage: Stage) -> None:
    gateway, _, worker = await stage.pair()
    raw = await Raw.connect(gateway)
    body = json.dumps(HELLO).encode()
    chunks = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)

    raw.writer.write(HEAD + chunks + b"x-consistency-tier: strict\r\n\r\n")

    status, headers, _ = await raw.answer()
    assert (status, headers["x-consistency-tier"]) == (200, "standard")
    assert len(worker.seen) == 1


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="gzip"),
        pytest.param(HEAD + b"transfer-encoding: identity\r\n\r\n", id="identity"),
        pytest.param(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", id="connect"),
    ],
)
async def test_what_is_framed_in_another_way_is_refused(stage: Stage, head: bytes) -> None:
    gateway, _, _ = await stage.pair()
    raw = await Raw.connect(gateway)

    status, _, code = await raw.ask(head)
    assert (status, code) == (400, "malformed_request")
    assert await raw.is_closed()


async def test_a_head_is_answered_as_a_get_without_its_body(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()

    got = await gateway.http.head("/healthz")

    assert (got.status_code, got.content) == (200, b"")
    assert int(got.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("status", "expected"),
    [(404, (404, "path_not_found")), (422, (422, "request_refused"))],
)
async def test_a_refusal_in_a_framework_s_own_words_comes_in_ours(
    stage: Stage, status: int, expected: tuple[int, str]
) -> None:
    async def unknown_route(exchange: Exchange) -> None:
        await exchange.send(status, b'{"detail":"Not Found"}')

    gateway, _, throughput = await stage.pair()
    throughput.reply = unknown_route

    got = await gateway.http.post("/v1/embeddings", json={"model": "m", "input": "x"})

    assert (got.status_code, got.json()["error"]["code"]) == expected
    throughput.reply = answer
    assert await is_serving(gateway)


async def test_a_body_that_announces_too_much_is_refused_and_the_next_served(
    stage: Stage,
) -> None:
    gateway, _, throughput = await stage.pair(bounds=Bounds(body_bytes=100_000))
    raw = await Raw.connect(gateway)
    size = 3_000_000

    status, _, code = await raw.ask(HEAD + b"content-length: %d\r\n\r\n" % size, b"x" * size)

    assert (status, code) == (413, "body_too_large")
    raw.writer.write(request(json.dumps(HELLO).encode()))
    assert (await raw.answer())[0] == 200
    assert len(throughput.seen) == 1


async def test_a_body_of_100_megabytes_is_refused_without_being_kept(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()

    async def megabytes() -> object:  # chunked: nothing announces the size
        for _ in range(100):
            yield b"x" * 1_000_000

    with contextlib.suppress(httpx.WriteError):
        got = await gateway.http.post(
            CHAT,
            content=megabytes(),  # type: ignore[arg-type]  # an async generator of bytes
            headers={"content-type": "application/json"},
        )
        assert got.status_code == 413
        assert got.json()["error"]["code"] == "body_too_large"
    assert await is_serving(gateway)


async def test_ten_thousand_headers_are_431(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    raw = await Raw.connect(gateway)
    headers = b"".join(b"x-header-%d: some value\r\n" % n for n in range(10_000))

    status, got, code = await raw.ask(HEAD + headers + b"content-length: 0\r\n\r\n")

    assert (status, code) == (431, "headers_too_large")
    assert got["connection"] == "close"
    assert await raw.is_closed()
    assert await is_serving(gateway)


async def test_a_header_without_end_is_431(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    raw = await Raw.connect(gateway)

    status, _, code = await raw.ask(HEAD + b"x-long: ", *[b"y" * 65536] * 4)

    assert (status, code) == (431, "headers_too_large")
    assert await raw.is_closed()
    assert await is_serving(gateway)


async def test_a_long_url_is_414(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    raw = await Raw.connect(gateway)

    status, _, code = await raw.ask(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")

    assert (status, code) == (414, "url_too_long")
    assert await is_serving(gateway)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
        pytest.param(b"hello\r\n\r\n", id="no HTTP"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="version"),
        pytest.param(HEAD + b"bad header\r\n\r\n", id="header without colon"),
        pytest.param(HEAD + b"content-length: -1\r\n\r\n", id="negative length"),
        pytest.param(
            HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", id="two lengths"
        ),
        pytest.param(HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\n", id="lengths differ"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", id="bad chunk"),
    ],
)
async def test_what_is_no_http_gets_a_clear_400(stage: Stage, said: bytes) -> None:
    gateway, _, throughput = await stage.pair()
    raw = await Raw.connect(gateway)

    raw.writer.write(said)
    async with asyncio.timeout(15):
        got = await raw.reader.read()

    assert got.startswith(b"HTTP/1.1 400 ") or got == b""
    assert b"malformed_request" in got or b"zz" in said
    assert throughput.seen == []
    assert await is_serving(gateway)


async def test_a_body_that_stalls_is_408(stage: Stage) -> None:
    gateway, _, _ = await stage.pair(timeouts=replace(QUICK, body=0.1))
    raw = await Raw.connect(gateway)

    status, headers, code = await raw.ask(HEAD + b"content-length: 100\r\n\r\n{")

    assert (status, code) == (408, "request_timeout")
    assert headers["connection"] == "close"
    assert await raw.is_closed()
    assert await is_serving(gateway)


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat", HEAD])
async def test_a_head_that_stalls_is_closed(stage: Stage, said: bytes) -> None:
    gateway, _, _ = await stage.pair(timeouts=replace(QUICK, head=0.1, keep_alive=0.1))
    raw = await Raw.connect(gateway)
    raw.writer.write(said)

    assert await raw.is_closed()
    assert await is_serving(gateway)


async def test_a_client_that_stops_reading_is_ended_and_held_back_meanwhile(
    stage: Stage,
) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK, write=0.3))
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.begin_stream()
        while True:
            await exchange.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536

    throughput.reply = flood
    raw = await Raw.connect(gateway)
    raw.writer.write(request(json.dumps(HELLO | {"stream": True}).encode()))

    await until(lambda: throughput.running)
    await until(lambda: throughput.running == 0)

    # What lies in the sockets' buffers and in ours, and no more.
    assert sent < 40_000_000
    assert gateway.ready() == 2
    throughput.reply = answer
    assert await is_serving(gateway)


async def test_pipelined_requests_are_answered_in_order(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    raw = await Raw.connect(gateway)
    bodies = [json.dumps(HELLO | {"user": str(n)}).encode() for n in range(3)]

    raw.writer.write(b"".join(request(body) for body in bodies))

    assert [(await raw.answer())[0] for _ in bodies] == [200, 200, 200]
    assert [seen.body["user"] for seen in throughput.seen] == ["0", "1", "2"]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_of_http_1_0_gets_a_body_that_the_end_of_the_connection_ends(
    stage: Stage, is_streamed: bool
) -> None:
    gateway, _, _ = await stage.pair()
    body = json.dumps(dict(HELLO, stream=is_streamed)).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"expect: 100-continue\r\n"
    client = await Raw.connect(gateway)

    client.writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    async with asyncio.timeout(15):
        head, _, said = (await client.reader.read()).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if is_streamed:
        events = said.decode().split("\n\n")
        assert [event[:6] for event in events if event] == ["data: "] * (len(events) - 1)
        assert events[-2:] == ["data: [DONE]", ""]
    else:
        assert json.loads(said)["choices"]


async def test_a_client_that_asks_to_continue_is_told_to(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    raw = await Raw.connect(gateway)
    body = json.dumps(HELLO).encode()

    raw.writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
    assert (await raw.answer())[0] == 100
    raw.writer.write(body)

    assert (await raw.answer())[0] == 200

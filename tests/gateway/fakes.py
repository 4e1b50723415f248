"""A worker that answers as vLLM does, or fails as one is told to; and a gateway in front of it."""

import asyncio
import contextlib
import hashlib
import json
import random
import time
from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from isobatch_contracts.numerics import NUMERICS_PATH
from isobatch_contracts.receipt import DIGESTS_PATH, AnswerDigests, SequenceDigests
from isobatch_contracts.resource import Tiers
from isobatch_contracts.routing_table import Endpoint, Revision, RoutingTable, dump
from isobatch_contracts.tiers import PoolName
from isobatch_gateway.app import create_app
from isobatch_gateway.keys import Key, KeyFile
from isobatch_gateway.runtime import Runtime
from isobatch_gateway.server import listen, server_for
from isobatch_gateway.settings import Bounds, Settings, Timeouts

FINGERPRINT = "sha256:" + "a" * 64
OTHER_FINGERPRINT = "sha256:" + "b" * 64
STRICT, THROUGHPUT = PoolName.STRICT, PoolName.THROUGHPUT
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
QUICK = Timeouts(connect=1, first_byte=20, idle=20, write=20, body=20, drain=20, check=2, probe=2)


async def until(condition: Callable[[], object], seconds: float = 15) -> None:
    """Wait for `condition`; the wait ends as soon as it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.005)


@dataclass
class Seen:
    """A request as it reached the worker."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


Reply = Callable[["Exchange"], Any]


@dataclass
class Exchange:
    """One request at the worker, and the connection to answer it on."""

    worker: "FakeWorker"
    seen: Seen
    writer: asyncio.StreamWriter

    async def send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: %s\r\nserver: uvicorn\r\ndate: old\r\n"
            b"x-isobatch-secret: 1\r\ncontent-length: %d\r\n\r\n%s"
            % (status, kind.encode(), len(body), body)
        )
        await self.writer.drain()

    async def begin_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()


def event(n: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % n


async def answer(exchange: Exchange) -> None:
    """As vLLM: a stream of `max_tokens` events, or one JSON document."""
    body = exchange.seen.body
    if not body.get("stream"):
        text = {"role": "assistant", "content": "hi"}
        await exchange.send(200, json.dumps({"choices": [{"message": text}]}).encode())
        return
    await exchange.begin_stream()
    for n in range(body.get("max_tokens") or 3):
        await exchange.chunk(event(n))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.chunk(b"")


async def hang(exchange: Exchange) -> None:
    await exchange.worker.never.wait()
    await answer(exchange)


async def die(exchange: Exchange) -> None:
    exchange.reset()


async def begin_then_die(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(event(0))
    await exchange.chunk(b'data: {"half')
    exchange.worker.halfway.set()
    await exchange.worker.go.wait()
    exchange.reset()


async def begin_then_hang(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(event(0))
    await exchange.worker.never.wait()


async def fail(exchange: Exchange) -> None:
    await exchange.send(500, b'{"error":{"message":"http://10.0.0.7:8000 broke","code":500}}')


async def engine_dead(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(b'data: {"error": {"message": "EngineDead", "code": 500}}\n\n')
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.chunk(b"")


async def garbage(exchange: Exchange) -> None:
    exchange.writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
    await exchange.writer.drain()


async def refuse(exchange: Exchange) -> None:
    await exchange.send(400, b'{"error":{"message":"max_tokens is too large","code":400}}')


@dataclass
class FakeWorker:
    """One replica, on a port of its own; `reply` is what it does with a request."""

    pool: PoolName = THROUGHPUT
    name: str = "r0"
    fingerprint: str = FINGERPRINT
    is_certified: bool = True
    is_healthy: bool = True
    reply: Reply = answer
    probe: Reply = answer
    port: int = 0
    fault: int = 0  # a worker with another one gives other tokens
    seen: list[Seen] = field(default_factory=list)
    probes: int = 0
    running: int = 0
    progress: int = 0
    never: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    halfway: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As kill -9: nobody listens, and every connection is reset."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self._server = None

    def close_idle(self) -> None:
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (seen := await _read(reader)) is not None:
                await self._respond(Exchange(self, seen, writer), reader)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _respond(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        path, seen = exchange.seen.path, exchange.seen
        if path == NUMERICS_PATH:
            await exchange.send(200 if self.is_certified else 503, self._numerics())
        elif path.startswith(DIGESTS_PATH):
            await self._tell_digests(exchange)
        elif path == "/metrics":
            text = (
                f'vllm:num_requests_running{{engine="0"}} {self.running}.0\n'
                f"vllm:num_requests_waiting 0.0\nvllm:generation_tokens_total {self.progress}.0\n"
            )
            await exchange.send(200, text.encode(), "text/plain")
        elif path in ("/health", "/v1/models"):
            await exchange.send(200 if self.is_healthy else 503, b"{}")
        elif path == "/v1/completions" and seen.body.get("prompt") == "1":
            self.probes += 1
            await self.probe(exchange)
        else:
            self.seen.append(seen)
            await self._answer(exchange, reader)

    async def _answer(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        """Reply, unless the caller closes its connection first."""
        self.running += 1
        reply = asyncio.ensure_future(self.reply(exchange))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((reply, gone), return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                self.left += 1
                raise ConnectionResetError
            reply.result()
        finally:
            self.running -= 1
            reply.cancel()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await gone

    async def _tell_digests(self, exchange: Exchange) -> None:
        """As a strict worker's side channel, of the requests that were seen."""
        target = urlsplit(exchange.seen.path)
        worker_id = target.path.removeprefix(DIGESTS_PATH)
        asked = next((s for s in self.seen if s.headers.get("x-request-id") == worker_id), None)
        if asked is None or self.pool is not STRICT:
            await exchange.send(404, b"{}")
            return
        query = parse_qs(target.query)
        at = [int(n) for n in query.get("at", [""])[0].split(",") if n]
        made = self.tokens(asked)
        sequences = []
        for index, ids in enumerate(made):
            kept = ids[: at[min(index, len(at) - 1)]] if at else ids
            one = SequenceDigests(
                index=index,
                prompt=0,
                prompt_tokens=3,
                tokens=len(kept),
                finished=len(kept) == len(ids),
                token_ids="sha256:" + hashlib.sha256(array("i", kept).tobytes()).hexdigest(),
                ids=tuple(kept) if "ids" in query else None,
            )
            sequences.append(one)
        body = AnswerDigests(sequences=tuple(sequences)).model_dump_json()
        await exchange.send(200, body.encode())

    def tokens(self, asked: Seen) -> list[list[int]]:
        """The tokens of an answer: a function of seed and `max_tokens`, as in a strict worker."""
        draw = random.Random(f"{asked.body.get('seed')} {self.fingerprint} {self.fault}")
        drawn = [draw.randrange(1000) for _ in range(64)]
        return [drawn[: asked.body.get("max_tokens") or 3]] * (asked.body.get("n") or 1)

    def _numerics(self) -> bytes:
        if not self.is_certified:
            return b'{"state": "refused", "reason": "planted"}'
        return json.dumps(
            {
                "state": "certified",
                "fingerprint": self.fingerprint,
                "modelDigest": "sha256:" + "c" * 64,
                "device": "cpu",
                "versions": {},
                "operators": [],
                "vocabulary": 1000,
                "fromCache": True,
                "certificationSeconds": 0.0,
            }
        ).encode()


async def _read(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(first.split(" ")[1], headers, raw)


@dataclass
class Gateway:
    """A gateway that serves on a real socket."""

    runtime: Runtime
    port: int
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self, pool: PoolName | None = None) -> int:
        replicas = self.runtime.fleet.replicas()
        return sum(r.is_eligible for r in replicas if pool is None or r.id.pool is pool)

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=HELLO | fields, headers=headers)

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@dataclass
class Stage:
    """Workers and gateways of one test; all end with it."""

    folder: Path
    stack: AsyncExitStack
    version: int = 0

    async def worker(self, pool: PoolName = THROUGHPUT, **fields: Any) -> FakeWorker:
        worker = FakeWorker(pool=pool, **fields)
        await worker.start()

        async def stop() -> None:
            worker.never.set()
            if worker._server is not None:
                await worker.kill()
            await until(lambda: not worker._writers)

        self.stack.push_async_callback(stop)
        return worker

    def table(self, *workers: FakeWorker, **fields: Any) -> RoutingTable:
        """A table of `workers`, one revision a pool unless `revisions` says otherwise."""
        self.version += 1
        revisions = [
            Revision(
                name="rev1",
                pool=pool,
                weight=100,
                fingerprint=FINGERPRINT if pool is STRICT else None,
                endpoints=tuple(
                    Endpoint(name=w.name, url=w.url) for w in workers if w.pool is pool
                ),
            )
            for pool in PoolName
            if any(w.pool is pool for w in workers)
        ]
        defaults: dict[str, Any] = {
            "version": self.version,
            "service": "chat",
            "model": "m",
            "tiers": Tiers(),
            "pools": tuple(PoolName),
            "revisions": tuple(revisions),
        }
        return RoutingTable.model_validate(defaults | fields)

    def write(self, table: RoutingTable, name: str = "chat.json") -> None:
        tables = self.folder / "tables"
        tables.mkdir(exist_ok=True)
        beside = tables / f".{name}"
        beside.write_text(dump(table))
        beside.replace(tables / name)

    async def gateway(
        self,
        *tables: RoutingTable,
        keys: list[Key] | None = None,
        timeouts: Timeouts = QUICK,
        bounds: Bounds | None = None,
        **settings: Any,
    ) -> Gateway:
        """A gateway that routes by `tables`; every replica has had its first check."""
        (self.folder / "tables").mkdir(exist_ok=True)
        for number, table in enumerate(tables):
            self.write(table, f"table{number}.json")
        if keys is not None:
            settings["keys"] = self.folder / "keys.json"
            settings["keys"].write_text(KeyFile(keys=tuple(keys)).model_dump_json())
        base = Settings(
            tables=self.folder / "tables",
            secret=self.folder / "secret",
            check_interval=0.05,
            table_interval=0.02,
            log_level="off",
            timeouts=timeouts,
            bounds=bounds or Bounds(),
        )
        runtime = Runtime(replace(base, **settings))
        listener = listen("127.0.0.1", 0)
        server = server_for(create_app(runtime), runtime.settings)
        # The steps of `Server.serve`, without the fifths of a second that it takes to notice its
        # end: over all the tests they were half a minute.
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        await server.on_tick(0)
        port = listener.getsockname()[1]
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)

        async def stop() -> None:
            await http.aclose()
            runtime.end_all()
            for accepting in server.servers:
                accepting.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await until(lambda: not runtime.open)
            await server.lifespan.shutdown()

        self.stack.push_async_callback(stop)
        return Gateway(runtime, port, http)

    async def pair(self, **settings: Any) -> tuple[Gateway, FakeWorker, FakeWorker]:
        """A gateway with one ready replica in each pool: gateway, strict, throughput."""
        fields = settings.pop("table", {})
        strict, throughput = await self.worker(STRICT), await self.worker(THROUGHPUT)
        gateway = await self.gateway(self.table(strict, throughput, **fields), **settings)
        await until(lambda: gateway.ready() == 2)
        return gateway, strict, throughput

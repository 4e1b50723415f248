"""Processes are killed at random moments under load: nothing is answered without a receipt."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from isobatch_contracts.resource import Receipts
from isobatch_gateway.receipts.chain import line, verify
from isobatch_gateway.receipts.keeper import PUBLIC_KEYS
from isobatch_gateway.receipts.signing import Trusted
from isobatch_gateway.receipts.store import Store
from isobatch_operator.local.ports import free_port

from tests.gateway.fakes import CHAT, HELLO, STRICT, Exchange, Stage, event
from tests.gateway.receipts.kept import STRICTLY
from tests.gateway.receipts.postgres import Postgres, postgres

CLIENTS = 12
CHAIN = "gw"
DONE = b"data: [DONE]\n\n"


class GatewayProcess:
    """A real `isobatch gateway` that is killed and started again on the same files."""

    def __init__(self, stage: Stage, ledger: str) -> None:
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys = stage.folder / "receipt.keys"
        self.ledger = ledger
        self._log = stage.folder / "gateway.log"
        self._command = [
            *(sys.executable, "-m", "isobatch_cli", "gateway"),
            *("--tables", str(stage.folder / "tables"), "--port", str(self.port)),
            *("--receipts", ledger, "--receipt-keys", str(self.keys), "--receipt-chain", CHAIN),
            *("--check-interval", "100ms", "--no-access-log"),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Start it; how many seconds it took to serve strict again."""
        begun = time.monotonic()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log
            )
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.post(CHAT, json=HELLO, headers=STRICTLY)).status_code == 200:
                        return time.monotonic() - begun
                assert self._process.returncode is None, self._log.read_text()[-2000:]
                assert time.monotonic() - begun < 60, self._log.read_text()[-2000:]
                await asyncio.sleep(0.02)

    async def end(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
        await self._process.wait()


class Clients:
    """Clients that ask on and on; `complete` are receipts of the answers that came whole."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.complete: list[str] = []
        self.broken = 0
        self.refused = 0

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        tasks = [asyncio.create_task(self._ask(n, stop)) for n in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def _ask(self, number: int, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False) as http:
            while not stop.is_set():
                number += CLIENTS
                fields = {"stream": number % 3 != 0, "max_tokens": 1 + number % 7}
                try:
                    got = await http.post(CHAT, json=HELLO | fields, headers=STRICTLY)
                except httpx.HTTPError:
                    self.broken += 1
                    await asyncio.sleep(0.01)
                    continue
                self._look(got, is_stream=bool(fields["stream"]))

    def _look(self, got: httpx.Response, *, is_stream: bool) -> None:
        if got.status_code == 503:
            self.refused += 1
            return
        assert got.status_code == 200, got.text
        is_whole = got.content.endswith(DONE) and b'"error"' not in got.content
        if is_whole if is_stream else got.json()["choices"]:
            self.complete.append(got.headers["x-receipt-id"])
        else:
            self.broken += 1


async def slowly(exchange: Exchange) -> None:
    """A stream as vLLM's, a little slower than the ledger, so that kills come in between."""
    body = exchange.seen.body
    if not body.get("stream"):
        await asyncio.sleep(0.005)
        await exchange.send(200, json.dumps({"choices": [{"message": {}}]}).encode())
        return
    await exchange.begin_stream()
    for n in range(body["max_tokens"]):
        await exchange.chunk(event(n))
        await asyncio.sleep(0.002)
    await exchange.chunk(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n' + DONE)
    await exchange.chunk(b"")


async def staged(stage: Stage, ledger: str) -> GatewayProcess:
    worker = await stage.worker(STRICT, reply=slowly)
    stage.write(stage.table(worker, receipts=Receipts(retention="90d")))
    return GatewayProcess(stage, ledger)


def check(gateway: GatewayProcess, clients: Clients) -> dict[str, int]:
    """Every complete answer has its receipt, each receipt its end, and the chain is whole."""
    store = Store(gateway.ledger)
    records = list(store.walk(CHAIN))
    store.close()
    trusted = Trusted.read((gateway.keys / PUBLIC_KEYS).read_bytes())
    assert verify([line(r.payload, r.signature) for r in records], trusted).findings == []
    finals = [record for record in records if record.kind == "final"]
    outcomes = {r.receipt: json.loads(r.payload)["body"]["outcome"] for r in finals}
    assert {r.receipt for r in records if r.kind == "open"} <= set(outcomes)
    without = [receipt for receipt in clients.complete if outcomes.get(receipt) != "complete"]
    assert without == []
    counts: dict[str, int] = {}
    for outcome in outcomes.values():
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    return 100 if pytestconfig.getoption("--full") else 4


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_gateway_killed_under_load_has_answered_nothing_without_a_receipt(
    stage: Stage,
    database: str,
    kills: int,
    request: pytest.FixtureRequest,
    report_figure: Callable[[str, object], None],
) -> None:
    url = str(stage.folder / "receipts.db")
    if database == "postgresql":
        server: Postgres = request.getfixturevalue("server")
        url = server.new_database()
    gateway = await staged(stage, url)
    await gateway.start()
    clients = Clients(gateway.url)

    async with clients.asking():
        for _ in range(kills):
            await asyncio.sleep(random.uniform(0.05, 0.6))
            await gateway.end(signal.SIGKILL)
            await gateway.start()
    await gateway.end(signal.SIGTERM)

    counts = await asyncio.to_thread(check, gateway, clients)
    report_figure(f"receipts after {kills} kills of the gateway ({database})", counts)
    assert len(clients.complete) > kills
    assert clients.broken
    assert counts["interrupted"] > 0


async def test_a_database_killed_under_load_leaves_nothing_without_a_receipt(
    stage: Stage, kills: int, report_figure: Callable[[str, object], None]
) -> None:
    with postgres() as server:
        gateway = await staged(stage, server.url)
        await gateway.start()
        clients = Clients(gateway.url)

        async with clients.asking():
            for _ in range(kills):
                await asyncio.sleep(random.uniform(0.05, 0.6))
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(random.uniform(0, 0.2))
                await asyncio.to_thread(server.start)
                before = len(clients.complete)
                await until_more(clients, before)
        await gateway.end(signal.SIGTERM)
        await gateway.start()  # closes what the database's deaths left open
        await gateway.end(signal.SIGTERM)

        counts = await asyncio.to_thread(check, gateway, clients)
    report_figure(f"receipts after {kills} kills of PostgreSQL", counts)
    assert clients.refused > 0
    assert len(clients.complete) > kills


async def until_more(clients: Clients, before: int) -> None:
    async with asyncio.timeout(60):
        while len(clients.complete) <= before:  # noqa: ASYNC110  # clients raise no event
            await asyncio.sleep(0.02)

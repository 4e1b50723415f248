"""The ledger in SQLite and in PostgreSQL: what is written stays, and what fails is refused."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from isobatch_gateway.errors import LedgerUnavailable
from isobatch_gateway.receipts.chain import Draft, line, verify
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.signing import Signer, Trusted
from isobatch_gateway.receipts.store import Store, StoreFailed
from isobatch_gateway.settings import ReceiptSettings

from tests.gateway.fakes import Gateway, Stage, until
from tests.gateway.receipts.kept import STRICTLY
from tests.gateway.receipts.postgres import Postgres, postgres

SIGNER = Signer.of(b"\1" * 32)
HOUR = 3_600_000  # ms
TRUSTED = Trusted({SIGNER.id: SIGNER.public})


@contextmanager
def opened(url: str, chain: str = "gw") -> Iterator[Ledger]:
    ledger = Ledger(Store(url), chain, (SIGNER,))
    ledger.start()
    yield ledger
    ledger.close()


def is_whole(ledger: Ledger, chain: str = "gw") -> bool:
    lines = [line(r.payload, r.signature) for r in ledger.store.walk(chain)]
    return verify(lines, TRUSTED).findings == []


def now() -> int:
    return time.time_ns() // 1_000_000


async def write(ledger: Ledger, count: int, first: int = 0, at: int = 1) -> None:
    for number in range(first, first + count):
        name = f"rcpt-{number:032x}"
        await ledger.begin(Draft("open", {}, name, at), "tenant")
        await ledger.begin(Draft("final", {"outcome": "complete"}, name, at), "tenant", b"sealed")


async def test_what_was_written_is_found_again(ledger_url: str) -> None:
    with opened(ledger_url) as ledger:
        await write(ledger, 3)
        await ledger.begin(Draft("open", {}, "rcpt-open", 2), "other")

    with opened(ledger_url) as again:
        await write(again, 1, first=3)
        store = again.store
        assert store.chains() == ["gw"]
        assert [r.kind for r in store.of_receipt("rcpt-open")] == ["open", "final"]
        assert store.tenant("rcpt-open") == "other"
        assert store.content(f"rcpt-{0:032x}") == b"sealed"
        assert len(store.receipts(0, "tenant", 100)) == 4
        assert len(store.receipts(0, "tenant", 2)) == 2
        assert is_whole(again)


async def test_two_gateways_write_their_own_chains(ledger_url: str) -> None:
    with opened(ledger_url, "one") as one, opened(ledger_url, "two") as two:
        await asyncio.gather(write(one, 20), write(two, 20, first=100))

        assert sorted(one.store.chains()) == ["one", "two"]
        assert is_whole(one, "one")
        assert is_whole(one, "two")


async def test_two_writers_of_one_chain_break_nothing(ledger_url: str) -> None:
    """A mistake of whoever started them: records may be refused, the chain stays whole."""

    async def write_each(ledger: Ledger, first: int) -> int:
        refused = 0
        for number in range(first, first + 20):
            try:
                await write(ledger, 1, first=number)
            except LedgerUnavailable:
                refused += 1
        return refused

    with opened(ledger_url) as one, opened(ledger_url) as two:
        refused = await asyncio.gather(write_each(one, 0), write_each(two, 100))

        assert sum(refused) < 40
        assert is_whole(one)


async def test_what_passed_its_retention_is_replaced_by_a_tombstone(ledger_url: str) -> None:
    with opened(ledger_url) as ledger:
        await write(ledger, 5, at=now())
        await ledger.begin(Draft("open", {}, "rcpt-pending", now()), "tenant")
        await write(ledger, 5, first=5, at=now() + 2 * HOUR)

        ledger.expire(before=now() + HOUR)
        await ledger.append("replay", {})

        kinds = [record.kind for record in ledger.store.walk("gw")]
        assert kinds == ["open", *["open", "final"] * 5, "tombstone", "replay"]
        assert ledger.store.content(f"rcpt-{0:032x}") is None
        assert ledger.store.content(f"rcpt-{9:032x}") == b"sealed"
        assert is_whole(ledger)


async def test_a_tombstone_does_not_hide_what_was_taken_after_it(ledger_url: str) -> None:
    with opened(ledger_url) as ledger:
        await write(ledger, 5, at=now())
        await write(ledger, 5, first=5, at=now() + 2 * HOUR)
        ledger.expire(before=now() + HOUR)
        await ledger.append("replay", {})
        lines = [line(r.payload, r.signature) for r in ledger.store.walk("gw")]

    assert verify(lines, TRUSTED).findings == []
    (found,) = verify(lines[1:], TRUSTED).findings
    assert "missing, without a tombstone" in found.problem


async def test_a_long_chain_has_signed_checkpoints(ledger_url: str) -> None:
    with opened(ledger_url) as ledger:
        waiting = [
            ledger.begin(Draft("open", {}, f"rcpt-{number}", 1), None) for number in range(2100)
        ]
        await asyncio.gather(*waiting)

        points = ledger.store.kind("gw", "checkpoint")
        assert len(points) == 2
        assert is_whole(ledger) is False  # the last ones are open, and nothing vouches for them
        await ledger.append("replay", {})
        assert is_whole(ledger)


@pytest.mark.parametrize("url", ["/proc/nowhere/receipts.db", "postgresql://127.0.0.1:9/none"])
def test_a_database_that_cannot_be_had_is_told(url: str) -> None:
    with pytest.raises(StoreFailed):
        Store(url)


async def gateway_on(stage: Stage, url: str) -> Gateway:
    settings = ReceiptSettings(url, stage.folder / "keys", "gw")
    gateway, _, _ = await stage.pair(receipts=settings)
    return gateway


async def test_a_database_that_is_killed_is_waited_for(stage: Stage) -> None:
    with postgres() as server:
        gateway = await gateway_on(stage, server.url)
        assert (await gateway.chat(STRICTLY)).status_code == 200

        server.kill()
        refused = [await gateway.chat(STRICTLY, stream=stream) for stream in (False, True)]
        standard = await gateway.chat()
        server.start()
        back: list[int] = []
        while 200 not in back:
            back.append((await gateway.chat(STRICTLY)).status_code)
            assert len(back) < 100
        ledger = gateway.runtime.ledger

        assert [got.status_code for got in (*refused, standard)] == [503, 503, 200]
        assert ledger is not None
        assert ledger.store.pending("gw") == []
        assert gateway.runtime.receipts is not None
        trusted = Trusted.read(gateway.runtime.receipts.public_keys)
        lines = [line(r.payload, r.signature) for r in ledger.store.walk("gw")]
        assert verify(lines, trusted).findings == []
        await stage.stack.aclose()


async def test_a_gateway_that_starts_before_its_database_waits_for_it(stage: Stage) -> None:
    with postgres() as server:
        server.kill()
        gateway = await gateway_on(stage, server.url)
        before = await gateway.chat(STRICTLY)
        server.start()
        await until(lambda: gateway.runtime.ledger is not None)

        assert before.status_code == 503
        assert (await gateway.chat(STRICTLY)).status_code == 200
        await stage.stack.aclose()


async def test_a_read_only_postgresql_refuses_strict_alone(stage: Stage, server: Postgres) -> None:
    url = server.new_database()
    gateway = await gateway_on(stage, url)
    before = await gateway.chat(STRICTLY)

    name = url.rpartition("/")[2]
    server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    server.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    )
    strict, standard = await gateway.chat(STRICTLY), await gateway.chat()

    assert [got.status_code for got in (before, strict, standard)] == [200, 503, 200]
    assert "receipt" in strict.json()["error"]["message"]


# Root may write to any file and fill any disk: SQLite is told, and fails as it does then.
@pytest.mark.parametrize("pragma", ["query_only = ON", "max_page_count = 1"])
async def test_a_read_only_or_full_sqlite_refuses_strict_alone(stage: Stage, pragma: str) -> None:
    gateway = await gateway_on(stage, str(stage.folder / "receipts.db"))
    before = await gateway.chat(STRICTLY)
    assert gateway.runtime.ledger is not None

    @sa.event.listens_for(gateway.runtime.ledger.store._engine, "checkout")
    def tell(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA {pragma}")

    got = [await gateway.chat(STRICTLY) for _ in range(30)]
    standard = await gateway.chat()

    assert (before.status_code, standard.status_code) == (200, 200)
    assert got[-1].status_code == 503
    assert "receipt" in got[-1].json()["error"]["message"]

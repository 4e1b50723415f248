"""Performs: the one writer of a chain. Records that wait together share one commit, and its fsync.

It is a thread: the loop hands a record over and is told when it is durable. When the database
refuses, everybody who waits is told so and the next record finds the chain where it was.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
import structlog

from isobatch_gateway.errors import LedgerUnavailable
from isobatch_gateway.receipts.canonical import NotCanonical
from isobatch_gateway.receipts.chain import START, Draft, Head, Sealed, seal
from isobatch_gateway.receipts.signing import Signer
from isobatch_gateway.receipts.store import Row, Store, StoreFailed

_MOST_AT_ONCE = 256
_CHECKPOINT_EVERY = 1000  # records


class Outcome(NamedTuple):
    """What the writer did with one entry: a record in its place, or why not."""

    record: Sealed | None
    error: str | None


class _Entry(NamedTuple):
    draft: Draft
    tenant: str | None
    content: bytes | None
    tell: Callable[[Outcome], None]
    signer: Signer | None = None  # of another key than the current one


class _Expiry(NamedTuple):
    before: int  # ms since 1970


class Ledger:
    """The chain `chain` in `store`, signed by the last of `signers`; those before are former."""

    def __init__(self, store: Store, chain: str, signers: tuple[Signer, ...]) -> None:
        self.store, self.chain, self.signer = store, chain, signers[-1]
        self._former = {signer.id: signer for signer in signers[:-1]}
        self.is_failing = False
        self._head: Head = START
        self._since_checkpoint = 0
        self._queue: queue.SimpleQueue[_Entry | _Expiry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> int:
        """Take the chain up where it ends; how many receipts were found open and are closed now.

        Raises `StoreFailed`.
        """
        self._head = self.store.head(self.chain)
        now = time.time_ns() // 1_000_000
        entries: list[_Entry] = []
        before = self._signing_key()
        if before != self.signer.id:
            key = {"id": self.signer.id, "public": self.signer.public.hex()}
            by = None if before is None else self._former.get(before)
            entries.append(_Entry(Draft("key", key, None, now), None, None, _nobody, by))
        pending = self.store.pending(self.chain)
        for opened in pending:
            body = {
                "outcome": "interrupted",
                "delivered": False,
                "opened": {"seq": opened.seq, "digest": opened.digest},
            }
            tenant = None if opened.receipt is None else self.store.tenant(opened.receipt)
            entries.append(_Entry(Draft("final", body, opened.receipt, now), tenant, None, _nobody))
        self._write(entries)
        self._thread.start()
        return len(pending)

    def submit(
        self,
        draft: Draft,
        tenant: str | None,
        tell: Callable[[Outcome], None],
        content: bytes | None = None,
    ) -> None:
        """Write `draft` soon; `tell` is called in the writer's thread once it is durable or not."""
        self._queue.put(_Entry(draft, tenant, content, tell))

    def begin(
        self, draft: Draft, tenant: str | None, content: bytes | None = None
    ) -> asyncio.Future[Sealed]:
        """Write `draft`: done once it is durable, or failed with `LedgerUnavailable`."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Sealed] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if waiting.done():
                return
            if outcome.record is None:
                waiting.set_exception(LedgerUnavailable(outcome.error or "closed"))
                waiting.exception()  # looked at: who no longer waits must not be warned of
            else:
                waiting.set_result(outcome.record)

        def tell(outcome: Outcome) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome)

        self.submit(draft, tenant, tell, content)
        return waiting

    async def append(
        self, kind: str, body: dict[str, Any], receipt: str | None = None, tenant: str | None = None
    ) -> Sealed:
        """Write a signed record; durable when it returns. Raises `LedgerUnavailable`."""
        return await self.begin(Draft(kind, body, receipt, time.time_ns() // 1_000_000), tenant)

    def expire(self, before: int) -> None:
        """Remove soon what is older than `before` (ms), and leave a signed tombstone for it."""
        self._queue.put(_Expiry(before))

    def close(self) -> None:
        """Write what waits, and end."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self.store.close()

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            entries: list[_Entry] = []
            while isinstance(item, _Entry):
                entries.append(item)
                if len(entries) >= _MOST_AT_ONCE or self._queue.empty():
                    break
                item = self._queue.get()
            if entries:
                self._commit(entries)
            if isinstance(item, _Expiry):
                self._expire(item.before)
            if item is None:
                return

    def _commit(self, entries: list[_Entry]) -> None:
        try:
            sealed = self._write(entries)
        except Exception as exc:  # noqa: BLE001  # whoever waits must hear of it, whatever it was
            said = str(exc) if isinstance(exc, StoreFailed) else type(exc).__name__
            log = structlog.get_logger()
            if not self.is_failing:
                log.error("receipt ledger cannot be written: strict is refused", reason=said)
            # Others may write to a shared database: what is there decides, once it answers again.
            self.is_failing = True
            self._recover()
            for entry in entries:
                entry.tell(Outcome(None, said))
            return
        if self.is_failing:
            structlog.get_logger().info("receipt ledger can be written again")
        self.is_failing = False
        for entry, outcome in zip(entries, sealed, strict=True):
            entry.tell(outcome)

    def _write(self, entries: list[_Entry]) -> list[Outcome]:
        head, rows, outcomes = self._head, [], []
        for entry in entries:
            try:
                record = seal(entry.draft, self.chain, head, entry.signer or self.signer)
            except NotCanonical as exc:
                outcomes.append(Outcome(None, str(exc)))
                continue
            head = Head(record.seq, record.digest)
            rows.append(Row(record, entry.tenant, entry.content))
            outcomes.append(Outcome(record, None))
        self._since_checkpoint += len(rows)
        if self._since_checkpoint >= _CHECKPOINT_EVERY:
            self._since_checkpoint = 0
            now = time.time_ns() // 1_000_000
            point = seal(self._checkpoint(now, head), self.chain, head, self.signer)
            head = Head(point.seq, point.digest)
            rows.append(Row(point, None))
        if rows:
            self.store.write(rows)
            self._head = head
        return outcomes

    def _expire(self, before: int) -> None:
        try:
            last = self.store.expired(self.chain, before)
            if last is None:
                return
            body = {"through": last.seq, "digest": last.digest}
            draft = Draft("tombstone", body, None, time.time_ns() // 1_000_000)
            tombstone = seal(draft, self.chain, self._head, self.signer)
            self.store.replace(self.chain, last.seq, Row(tombstone, None))
            self._head = Head(tombstone.seq, tombstone.digest)
        except StoreFailed as exc:
            structlog.get_logger().error("retention failed; tried again later", reason=str(exc))
            self._recover()

    def _recover(self) -> None:
        """After a failed commit it is unknown whether it happened: read where the chain ends."""
        try:
            self._head = self.store.head(self.chain)
        except StoreFailed:
            return

    def _checkpoint(self, now: int, head: Head | None = None) -> Draft:
        seq, digest = head or self._head
        return Draft("checkpoint", {"seq": seq, "digest": digest}, None, now)

    def _signing_key(self) -> str | None:
        """The key that the chain says signs now."""
        for record in reversed(self.store.kind(self.chain, "key")):
            return str(orjson.loads(record.payload)["body"]["id"])
        return None


def _nobody(_: Outcome) -> None:
    """Nobody waits for what start-up writes."""

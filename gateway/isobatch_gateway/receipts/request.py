"""Performs: the receipt of one request, from its `open` record to its final one."""

import asyncio
import base64
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import orjson
from isobatch_contracts.receipt import AnswerDigests

from isobatch_gateway.errors import LedgerUnavailable
from isobatch_gateway.fleet import Replica
from isobatch_gateway.receipts.answer import AnswerWriter
from isobatch_gateway.receipts.chain import Draft, Sealed
from isobatch_gateway.receipts.content import keyed
from isobatch_gateway.receipts.facts import (
    FULL,
    Asking,
    answer_body,
    choices_asked,
    numerics_body,
    open_body,
    usage_of,
)
from isobatch_gateway.relay import Writer

_PATIENCE = 5.0  # seconds that an answer waits for its record; a disk that takes longer is failing


class Ending:
    """How a request ended: the first words of its final record."""

    COMPLETE = "complete"
    REFUSED = "refused"  # nothing but an error was answered
    ABORTED = "aborted"  # the client left, or did not read on
    FAILED = "failed"  # the answer broke off, or was an error in a stream that had begun


class Office(Protocol):
    """What a receipt needs of the one who keeps them."""

    def begin(
        self, draft: Draft, tenant: str | None, content: bytes | None = None
    ) -> asyncio.Future[Sealed]:
        """Write a record; done once it is durable. Fails with `LedgerUnavailable`."""

    def key(self, tenant: str) -> bytes:
        """The key of a tenant's digests."""

    async def digests(
        self, replica: Replica, worker_id: str, *, with_ids: bool
    ) -> AnswerDigests | str:
        """What the worker says of an answer."""

    def seal(self, receipt: str, content: bytes) -> bytes:
        """`content`, encrypted."""

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` although nobody waits for it."""


class RequestReceipt:
    """One receipt under way. Exactly one of `complete`, `refused` and `leave` ends it."""

    def __init__(self, receipt: str, asking: Asking, office: Office) -> None:
        """Begin to write the `open` record."""
        self.id = receipt
        self.tier = asking.tier
        self.replica: Replica | None = None
        self.worker_id = ""  # the request id that the worker was told
        self._asking = asking
        self._office = office
        self._key = office.key(asking.tenant)
        self._notes: dict[str, Any] = {}
        self._writer: AnswerWriter | None = None
        self._is_left = False
        self._final_record: asyncio.Future[Sealed] | None = None
        self._begun_at, self._begun = time.time_ns(), time.perf_counter_ns()
        self._first_byte: int | None = None  # ns after the beginning
        draft = Draft("open", open_body(asking, self._key), receipt, self._begun_at // 1_000_000)
        self._opened = office.begin(draft, asking.tenant)

    def note(self, name: str, value: Any) -> None:
        """Say more in the final record: JSON without floats."""
        self._notes[name] = value

    async def opened(self) -> Sealed:
        """The `open` record, durable. Raises `LedgerUnavailable`."""
        return await _soon(self._opened)

    def writer(self, client: Writer, *, is_stream: bool) -> AnswerWriter:
        """What the answer is written to instead of `client`: it begins now."""
        body = self._asking.body
        choices = choices_asked(self._asking.path, {} if body is None else body.document)
        self._first_byte = time.perf_counter_ns() - self._begun
        self._writer = AnswerWriter(
            client,
            is_stream=is_stream,
            choices=choices,
            keeps_content=self._asking.mode == FULL,
        )
        return self._writer

    async def complete(self, last: bytes, status: int) -> bytes:
        """The end of the answer, which may be sent now: its record is durable.

        Raises `LedgerUnavailable`.
        """
        assert self._writer is not None
        digests = await self._digests() if status < 300 else "the worker refused the request"
        outcome = Ending.FAILED if self._writer.has_error else Ending.COMPLETE
        if status >= 400:
            outcome = Ending.REFUSED
        opened = await self.opened()
        end = self._writer.release(last)
        self._final_record = self._final(outcome, status, None, digests, opened)
        try:
            await _soon(self._final_record)
        except LedgerUnavailable:
            if self.tier.is_bitwise:
                raise
        return end

    async def refused(self, status: int, code: str) -> None:
        """Record that nothing but an error is answered. Raises `LedgerUnavailable`."""
        opened = await self.opened()
        if self._final_record is None:
            nothing = "nothing was answered"
            self._final_record = self._final(Ending.REFUSED, status, code, nothing, opened)
        await _soon(self._final_record)

    def leave(self, status: int, code: str, *, is_aborted: bool) -> None:
        """The answer broke off. Its record follows by itself."""
        if self._final_record is not None or self._is_left:
            return
        self._is_left = True
        outcome = Ending.ABORTED if is_aborted else Ending.FAILED
        self._office.later(self._leave(outcome, status, code))

    async def _leave(self, outcome: str, status: int, code: str) -> None:
        digests: AnswerDigests | str = "nothing was answered"
        if self._writer is not None:
            digests = await self._digests()
        opened: Sealed | None = None
        with contextlib.suppress(LedgerUnavailable):
            opened = await self._opened
        # Even if that failed it may be there: its failure was of the commit, or of the answer.
        with contextlib.suppress(LedgerUnavailable):
            await self._final(outcome, status, code, digests, opened)

    async def _digests(self) -> AnswerDigests | str:
        replica = self.replica
        if replica is None or replica.id.fingerprint is None:
            return "only strict workers keep digests"
        is_full = self._asking.mode == FULL
        return await self._office.digests(replica, self.worker_id, with_ids=is_full)

    def _final(
        self,
        outcome: str,
        status: int,
        code: str | None,
        digests: AnswerDigests | str,
        opened: Sealed | None,
    ) -> asyncio.Future[Sealed]:
        """Write the final record, which names the one that it follows."""
        body = self._final_body(outcome, status, code, digests)
        if opened is not None:
            body["opened"] = {"seq": opened.seq, "digest": opened.digest}
        content = self._content(digests) if outcome != Ending.REFUSED else None
        draft = Draft("final", body, self.id, time.time_ns() // 1_000_000)
        return self._office.begin(draft, self._asking.tenant, content)

    def _final_body(
        self, outcome: str, status: int, code: str | None, digests: AnswerDigests | str
    ) -> dict[str, Any]:
        replica, writer = self.replica, self._writer
        took = time.perf_counter_ns() - self._begun
        return {
            "outcome": outcome,
            "delivered": outcome in (Ending.COMPLETE, Ending.REFUSED),
            "status": status,
            "code": code,
            "tier": self.tier.value if replica is not None else None,
            "replica": None if replica is None else replica.id.name,
            "revision": None if replica is None else replica.id.revision,
            "pool": None if replica is None else replica.id.pool.value,
            "numerics": None if replica is None else numerics_body(replica.certified),
            "response": None
            if writer is None
            else {"bytes": writer.bytes, "digest": keyed(self._key, writer.digest())},
            "answer": answer_body(digests, self._key),
            "usage": usage_of(digests),
            "times": {
                "begun": self._begun_at // 1_000_000,
                "firstByteMicroseconds": _micros(self._first_byte),
                "totalMicroseconds": _micros(took),
            },
            "notes": self._notes,
        }

    def _content(self, digests: AnswerDigests | str) -> bytes | None:
        if self._asking.mode != FULL or self._writer is None:
            return None
        sequences = () if isinstance(digests, str) else digests.sequences
        text = {
            "request": base64.b64encode(self._asking.raw).decode(),
            "response": base64.b64encode(self._writer.content() or b"").decode(),
            "tokenIds": [list(one.ids or ()) for one in sequences],
        }
        return self._office.seal(self.id, orjson.dumps(text))


async def _soon(writing: asyncio.Future[Sealed]) -> Sealed:
    """The record, unless it takes too long. Raises `LedgerUnavailable`."""
    if writing.done():
        return writing.result()
    try:
        async with asyncio.timeout(_PATIENCE):
            # Whoever stops waiting does not stop the writing.
            return await asyncio.shield(writing)
    except TimeoutError as exc:
        raise LedgerUnavailable(f"a record was not durable within {_PATIENCE:g} s") from exc


def _micros(nanoseconds: int | None) -> int | None:
    return None if nanoseconds is None else nanoseconds // 1000

"""Performs: reads receipts out of the ledger for those whose they are, beside the event loop."""

import asyncio
import base64
from dataclasses import dataclass
from typing import Any

import orjson

from isobatch_gateway.receipts.chain import Finding, Sealed, Verifier, line
from isobatch_gateway.receipts.content import ContentUnreadable, decrypt
from isobatch_gateway.receipts.keeper import Keeper
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.signing import Trusted


@dataclass(frozen=True, slots=True)
class Content:
    """What `Full` keeps of one request."""

    request: bytes
    response: bytes
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Found:
    """One receipt: its records in order, and those that make others of its replica suspect."""

    receipt: str
    records: tuple[Sealed, ...]
    suspects: tuple[Sealed, ...]

    def body(self, kind: str) -> dict[str, Any] | None:
        """The body of its record of `kind`, if it has one."""
        for record in self.records:
            if record.kind == kind:
                found: dict[str, Any] = orjson.loads(record.payload)["body"]
                return found
        return None

    def document(self) -> bytes:
        """As the API gives it, and `verify` takes it."""
        lines = b",".join(line(r.payload, r.signature) for r in (*self.records, *self.suspects))
        said = b"true" if self.suspects else b"false"
        return b'{"receipt":"%b","suspect":%b,"records":[%b]}' % (
            self.receipt.encode(),
            said,
            lines,
        )


async def find(ledger: Ledger, receipt: str, tenant: str) -> Found | None:
    """The receipt, if it is of `tenant`. Raises `StoreFailed`."""
    return await asyncio.to_thread(_find, ledger, receipt, tenant)


async def listed(ledger: Ledger, since: int, tenant: str, limit: int) -> list[str]:
    """Ids of the tenant's receipts that ended at or after `since` (ms). Raises `StoreFailed`."""
    return await asyncio.to_thread(ledger.store.receipts, since, tenant, limit)


def _find(ledger: Ledger, receipt: str, tenant: str) -> Found | None:
    store = ledger.store
    if store.tenant(receipt) != tenant:
        return None
    records = tuple(store.of_receipt(receipt))
    found = Found(receipt, records, ())
    final = found.body("final")
    if final is None or final.get("replica") is None:
        return found
    chains = {record.chain for record in records}
    suspects = [r for chain in chains for r in store.kind(chain, "suspect")]
    return Found(receipt, records, tuple(r for r in suspects if _covers(r, final)))


def _covers(record: Sealed, final: dict[str, Any]) -> bool:
    """Whether the `suspect` record is about what the final one says was served."""
    body = orjson.loads(record.payload)["body"]
    is_same = all(body.get(name) == final.get(name) for name in ("replica", "revision"))
    begun = final["times"]["begun"]
    return is_same and body["since_ms"] <= begun <= body["until_ms"]


async def content_of(keeper: Keeper, ledger: Ledger, receipt: str) -> Content | None:
    """What is kept of the content. Raises `StoreFailed` or `ContentUnreadable`."""
    sealed = await asyncio.to_thread(ledger.store.content, receipt)
    if sealed is None:
        return None
    try:
        kept = orjson.loads(decrypt(keeper.contents, receipt, sealed))
        request, response = (base64.b64decode(kept[name]) for name in ("request", "response"))
    except (ValueError, KeyError) as exc:
        raise ContentUnreadable("the content is damaged") from exc
    return Content(request, response, kept["tokenIds"])


def check(found: Found, trusted: Trusted) -> list[Finding]:
    """What is wrong with the records of one receipt, out of their chain."""
    verifier = Verifier(trusted, is_excerpt=True)
    for number, record in enumerate((*found.records, *found.suspects), 1):
        verifier.take(number, line(record.payload, record.signature))
    return verifier.end()

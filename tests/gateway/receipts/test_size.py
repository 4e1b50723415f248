"""A ledger grows for years: it still opens at once, and is verified in a time that one can wait."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from isobatch_gateway.receipts.chain import START, Draft, Head, Sealed, line, seal, verify
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.signing import Signer, Trusted
from isobatch_gateway.receipts.store import Row, Store

from tests.benchmarks.machine import slowness

SIGNER = Signer.of(b"\1" * 32)
TRUSTED = Trusted({SIGNER.id: SIGNER.public})
START_SECONDS = 5.0
RECEIPTS_PER_SECOND = 5000
_PAGE = 5000

# As large as those of real requests.
_OPEN: dict[str, Any] = {
    "requestId": "req-" + "0" * 32,
    "path": "/v1/chat/completions",
    "tenant": "team-a",
    "keyId": "ci",
    "tier": "strict",
    "mode": "Digest",
    "model": "smollm2",
    "service": "chat",
    "requiredFingerprint": None,
    "seed": "7",
    "request": {"bytes": 412, "exact": "hmac-sha256:" + "a" * 64, "canonical": "b" * 64},
    "sampling": {"temperature": "0.7", "max_tokens": "64", "stream": True},
    "content": [],
}
_FINAL: dict[str, Any] = {
    "outcome": "complete",
    "delivered": True,
    "status": 200,
    "code": None,
    "numerics": {
        "fingerprint": "sha256:" + "c" * 64,
        "modelDigest": "sha256:" + "d" * 64,
        "device": "cpu",
        "versions": {"isobatch": "0.1.0", "torch": "2.11.0", "vllm": "0.26.0"},
    },
    "response": {"bytes": 9120, "digest": "hmac-sha256:" + "e" * 64},
    "answer": {"sequences": [{"index": 0, "tokens": 64, "tokenIds": "f" * 76, "logprobs": None}]},
    "usage": {"promptTokens": 30, "completionTokens": 64},
    "notes": {},
}


def chain(receipts: int) -> Iterator[Sealed]:
    """The records of `receipts` receipts."""
    head = START
    for number in range(receipts):
        for kind, body in (("open", _OPEN), ("final", _FINAL)):
            record = seal(Draft(kind, body, f"rcpt-{number:032x}", number), "gw", head, SIGNER)
            head = Head(record.seq, record.digest)
            yield record


def fill(store: Store, receipts: int) -> None:
    rows: list[Row] = []
    for record in chain(receipts):
        rows.append(Row(record, "team-a"))
        if len(rows) == _PAGE:
            store.write(rows)
            rows = []
    if rows:
        store.write(rows)


@pytest.mark.parametrize(
    "receipts", [pytest.param(20_000, id="sample"), pytest.param(1_000_000, marks=pytest.mark.full)]
)
def test_a_large_ledger_opens_at_once(
    ledger_url: str, receipts: int, report_figure: Callable[[str, object], None]
) -> None:
    store = Store(ledger_url)
    fill(store, receipts)
    store.close()

    begun = time.monotonic()
    ledger = Ledger(Store(ledger_url), "gw", (SIGNER,))
    ledger.start()
    took = time.monotonic() - begun
    ledger.close()

    where = "PostgreSQL" if "://" in ledger_url else "SQLite"
    report_figure(f"start with {receipts} receipts in {where}", f"{took:.2f} s")
    assert took <= START_SECONDS


def test_receipts_are_verified_by_thousands_a_second(
    report_figure: Callable[[str, object], None], tmp_path: Path
) -> None:
    count = 10_000
    export = tmp_path / "all.jsonl"
    export.write_bytes(b"".join(line(r.payload, r.signature) + b"\n" for r in chain(count)))

    begun = time.process_time()
    with export.open("rb") as lines:
        verifier = verify(lines, TRUSTED)
    took = time.process_time() - begun

    assert verifier.findings == []
    assert verifier.receipts == count
    report_figure("receipts verified a second on one core", round(count / took))
    assert count / took * slowness() >= RECEIPTS_PER_SECOND

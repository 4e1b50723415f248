"""A gateway that keeps receipts in a file of its test, and what it has kept."""

import json
from pathlib import Path
from typing import Any

from isobatch_gateway.receipts.chain import line, verify
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.signing import Trusted
from isobatch_gateway.settings import ReceiptSettings

from tests.gateway.fakes import FakeWorker, Gateway, Stage

STRICTLY = {"x-consistency-tier": "strict"}


def kept(folder: Path) -> ReceiptSettings:
    return ReceiptSettings(str(folder / "receipts.db"), folder / "keys", "gw")


def ledger_of(gateway: Gateway) -> Ledger:
    assert gateway.runtime.ledger is not None
    return gateway.runtime.ledger


def records(gateway: Gateway, kind: str = "") -> list[dict[str, Any]]:
    """The records of the chain, which is whole."""
    walked = list(ledger_of(gateway).store.walk("gw"))
    assert gateway.runtime.receipts is not None
    trusted = Trusted.read(gateway.runtime.receipts.public_keys)
    found = verify([line(r.payload, r.signature) for r in walked], trusted)
    assert [f for f in found.findings if "unsigned" not in f.problem] == []
    documents = [json.loads(record.payload) for record in walked]
    return [d for d in documents if not kind or d["kind"] == kind]


async def pair(stage: Stage, **fields: Any) -> tuple[Gateway, FakeWorker, FakeWorker]:
    return await stage.pair(receipts=kept(stage.folder), **fields)

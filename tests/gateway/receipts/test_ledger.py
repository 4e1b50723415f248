"""The writer of a chain: what start-up closes, and how a key is handed over."""

from pathlib import Path

from isobatch_gateway.receipts.chain import Draft, line, verify
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.signing import Signer, Trusted
from isobatch_gateway.receipts.store import Store

OLD, NEW = Signer.of(b"\1" * 32), Signer.of(b"\2" * 32)
RECEIPT = "rcpt-" + "0" * 32


async def test_a_receipt_left_open_is_closed_as_interrupted_at_the_next_start(
    tmp_path: Path,
) -> None:
    first = Ledger(Store(str(tmp_path / "receipts.db")), "gw", (OLD,))
    first.start()
    await first.begin(Draft("open", {}, RECEIPT, 1), "tenant")
    first.close()

    second = Ledger(Store(str(tmp_path / "receipts.db")), "gw", (OLD, NEW))
    closed = second.start()
    records = list(second.store.walk("gw"))
    second.close()

    assert closed == 1
    assert [record.kind for record in records] == ["key", "open", "key", "final"]
    assert b'"outcome":"interrupted"' in records[-1].payload
    lines = [line(record.payload, record.signature) for record in records]
    trusted = Trusted({OLD.id: OLD.public, NEW.id: NEW.public})
    assert verify(lines, trusted).findings == []
    # The hand-over is signed by the key before.
    assert trusted.is_signed(OLD.id, records[2].payload, records[2].signature)

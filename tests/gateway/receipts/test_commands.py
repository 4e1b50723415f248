"""`isobatch receipt`, as an auditor uses it: beside a gateway, and with files alone."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from isobatch_contracts.resource import Receipts
from isobatch_gateway.receipts.commands import receipt as command

from tests.gateway.fakes import CHAT, HELLO, Gateway, Stage
from tests.gateway.receipts.kept import STRICTLY, pair, records

Captured = pytest.CaptureFixture[str]


async def run(gateway: Gateway, *arguments: object) -> int:
    verb, *rest = map(str, arguments)
    return await asyncio.to_thread(command, [verb, "--gateway", gateway.url, *rest])


async def answered(gateway: Gateway, count: int = 1) -> list[str]:
    answers = [await gateway.chat(STRICTLY) for _ in range(count)]
    return [answer.headers["x-receipt-id"] for answer in answers]


async def exported(stage: Stage, gateway: Gateway, name: str = "all.jsonl") -> Path:
    out = stage.folder / name
    keys = stage.folder / "keys"
    ledger = stage.folder / "receipts.db"
    options = ("--ledger", ledger, "--receipt-keys", keys, "--out", out)
    assert await run(gateway, "export", *options) == 0
    return out


async def test_get_shows_a_receipt_and_keeps_it(stage: Stage, capsys: Captured) -> None:
    gateway, _, _ = await pair(stage)
    (receipt,) = await answered(gateway)
    kept = stage.folder / "receipt.json"

    assert await run(gateway, "get", receipt, "--out", kept) == 0

    shown = capsys.readouterr().out
    assert receipt in shown
    assert "numerics.fingerprint" in shown
    keys = stage.folder / "keys" / "public-keys.json"
    assert await run(gateway, "verify", kept, "--public-keys", keys) == 0


async def test_an_unknown_receipt_is_told_in_the_gateways_words(
    stage: Stage, capsys: Captured
) -> None:
    gateway, _, _ = await pair(stage)

    assert await run(gateway, "get", "rcpt-" + "0" * 32) == 1

    assert "no such receipt" in capsys.readouterr().err


async def test_an_export_verifies_with_its_public_keys_alone(
    stage: Stage, capsys: Captured
) -> None:
    gateway, _, _ = await pair(stage)
    await answered(gateway, 3)
    out = await exported(stage, gateway)

    assert await run(gateway, "verify", out, "--public-keys", stage.folder / "all.keys.json") == 0

    assert "verified: 7 records, 3 receipts" in capsys.readouterr().out


@pytest.mark.parametrize("pinned_by", ["checkpoint", "receipt"])
async def test_a_cut_tail_is_found_by_what_was_kept_elsewhere(
    stage: Stage, capsys: Captured, pinned_by: str
) -> None:
    gateway, _, _ = await pair(stage)
    *_, last = await answered(gateway, 3)
    out, keys = await exported(stage, gateway), stage.folder / "all.keys.json"
    kept = stage.folder / "all.checkpoint.jsonl"
    if pinned_by == "receipt":
        kept = stage.folder / "receipt.json"
        assert await run(gateway, "get", last, "--out", kept) == 0
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:5]))

    assert await run(gateway, "verify", out, "--public-keys", keys) == 0
    assert await run(gateway, "verify", out, "--public-keys", keys, "--checkpoint", kept) == 1

    assert "record 7 of chain gw" in capsys.readouterr().out


async def test_a_changed_receipt_is_told_with_its_record(stage: Stage, capsys: Captured) -> None:
    gateway, _, _ = await pair(stage)
    (receipt,) = await answered(gateway)
    kept = stage.folder / "receipt.json"
    assert await run(gateway, "get", receipt, "--out", kept) == 0
    kept.write_bytes(kept.read_bytes().replace(b'"status":200', b'"status":201'))
    keys = stage.folder / "keys" / "public-keys.json"

    capsys.readouterr()

    assert await run(gateway, "verify", kept, "--public-keys", keys, "-o", "json") == 1

    problems = json.loads(capsys.readouterr().out)["problems"]
    assert (3, "does not have the signature of its key") in {
        (problem["seq"], problem["problem"]) for problem in problems
    }


async def test_replay_takes_the_request_from_a_file(stage: Stage, capsys: Captured) -> None:
    gateway, _, _ = await pair(stage)
    request = stage.folder / "request.json"
    request.write_text(json.dumps(HELLO))
    headers = STRICTLY | {"content-type": "application/json"}
    got = await gateway.http.post(CHAT, content=request.read_bytes(), headers=headers)
    receipt = got.headers["x-receipt-id"]

    assert await run(gateway, "replay", receipt, "--request", request) == 0
    assert "Reproduced" in capsys.readouterr().out
    assert await run(gateway, "replay", receipt) == 1
    assert "NotReplayable" in capsys.readouterr().out


@pytest.mark.parametrize("sample", [None, 2])
async def test_replay_in_bulk_counts_the_verdicts(
    stage: Stage, capsys: Captured, sample: int | None
) -> None:
    gateway, strict, _ = await pair(stage, table={"receipts": Receipts(strict="Full")})
    await answered(gateway, 3)
    options: list[Any] = [] if sample is None else ["--sample", sample]

    assert await run(gateway, "replay", "--since", "1h", *options) == 0
    assert f"{sample or 3} replayed: {sample or 3} Reproduced" in capsys.readouterr().out
    strict.fault = 1
    assert await run(gateway, "replay", "--since", "1h", *options) == 1

    assert "Differs" in capsys.readouterr().out
    assert len(records(gateway, "replay")) == 2 * (sample or 3)


async def test_bulk_takes_requests_from_a_file(stage: Stage, capsys: Captured) -> None:
    gateway, _, _ = await pair(stage)
    receipts = await answered(gateway, 2)
    requests = stage.folder / "requests.jsonl"
    lines = [json.dumps({"receipt": receipt, "request": HELLO}) for receipt in receipts]
    requests.write_text("\n".join(lines))

    assert await run(gateway, "replay", "--since", "1h", "--requests", requests) == 0

    assert "2 replayed: 2 Reproduced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "nothing.jsonl"], "neither a file nor the id"),
        (["verify", "pyproject.toml"], "--public-keys FILE is needed"),
        (["verify", "pyproject.toml", "--public-keys", "pyproject.toml"], "no public key file"),
        (["export", "--ledger", "nothing.db", "--out", "x.jsonl"], "there is no ledger"),
        (["replay"], "exactly one of both"),
        (["get", "rcpt-0", "--gateway", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], said: str, capsys: Captured) -> None:
    assert command(arguments) == 1

    assert said in capsys.readouterr().err

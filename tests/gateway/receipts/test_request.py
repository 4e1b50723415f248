"""A gateway that keeps receipts: what each request leaves in the ledger, and when."""

import asyncio
from typing import Any, Literal

import httpx
import pytest
from isobatch_contracts.resource import Receipts, Tiers
from isobatch_contracts.tiers import Tier

from tests.gateway.fakes import (
    CHAT,
    FINGERPRINT,
    HELLO,
    Exchange,
    Gateway,
    Stage,
    begin_then_die,
    begin_then_hang,
    event,
    refuse,
    until,
)
from tests.gateway.receipts.kept import STRICTLY, ledger_of, pair, records

CANARY = "the-canary-sings-at-noon"


async def final_of(gateway: Gateway, count: int = 1) -> dict[str, Any]:
    """The body of the last final record, once there are `count`."""
    await until(lambda: len(records(gateway, "final")) == count)
    body: dict[str, Any] = records(gateway, "final")[-1]["body"]
    return body


async def finish(exchange: Exchange) -> None:
    """A stream as vLLM's: the last event of content says that it is one."""
    await exchange.begin_stream()
    await exchange.chunk(event(0))
    await exchange.chunk(
        b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    )
    await exchange.chunk(b'data: {"choices":[],"usage":{}}\n\n')
    await exchange.worker.go.wait()
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.chunk(b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_strict_answer_has_a_receipt_that_says_what_fixed_it(
    stage: Stage, stream: bool
) -> None:
    gateway, _, _ = await pair(stage)

    got = await gateway.chat(STRICTLY, stream=stream, max_tokens=5, temperature=0.5, seed=7)

    opened, final = records(gateway, "open")[0], records(gateway, "final")[0]
    assert opened["receipt"] == final["receipt"] == got.headers["x-receipt-id"]
    assert opened["body"]["sampling"] == {
        "temperature": "0.5",
        "max_tokens": "5",
        "stream": stream,
    }
    assert opened["body"]["seed"] == "7"
    body = final["body"]
    assert (body["outcome"], body["delivered"], body["status"]) == ("complete", True, 200)
    assert (body["tier"], body["pool"], body["replica"]) == ("strict", "strict", "r0")
    assert body["numerics"]["fingerprint"] == FINGERPRINT
    assert body["response"]["bytes"] == len(got.content)
    assert body["answer"]["sequences"][0]["tokens"] == 5
    assert body["usage"] == {"promptTokens": 3, "completionTokens": 5}
    assert body["opened"]["seq"] == opened["seq"]


@pytest.mark.parametrize("fields", [{"stream": True}, {}])
@pytest.mark.parametrize(("policy", "count"), [("Off", 0), ("Digest", 1), ("Full", 1)])
async def test_standard_has_a_receipt_if_the_policy_says_so(
    stage: Stage, fields: dict[str, Any], policy: Literal["Off", "Digest", "Full"], count: int
) -> None:
    gateway, _, _ = await pair(stage, table={"receipts": Receipts(standard=policy)})

    got = await gateway.chat(**fields)

    finals = records(gateway, "final")
    assert [f["receipt"] for f in finals] == [got.headers.get("x-receipt-id")] * count
    assert all("missing" in final["body"]["answer"] for final in finals)


async def test_the_end_of_a_stream_waits_for_its_record(stage: Stage) -> None:
    gateway, strict, _ = await pair(stage)
    strict.reply = finish
    seen: list[bytes] = []

    async def read() -> None:
        request = HELLO | {"stream": True}
        async with gateway.http.stream("POST", CHAT, json=request, headers=STRICTLY) as got:
            async for chunk in got.aiter_bytes():
                seen.append(chunk)  # noqa: PERF401  # looked at before the last one

    reading = asyncio.create_task(read())
    await until(lambda: seen)
    assert records(gateway, "open")
    # The event that finishes the answer has come from the worker by now, and goes no further.
    await until(lambda: next(iter(_relays(gateway))).bytes_out > 100)
    assert b"".join(seen) == event(0)
    strict.go.set()
    await reading

    assert b"".join(seen).endswith(b"data: [DONE]\n\n")
    assert records(gateway, "final")[0]["body"]["response"]["bytes"] == len(b"".join(seen))


def _relays(gateway: Gateway) -> set[Any]:
    return {relay for r in gateway.runtime.fleet.replicas() for relay in r.answering}


async def test_no_byte_goes_out_before_the_request_is_recorded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, _, _ = await pair(stage)
    store = ledger_of(gateway).store
    write, written = store.write, list[str]()

    def slow(rows: Any) -> None:
        write(rows)
        written.extend(row.record.kind for row in rows)

    monkeypatch.setattr(store, "write", slow)
    async with gateway.http.stream(
        "POST", CHAT, json=HELLO | {"stream": True}, headers=STRICTLY
    ) as got:
        assert "open" in written
        await got.aread()
    assert written == ["open", "final"]


@pytest.mark.parametrize(
    ("headers", "fields", "code"),
    [
        pytest.param(STRICTLY, {"logprob_token_ids": [1]}, "logprob_token_ids", id="not-strict"),
        pytest.param(STRICTLY, {"model": "other"}, "model_not_found", id="no-model"),
        pytest.param({}, {"consistency_tier": "verified"}, "tier_not_allowed", id="tier"),
        pytest.param(
            STRICTLY | {"x-require-fingerprint": "sha256:" + "e" * 64},
            {},
            "fingerprint_unavailable",
            id="fingerprint",
        ),
    ],
)
async def test_a_refused_request_has_a_receipt(
    stage: Stage, headers: dict[str, str], fields: dict[str, Any], code: str
) -> None:
    tiers = Tiers(allowed=(Tier.STRICT, Tier.STANDARD))
    gateway, _, _ = await pair(stage, table={"tiers": tiers})

    got = await gateway.chat(headers, **fields)

    final = records(gateway, "final")[0]
    assert got.json()["error"]["code"] == code
    assert final["receipt"] == got.headers["x-receipt-id"]
    assert (final["body"]["outcome"], final["body"]["code"]) == ("refused", code)
    assert final["body"]["status"] == got.status_code


async def test_a_body_that_cannot_be_read_is_recorded_too(stage: Stage) -> None:
    gateway, _, _ = await pair(stage)
    json_type = {"content-type": "application/json"}

    got = await gateway.http.post(CHAT, content=b'{"half', headers=STRICTLY | json_type)

    assert got.status_code == 400
    assert records(gateway, "open")[0]["body"]["request"]["bytes"] == 6
    assert records(gateway, "final")[0]["body"]["outcome"] == "refused"


async def test_a_refusal_of_the_worker_is_recorded_as_one(stage: Stage) -> None:
    gateway, strict, _ = await pair(stage)
    strict.reply = refuse

    got = await gateway.chat(STRICTLY)

    assert got.status_code == 400
    body = records(gateway, "final")[0]["body"]
    assert (body["outcome"], body["status"], body["replica"]) == ("refused", 400, "r0")
    assert body["response"]["bytes"] == len(got.content)


async def test_an_answer_that_broke_off_is_recorded_with_what_was_sent(stage: Stage) -> None:
    gateway, strict, _ = await pair(stage)
    strict.reply = begin_then_die
    strict.go.set()

    await gateway.chat(STRICTLY, stream=True)

    body = await final_of(gateway)
    assert (body["outcome"], body["delivered"], body["code"]) == (
        "failed",
        False,
        "upstream_failed",
    )
    assert body["response"]["bytes"] == len(event(0))


async def test_an_answer_whose_client_left_is_recorded_as_aborted(stage: Stage) -> None:
    gateway, strict, _ = await pair(stage)
    strict.reply = begin_then_hang

    with pytest.raises(httpx.ReadTimeout):
        await gateway.http.post(CHAT, json=HELLO | {"stream": True}, headers=STRICTLY, timeout=0.3)

    body = await final_of(gateway)
    assert (body["outcome"], body["delivered"]) == ("aborted", False)
    assert body["response"]["bytes"] == len(event(0))
    assert body["answer"]["sequences"][0]["tokens"] == 3


async def test_without_a_ledger_strict_is_refused_and_standard_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, strict, _ = await pair(stage, table={"receipts": Receipts(standard="Digest")})
    store, is_full = ledger_of(gateway).store, [True]
    write = store.write

    def refuse_to(rows: Any) -> None:
        if is_full[0]:
            raise OSError("disk full")
        write(rows)

    monkeypatch.setattr(store, "write", refuse_to)
    first, second = await gateway.chat(STRICTLY), await gateway.chat(STRICTLY, stream=True)
    standard = await gateway.chat(stream=True)
    asked = len(strict.seen)
    is_full[0] = False
    again = await gateway.chat(STRICTLY)

    assert [got.status_code for got in (first, second)] == [503, 503]
    assert first.json()["error"]["code"] == "strict_unavailable"
    assert "receipt" in first.json()["error"]["message"]
    assert asked == 1  # once the ledger is known to fail no work is begun
    assert standard.status_code == 200
    assert standard.content.endswith(b"data: [DONE]\n\n")
    assert again.status_code == 200
    assert again.headers["x-receipt-id"] == records(gateway, "final")[-1]["receipt"]


async def test_a_stream_that_cannot_be_recorded_ends_in_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, strict, _ = await pair(stage)
    strict.reply = finish
    store = ledger_of(gateway).store
    write = store.write

    def refuse_the_end(rows: Any) -> None:
        if any(row.record.kind == "final" for row in rows):
            raise OSError("disk full")
        write(rows)

    monkeypatch.setattr(store, "write", refuse_the_end)
    asking = asyncio.create_task(gateway.chat(STRICTLY, stream=True))
    await until(lambda: records(gateway, "open") and _relays(gateway))
    strict.go.set()
    got = await asking

    assert got.content.startswith(event(0) + b"data: {")
    assert b'"code":"strict_unavailable"' in got.content
    assert got.content.endswith(b"data: [DONE]\n\n")
    assert records(gateway, "final") == []


async def test_a_gateway_that_cannot_open_its_ledger_serves_standard(stage: Stage) -> None:
    (stage.folder / "receipts.db").mkdir()
    gateway, _, _ = await pair(stage)

    strict, standard = await gateway.chat(STRICTLY), await gateway.chat()

    assert (strict.status_code, standard.status_code) == (503, 200)


@pytest.mark.parametrize("mode", ["Digest", "Full"])
async def test_nothing_of_the_content_is_in_the_ledger(
    stage: Stage, mode: Literal["Digest", "Full"]
) -> None:
    gateway, _, _ = await pair(stage, table={"receipts": Receipts(strict=mode)})
    message = {"role": "user", "content": CANARY}

    got = await gateway.chat(STRICTLY, messages=[message], stop=[CANARY], user=CANARY)

    assert ledger_of(gateway).store.content(got.headers["x-receipt-id"]) or mode == "Digest"
    files = [path for path in stage.folder.rglob("*") if path.is_file()]
    assert any(path.name == "receipts.db-wal" for path in files)
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []

"""Receipts over HTTP: whose they are, and what a replay shows."""

import json
from datetime import UTC, datetime
from typing import Any, Literal

import httpx
import pytest
from isobatch_contracts.resource import Receipts
from isobatch_contracts.routing_table import Endpoint, Revision
from isobatch_gateway.keys import Key, hash_token

from tests.gateway.fakes import (
    CHAT,
    FINGERPRINT,
    HELLO,
    OTHER_FINGERPRINT,
    STRICT,
    FakeWorker,
    Gateway,
    Stage,
    begin_then_hang,
    until,
)
from tests.gateway.receipts.kept import STRICTLY, kept, pair, records

RECEIPTS = "/isobatch/v1/receipts"
Mode = Literal["Digest", "Full"]


async def replay(gateway: Gateway, receipt: str, request: bytes = b"") -> dict[str, Any]:
    got = await gateway.http.post(f"{RECEIPTS}/{receipt}/replay", content=request)
    assert got.status_code == 200, got.text
    view: dict[str, Any] = got.json()
    return view


async def answered(gateway: Gateway, **fields: Any) -> tuple[str, bytes]:
    """A strict answer's receipt, and the request as it was sent."""
    request = json.dumps(HELLO | fields).encode()
    headers = STRICTLY | {"content-type": "application/json"}
    got = await gateway.http.post(CHAT, content=request, headers=headers)
    assert got.status_code == 200
    return got.headers["x-receipt-id"], request


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"temperature": 0.7}])
async def test_an_answer_is_reproduced_from_its_request(
    stage: Stage, fields: dict[str, Any]
) -> None:
    gateway, strict, _ = await pair(stage)
    receipt, request = await answered(gateway, **fields)

    view = await replay(gateway, receipt, request)

    assert (view["verdict"], view["replica"]) == ("Reproduced", "strict/rev1/r0")
    assert strict.seen[0].body["seed"] == strict.seen[1].body["seed"]
    assert not strict.seen[1].body.get("stream")
    (record,) = records(gateway, "replay")
    assert record["receipt"] == receipt
    assert record["seq"] == view["record"]["seq"]
    assert record["body"]["of"]["seq"] == records(gateway, "final")[0]["seq"]


async def test_a_request_written_another_way_is_the_same_one(stage: Stage) -> None:
    gateway, _, _ = await pair(stage)
    receipt, request = await answered(gateway, temperature=0.5)

    other = json.dumps(json.loads(request), indent=3, sort_keys=True).encode()
    view = await replay(gateway, receipt, other.replace(b"0.5", b"5e-1"))

    assert view["verdict"] == "Reproduced"


@pytest.mark.parametrize("mode", ["Digest", "Full"])
async def test_other_bits_are_told(stage: Stage, mode: Mode) -> None:
    gateway, strict, _ = await pair(stage, table={"receipts": Receipts(strict=mode)})
    receipt, request = await answered(gateway)
    strict.fault = 1

    view = await replay(gateway, receipt, request if mode == "Digest" else b"")

    assert view["verdict"] == "Differs"
    assert "token ids" in view["reason"]
    assert (view["firstDifference"] is not None) == (mode == "Full")


async def test_full_needs_no_request(stage: Stage) -> None:
    gateway, _, _ = await pair(stage, table={"receipts": Receipts(strict="Full")})
    receipt, _ = await answered(gateway)

    assert (await replay(gateway, receipt))["verdict"] == "Reproduced"


async def test_the_other_replica_is_asked_where_there_is_one(stage: Stage) -> None:
    workers = [await stage.worker(STRICT, name=f"r{n}") for n in range(2)]
    gateway = await stage.gateway(stage.table(*workers), receipts=kept(stage.folder))
    await until(lambda: gateway.ready() == 2)
    receipt, request = await answered(gateway)
    first = records(gateway, "final")[0]["body"]["replica"]

    view = await replay(gateway, receipt, request)

    assert view["verdict"] == "Reproduced"
    assert {f"strict/rev1/{first}", view["replica"]} == {"strict/rev1/r0", "strict/rev1/r1"}


async def test_an_aborted_answer_is_reproduced_as_far_as_it_was_made(stage: Stage) -> None:
    gateway, strict, _ = await pair(stage)
    reply, strict.reply = strict.reply, begin_then_hang
    request = json.dumps(HELLO | {"stream": True, "max_tokens": 40}).encode()
    headers = STRICTLY | {"content-type": "application/json"}
    with pytest.raises(httpx.ReadTimeout):
        await gateway.http.post(CHAT, content=request, headers=headers, timeout=0.3)
    await until(lambda: records(gateway, "final"))
    strict.reply = reply
    (final,) = records(gateway, "final")

    view = await replay(gateway, final["receipt"], request)

    assert final["body"]["outcome"] == "aborted"
    assert view["verdict"] == "Reproduced"
    assert strict.seen[1].body["max_tokens"] == final["body"]["answer"]["sequences"][0]["tokens"]


@pytest.mark.parametrize(
    ("request_of", "reason"),
    [
        pytest.param(lambda _: b"", "only digests", id="none"),
        pytest.param(lambda raw: raw.replace(b"hello", b"hallo"), "its digest differs", id="other"),
        pytest.param(lambda _: b"{", "no request", id="broken"),
    ],
)
async def test_digests_alone_need_the_request(stage: Stage, request_of: Any, reason: str) -> None:
    gateway, strict, _ = await pair(stage)
    receipt, request = await answered(gateway)

    view = await replay(gateway, receipt, request_of(request))

    assert view["verdict"] == "NotReplayable"
    assert reason in view["reason"]
    assert len(strict.seen) == 1
    assert records(gateway, "replay") == []


async def test_a_fingerprint_that_is_gone_is_told_with_what_changed(stage: Stage) -> None:
    gateway, strict, _ = await pair(stage)
    receipt, request = await answered(gateway)
    strict.fingerprint = OTHER_FINGERPRINT
    endpoint = Endpoint(name=strict.name, url=strict.url)
    revision = Revision(
        name="rev2",
        pool=STRICT,
        weight=100,
        fingerprint=OTHER_FINGERPRINT,
        endpoints=(endpoint,),
    )
    stage.write(stage.table(revisions=(revision,)), "table0.json")
    await until(lambda: any(r.id.revision == "rev2" and r.is_eligible for r in _strict(gateway)))

    view = await replay(gateway, receipt, request)

    assert view["verdict"] == "Unavailable"
    assert FINGERPRINT in view["reason"]
    assert "schedules, trees or arguments" in view["reason"]
    assert records(gateway, "replay")[0]["body"]["verdict"] == "Unavailable"


def _strict(gateway: Gateway) -> list[Any]:
    return [r for r in gateway.runtime.fleet.replicas() if r.id.pool is STRICT]


async def test_a_refused_request_cannot_be_replayed(stage: Stage) -> None:
    gateway, _, _ = await pair(stage)
    got = await gateway.chat(STRICTLY, logprob_token_ids=[1])

    view = await replay(gateway, got.headers["x-receipt-id"], json.dumps(HELLO).encode())

    assert view["verdict"] == "NotReplayable"
    assert "nothing was answered" in view["reason"]


async def test_another_tenant_finds_nothing(stage: Stage) -> None:
    def key(name: str) -> Key:
        made = datetime.now(UTC)
        return Key(id=name, tenant=name, hash=hash_token(f"isk-{name}"), created=made)

    gateway, _, _ = await pair(stage, keys=[key("mine"), key("theirs")])
    mine, theirs = ({"authorization": f"Bearer isk-{name}"} for name in ("mine", "theirs"))
    receipt = (await gateway.chat(STRICTLY | mine)).headers["x-receipt-id"]
    paths = [("GET", ""), ("GET", "/verify"), ("POST", "/replay")]

    async def ask(headers: dict[str, str]) -> list[int]:
        return [
            (
                await gateway.http.request(method, f"{RECEIPTS}/{receipt}{path}", headers=headers)
            ).status_code
            for method, path in paths
        ]

    assert await ask(mine) == [200, 200, 200]
    assert await ask(theirs) == [404, 404, 404]
    assert await ask({}) == [401, 401, 401]
    listed = [(await gateway.http.get(RECEIPTS, headers=h)).json() for h in (mine, theirs)]
    assert listed == [{"receipts": [receipt]}, {"receipts": []}]


async def test_a_receipt_verifies_and_says_when_it_is_suspect(stage: Stage) -> None:
    gateway, _, _ = await pair(stage)
    receipt, _ = await answered(gateway)
    before = (await gateway.http.get(f"{RECEIPTS}/{receipt}/verify")).json()
    body = {"replica": "r0", "revision": "rev1", "since_ms": 0, "until_ms": 1 << 50}
    assert gateway.runtime.ledger is not None
    await gateway.runtime.ledger.append("suspect", body)

    after = (await gateway.http.get(f"{RECEIPTS}/{receipt}/verify")).json()
    document = (await gateway.http.get(f"{RECEIPTS}/{receipt}")).json()

    assert (before["verified"], before["suspect"]) == (True, False)
    assert (after["verified"], after["suspect"]) == (True, True)
    assert document["suspect"]
    assert [r["record"]["kind"] for r in document["records"]] == ["open", "final", "suspect"]


async def test_a_wrong_question_is_refused_in_our_words(stage: Stage) -> None:
    gateway, _, _ = await pair(stage)

    got = await gateway.http.get(RECEIPTS, params={"since": "yesterday"})

    assert got.status_code == 400
    assert got.json()["error"]["code"] == "since"
    assert "yesterday" not in got.text


async def test_a_gateway_without_receipts_says_so(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()

    got = await gateway.http.get(f"{RECEIPTS}/rcpt-{'0' * 32}")

    assert got.status_code == 404
    assert "keeps no receipts" in got.json()["error"]["message"]


def test_fake_workers_differ_by_their_fault() -> None:
    seen = type("Seen", (), {"body": {"seed": 1}})()

    assert FakeWorker().tokens(seen) != FakeWorker(fault=1).tokens(seen)

"""A whole gateway over real sockets: what a request becomes and what its answer says."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from isobatch_contracts.resource import StandardFallback, TierLimits, Tiers
from isobatch_contracts.routing_table import Endpoint, Revision
from isobatch_contracts.tiers import Tier
from isobatch_gateway.keys import Key, hash_token

from tests.gateway.fakes import (
    CHAT,
    FINGERPRINT,
    HELLO,
    OTHER_FINGERPRINT,
    STRICT,
    THROUGHPUT,
    Exchange,
    Stage,
    event,
    hang,
    refuse,
    until,
)

TOKEN = "isk-test"


def key(**fields: Any) -> Key:
    defaults = {"id": "k1", "tenant": "t1", "hash": hash_token(TOKEN), "created": datetime.now(UTC)}
    return Key.model_validate(defaults | fields)


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_a_standard_answer_says_how_it_was_served(stage: Stage) -> None:
    gateway, strict, throughput = await stage.pair()

    got = await gateway.chat({"x-request-id": "mine-1"})

    assert got.status_code == 200
    assert got.json()["choices"][0]["message"]["content"] == "hi"
    assert got.headers["x-consistency-tier"] == "standard"
    assert got.headers["x-served-by"] == "throughput/rev1/r0"
    assert got.headers["x-request-id"] == "mine-1"
    assert "x-seed" not in got.headers
    assert "x-numerics-fingerprint" not in got.headers
    assert len(throughput.seen) == 1
    assert strict.seen == []


@pytest.mark.parametrize("tier", ["strict", "verified"])
async def test_a_strict_answer_names_its_seed_and_fingerprint(stage: Stage, tier: str) -> None:
    gateway, strict, throughput = await stage.pair()

    got = await gateway.chat(consistency_tier=tier)

    assert got.headers["x-consistency-tier"] == tier
    assert got.headers["x-served-by"] == "strict/rev1/r0"
    assert got.headers["x-numerics-fingerprint"] == FINGERPRINT
    assert 0 <= int(got.headers["x-seed"]) < 1 << 53
    assert strict.seen[0].body["seed"] == int(got.headers["x-seed"])
    assert "consistency_tier" not in strict.seen[0].body
    assert throughput.seen == []


async def test_a_given_seed_is_echoed(stage: Stage) -> None:
    gateway, strict, _ = await stage.pair()

    got = await gateway.chat(model="m:strict", seed=-7)

    assert got.headers["x-seed"] == "-7"
    assert strict.seen[0].body["seed"] == -7
    assert strict.seen[0].body["model"] == "m"


async def test_a_repeat_under_an_idempotency_key_draws_the_same_seed(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    headers = {"idempotency-key": "once", "x-consistency-tier": "strict"}

    first, again = await gateway.chat(headers), await gateway.chat(headers)
    other = await gateway.chat(headers, n=2)

    assert first.headers["x-seed"] == again.headers["x-seed"]
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_key_reused"


async def test_a_stream_arrives_whole_and_unbuffered(stage: Stage) -> None:
    gateway, strict, _ = await stage.pair()

    got = await gateway.chat({"x-consistency-tier": "strict"}, stream=True, max_tokens=5)

    assert got.content == b"".join(event(n) for n in range(5)) + b"data: [DONE]\n\n"
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert got.headers["x-accel-buffering"] == "no"
    assert got.headers["cache-control"] == "no-cache"
    assert len(strict.seen) == 1


async def test_a_stream_that_came_in_one_read_is_framed_as_any_other(stage: Stage) -> None:
    async def at_once(exchange: Exchange) -> None:
        body = b"".join(
            b"%x\r\n%s\r\n" % (len(data), data) for data in (event(0), b"data: [DONE]\n\n", b"")
        )
        exchange.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + body
        )
        await exchange.writer.drain()

    gateway, _, throughput = await stage.pair()
    throughput.reply = at_once

    got = await gateway.chat(stream=True)

    assert got.content == event(0) + b"data: [DONE]\n\n"
    assert got.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in got.headers


async def test_only_headers_of_ours_reach_the_worker(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    sent = {
        "authorization": "Bearer secret",
        "cookie": "a=b",
        "x-isobatch-admin": "1",
        "accept-encoding": "gzip",
        "x-request-id": "mine",
        "x-data-parallel-rank": "3",
        "user-agent": "me",
    }

    got = await gateway.chat(sent, cache_salt="x", priority=-9, kv_transfer_params={"a": 1})

    seen = throughput.seen[0]
    assert set(seen.headers) == {
        "host",
        "content-type",
        "accept",
        "x-request-id",
        "content-length",
    }
    assert seen.headers["x-request-id"] != "mine"
    assert seen.body.keys() == HELLO.keys() | {"cache_salt"}
    assert seen.body["cache_salt"] != "x"
    assert "x-isobatch-secret" not in got.headers
    assert got.headers.get_list("date") != ["old"]
    assert len(got.headers.get_list("date")) == 1
    assert "server" not in got.headers


async def test_a_bad_request_id_is_replaced(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()

    got = await gateway.chat({"x-request-id": "y" * 129})

    assert got.headers["x-request-id"].startswith("req-")


async def test_tenants_have_salts_of_their_own(stage: Stage) -> None:
    other = key(id="k2", tenant="t2", hash=hash_token("isk-other"))
    gateway, _, throughput = await stage.pair(keys=[key(), other])

    for token in (TOKEN, TOKEN, "isk-other"):
        assert (await gateway.chat(bearer(token))).status_code == 200

    one, again, two = (seen.body["cache_salt"] for seen in throughput.seen)
    assert one == again
    assert one != two


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("isk-wrong"), {"authorization": TOKEN}, {"authorization": "Basic eA=="}],
    ids=["none", "wrong", "no scheme", "another scheme"],
)
async def test_a_missing_and_a_wrong_key_get_the_same_answer(
    stage: Stage, headers: dict[str, str]
) -> None:
    gateway, _, throughput = await stage.pair(keys=[key()])

    for got in (await gateway.chat(headers), await gateway.http.get("/v1/models", headers=headers)):
        assert got.status_code == 401
        assert got.json()["error"]["code"] == "invalid_api_key"
        assert got.json() == (await gateway.chat()).json()
    assert throughput.seen == []


async def test_a_key_has_its_own_tiers_models_default_and_limits(stage: Stage) -> None:
    limited = key(
        tiers=(Tier.STRICT,),
        default_tier=Tier.STRICT,
        limits={Tier.STRICT: TierLimits(requests_per_minute=1)},
    )
    blind = key(id="k2", hash=hash_token("isk-blind"), models=("other",))
    gateway, _, _ = await stage.pair(keys=[limited, blind])

    standard = await gateway.chat(bearer() | {"x-consistency-tier": "standard"})
    first, second = await gateway.chat(bearer()), await gateway.chat(bearer())
    unseen = await gateway.chat(bearer("isk-blind"))

    assert (standard.status_code, standard.json()["error"]["code"]) == (403, "tier_not_allowed")
    assert first.headers["x-consistency-tier"] == "strict"
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(second.headers["retry-after"]) >= 1
    assert (unseen.status_code, unseen.json()["error"]["code"]) == (404, "model_not_found")
    listed = await gateway.http.get("/v1/models", headers=bearer("isk-blind"))
    assert listed.json()["data"] == []


async def test_a_revoked_key_is_refused_without_a_restart(stage: Stage) -> None:
    gateway, _, _ = await stage.pair(keys=[key()])
    assert (await gateway.chat(bearer())).status_code == 200

    (stage.folder / "keys.json").write_text('{"keys": []}')

    keys = gateway.runtime.keys
    assert keys is not None
    await until(lambda: keys.ring.holder(TOKEN) is None)
    assert (await gateway.chat(bearer())).status_code == 401


async def test_a_workers_own_refusal_comes_through_unchanged(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    throughput.reply = refuse

    for _ in range(10):
        got = await gateway.chat(max_tokens=10**6)
        assert got.status_code == 400
        assert got.json()["error"]["message"] == "max_tokens is too large"
    assert gateway.ready(THROUGHPUT) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"])
async def test_the_other_paths_pass(stage: Stage, path: str) -> None:
    gateway, _, throughput = await stage.pair()

    got = await gateway.http.post(path, json={"model": "m", "prompt": "x", "input": "x"})

    assert got.status_code == 200
    assert throughput.seen[0].path == path
    assert ("cache_salt" in throughput.seen[0].body) == path.startswith("/v1/")


@pytest.mark.parametrize(
    "path", ["/health", "/v1/responses", "/metrics/", "/pause", "/invocations", "/v1/models/m"]
)
async def test_no_other_path_of_a_worker_is_reachable(stage: Stage, path: str) -> None:
    gateway, _, throughput = await stage.pair()

    got = await gateway.http.post(path, json={})

    assert got.status_code == 404
    assert got.json()["error"]["code"] == "path_not_found"
    assert throughput.seen == []


async def test_a_wrong_method_says_which_is_right(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()

    got = await gateway.http.get(CHAT)

    assert got.status_code == 405
    assert got.headers["allow"] == "POST"
    assert got.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("headers", "fields", "status", "code"),
    [
        pytest.param({"x-consistency-tier": "best"}, {}, 400, "x-consistency-tier", id="tier"),
        pytest.param({}, {"consistency_tier": 1}, 400, "consistency_tier", id="tier's type"),
        pytest.param(
            {"x-consistency-tier": "strict"},
            {"model": "m:standard"},
            400,
            "consistency_tier",
            id="two tiers",
        ),
        pytest.param({}, {"model": 3}, 400, "model", id="model's type"),
        pytest.param({}, {"model": "absent"}, 404, "model_not_found", id="unknown model"),
        pytest.param({}, {"model": "m:strict", "seed": "1"}, 400, "seed", id="seed's type"),
        pytest.param(
            {"x-require-fingerprint": "x"}, {}, 400, "x-require-fingerprint", id="fingerprint"
        ),
        pytest.param(
            {"x-require-fingerprint": OTHER_FINGERPRINT},
            {"model": "m:strict"},
            412,
            "fingerprint_unavailable",
            id="fingerprint not served",
        ),
        pytest.param(
            {"x-require-fingerprint": FINGERPRINT},
            {},
            412,
            "fingerprint_unavailable",
            id="fingerprint asked of the standard tier",
        ),
        pytest.param({"x-conversation-id": ""}, {}, 400, "x-conversation-id", id="conversation"),
        pytest.param(
            {"content-encoding": "gzip"}, {}, 415, "unsupported_media_type", id="compressed"
        ),
        pytest.param({"content-type": "text/plain"}, {}, 415, "unsupported_media_type", id="type"),
    ],
)
async def test_a_wrong_request_is_refused(
    stage: Stage, headers: dict[str, str], fields: dict[str, Any], status: int, code: str
) -> None:
    gateway, strict, throughput = await stage.pair()

    got = await gateway.chat(headers, **fields)

    assert got.status_code == status
    assert got.json()["error"]["code"] == code
    assert got.json()["error"]["message"]
    assert strict.seen == throughput.seen == []
    assert (await gateway.chat()).status_code == 200


async def test_a_tier_that_the_service_lacks_is_403(stage: Stage) -> None:
    gateway, _, _ = await stage.pair(table={"tiers": Tiers(allowed=(Tier.STANDARD,))})

    got = await gateway.chat({"x-consistency-tier": "strict"})

    assert (got.status_code, got.json()["error"]["code"]) == (403, "tier_not_allowed")


async def test_a_served_fingerprint_may_be_required(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()

    got = await gateway.chat({"x-require-fingerprint": FINGERPRINT, "x-consistency-tier": "strict"})

    assert got.status_code == 200


async def test_a_full_tier_queues_then_refuses(stage: Stage) -> None:
    limits = {Tier.STANDARD: TierLimits(concurrent=1, queue_size=1, queue_timeout="50ms")}
    gateway, _, throughput = await stage.pair(table={"tiers": Tiers(limits=limits)})
    throughput.reply = hang
    first = asyncio.create_task(gateway.chat())
    await until(lambda: throughput.running)
    gate = gateway.runtime.fleet.services["m"].gates[Tier.STANDARD]
    second = asyncio.create_task(gateway.chat())
    await until(lambda: gate._waiting)

    third = await gateway.chat()

    assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert third.headers["retry-after"]
    late = await second
    assert (late.status_code, late.json()["error"]["code"]) == (503, "pool_unavailable")
    throughput.never.set()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_full_standard_tier_overflows_where_the_service_says_so(stage: Stage) -> None:
    tiers = Tiers(
        standard_fallback=StandardFallback.STRICT,
        limits={Tier.STANDARD: TierLimits(concurrent=1), Tier.STRICT: TierLimits(concurrent=1)},
    )
    gateway, strict, throughput = await stage.pair(table={"tiers": tiers})
    throughput.reply = hang
    first = asyncio.create_task(gateway.chat())
    await until(lambda: throughput.running)

    over = await gateway.chat()

    assert over.status_code == 200
    assert over.headers["x-consistency-tier"] == "standard"
    assert over.headers["x-served-by"] == "strict/rev1/r0"
    assert "x-seed" not in over.headers
    assert "seed" not in strict.seen[0].body
    throughput.never.set()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("percent", [0, 100])
async def test_migrated_standard_traffic_is_served_by_the_strict_pool(
    stage: Stage, percent: int
) -> None:
    gateway, strict, throughput = await stage.pair(table={"standard_to_strict": percent})

    got = await gateway.chat()

    assert got.headers["x-consistency-tier"] == "standard"
    assert (len(strict.seen), len(throughput.seen)) == ((1, 0) if percent else (0, 1))


async def test_traffic_follows_the_weights_and_a_conversation_stays(stage: Stage) -> None:
    old, new = await stage.worker(name="a"), await stage.worker(name="b")

    def revision(name: str, weight: int, url: str) -> Revision:
        return Revision(
            name=name,
            pool=THROUGHPUT,
            weight=weight,
            endpoints=(Endpoint(name="r0", url=url),),
        )

    revisions = (revision("rev1", 70, old.url), revision("rev2", 30, new.url))
    gateway = await stage.gateway(stage.table(revisions=revisions))
    await until(lambda: gateway.ready() == 2)

    served: dict[str, set[str]] = {}
    for n in range(120):
        got = await gateway.chat({"x-conversation-id": f"c{n % 60}"})
        served.setdefault(f"c{n % 60}", set()).add(got.headers["x-served-by"])

    assert all(len(where) == 1 for where in served.values())
    assert 8 <= len(new.seen) / 2 <= 30
    stage.write(stage.table(revisions=(revision("rev1", 100, old.url),)), "table0.json")
    await until(lambda: gateway.ready() == 1)
    moved = await gateway.chat({"x-conversation-id": "c1"})
    assert moved.headers["x-served-by"] == "throughput/rev1/r0"


async def test_several_tables_are_several_models(stage: Stage) -> None:
    one, two = await stage.worker(), await stage.worker()
    gateway = await stage.gateway(
        stage.table(one), stage.table(two, service="other", model="org/other:v2")
    )
    await until(lambda: gateway.ready() == 2)

    assert (await gateway.chat()).status_code == 200
    assert (await gateway.chat(model="org/other:v2:standard")).status_code == 200

    assert two.seen[0].body["model"] == "org/other:v2"
    listed = (await gateway.http.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["m", "org/other:v2"]
    unnamed = await gateway.http.post(CHAT, json={"messages": []})
    assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (400, "model")


async def test_services_are_shown_without_their_addresses(stage: Stage) -> None:
    gateway, strict, _ = await stage.pair()

    got = await gateway.http.get("/isobatch/v1/services")

    (service,) = got.json()["services"]
    assert service["model"] == "m"
    assert {r["pool"]: r["fingerprint"] for r in service["revisions"]} == {
        "strict": FINGERPRINT,
        "throughput": None,
    }
    assert all(r["replicas"] == [{"name": "r0", "ready": True}] for r in service["revisions"])
    assert str(strict.port) not in got.text


async def test_metrics_have_the_names_and_labels_of_the_reference(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    await gateway.chat(stream=True)
    await gateway.chat(model="no such model")

    text = (await gateway.http.get("/metrics")).text

    labels = 'model="m",pool="throughput",revision="rev1",tier="standard"'
    assert f'isobatch_requests_total{{code="200",{labels}}} 1.0' in text
    assert 'isobatch_requests_total{code="404",model="",pool="",revision="",tier=""} 1.0' in text
    for name in (
        "isobatch_request_duration_seconds_count",
        "isobatch_time_to_first_token_seconds_count",
    ):
        assert f"{name}{{{labels}}} 1.0" in text
    assert 'isobatch_gateway_overhead_seconds_count{model="m",tier="standard"} 1.0' in text
    assert 'isobatch_inflight{model="m",pool="throughput",tier="standard"} 0.0' in text
    assert 'isobatch_routing_weight{model="m",pool="strict",revision="rev1"} 100.0' in text
    assert 'isobatch_gateway_table_version{model="m"} 1.0' in text
    assert "isobatch_gateway_table_rejected_total 0.0" in text
    assert "isobatch_gateway_table_age_seconds" in text
    assert "no such model" not in text


async def test_load_seen_by_other_gateways_counts(stage: Stage) -> None:
    busy, free = await stage.worker(name="busy"), await stage.worker(name="free")
    busy.running = 30
    gateway = await stage.gateway(stage.table(busy, free))
    await until(lambda: gateway.ready() == 2)
    await until(lambda: any(r.figures.running == 30 for r in gateway.runtime.fleet.replicas()))

    for n in range(10):
        await gateway.chat({"x-conversation-id": f"c{n}"})

    assert (len(busy.seen), len(free.seen)) == (0, 10)


async def test_our_own_routes_echo_the_request_id_too(stage: Stage) -> None:
    gateway = await stage.gateway()

    echoed = await gateway.http.get("/v1/models", headers={"x-request-id": "mine"})
    missing = await gateway.http.get("/nothing")

    assert echoed.headers["x-request-id"] == "mine"
    assert missing.headers["x-request-id"].startswith("req-")


async def test_readiness_waits_for_a_table(stage: Stage) -> None:
    gateway = await stage.gateway()

    before = await gateway.http.get("/readyz")
    worker = await stage.worker()
    stage.write(stage.table(worker))
    await until(lambda: gateway.ready() == 1)
    after = await gateway.http.get("/readyz")

    assert (before.status_code, after.status_code) == (503, 200)
    assert (await gateway.http.get("/healthz")).json() == {"status": "ok"}


async def test_a_body_in_many_pieces_is_put_together(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    body = json.dumps(HELLO | {"user": "x" * 300_000}).encode()

    async def pieces() -> Any:
        for at in range(0, len(body), 7001):
            yield body[at : at + 7001]

    got = await gateway.http.post(
        CHAT, content=pieces(), headers={"content-type": "application/json"}
    )

    assert got.status_code == 200
    assert throughput.seen[0].body["user"] == "x" * 300_000


async def test_strict_is_not_shown_to_a_pool_that_the_service_lacks(stage: Stage) -> None:
    worker = await stage.worker()
    gateway = await stage.gateway(stage.table(worker, pools=(THROUGHPUT,)))
    await until(lambda: gateway.ready() == 1)

    got = await gateway.chat({"x-consistency-tier": "strict"})

    assert (got.status_code, got.json()["error"]["code"]) == (503, "strict_unavailable")
    assert got.headers["retry-after"]
    assert STRICT.value not in got.headers.get("x-served-by", "")

"""What fails behind the gateway, and what its clients see of it."""

import asyncio
import time
from dataclasses import replace

import httpx
import pytest
from isobatch_contracts.resource import StandardFallback, Tiers
from isobatch_gateway.breaker import Closed

from tests.gateway.fakes import (
    OTHER_FINGERPRINT,
    QUICK,
    STRICT,
    THROUGHPUT,
    Exchange,
    FakeWorker,
    Gateway,
    Reply,
    Stage,
    answer,
    begin_then_die,
    begin_then_hang,
    die,
    engine_dead,
    event,
    fail,
    garbage,
    hang,
    until,
)

BEFORE_THE_FIRST_BYTE = [
    pytest.param(die, id="reset"),
    pytest.param(fail, id="500"),
    pytest.param(engine_dead, id="engine dead"),
    pytest.param(garbage, id="garbage"),
]


@pytest.mark.parametrize("fault", BEFORE_THE_FIRST_BYTE)
@pytest.mark.parametrize(
    ("tier", "status", "code"),
    [
        ("standard", 502, "upstream_failed"),
        ("strict", 503, "strict_unavailable"),
        ("verified", 503, "strict_unavailable"),
    ],
)
async def test_a_failure_without_another_replica(
    stage: Stage, fault: Reply, tier: str, status: int, code: str
) -> None:
    gateway, strict, throughput = await stage.pair()
    strict.reply = throughput.reply = fault

    got = await gateway.chat({"x-consistency-tier": tier}, stream=True)

    assert (got.status_code, got.json()["error"]["code"]) == (status, code)
    assert got.headers["retry-after"]
    assert "10.0.0.7" not in got.text
    assert "127.0.0.1" not in got.text
    # A kept connection that dies without a byte may just have been closed: it is asked once more.
    assert len(strict.seen) + len(throughput.seen) in (1, 2)


async def fail_what_is_poisoned(exchange: Exchange) -> None:
    await (fail if exchange.seen.body.get("poison") else answer)(exchange)


async def test_requests_that_fail_wherever_they_go_take_no_replica_out(stage: Stage) -> None:
    gateway, strict, _ = await stage.pair()
    strict.reply = fail_what_is_poisoned
    asks = {"x-consistency-tier": "strict"}

    for _ in range(8):
        assert (await gateway.chat(asks, poison=True)).status_code == 503
        assert (await gateway.chat(asks)).status_code == 200
    for _ in range(8):
        assert (await gateway.chat(asks, poison=True)).status_code == 503
    assert (await gateway.chat(asks)).status_code == 200


@pytest.mark.parametrize("fault", BEFORE_THE_FIRST_BYTE)
@pytest.mark.parametrize("tier", ["standard", "strict"])
async def test_another_replica_of_the_pool_takes_over_before_the_first_byte(
    stage: Stage, fault: Reply, tier: str
) -> None:
    pool = STRICT if tier == "strict" else THROUGHPUT
    bad, good = await stage.worker(pool, name="bad"), await stage.worker(pool, name="good")
    bad.reply = fault
    gateway = await stage.gateway(stage.table(bad, good))
    await until(lambda: gateway.ready() == 2)

    for n in range(8):
        got = await gateway.chat({"x-consistency-tier": tier, "x-conversation-id": f"c{n}"})
        assert got.status_code == 200
        assert got.headers["x-served-by"].endswith("/good")
    assert len(good.seen) == 8
    assert 1 <= len(bad.seen) <= 16


@pytest.mark.parametrize("tier", ["strict", "verified"])
async def test_strict_never_falls_back(stage: Stage, tier: str) -> None:
    tiers = Tiers(standard_fallback=StandardFallback.STRICT)
    gateway, strict, throughput = await stage.pair(table={"tiers": tiers})
    await strict.kill()

    for _ in range(5):
        got = await gateway.chat({"x-consistency-tier": tier})
        assert (got.status_code, got.json()["error"]["code"]) == (503, "strict_unavailable")
        assert got.headers["retry-after"]
    assert throughput.seen == []
    assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    ("fallback", "status"), [(StandardFallback.NEVER, 503), (StandardFallback.STRICT, 200)]
)
async def test_standard_falls_back_only_where_the_service_says_so(
    stage: Stage, fallback: StandardFallback, status: int
) -> None:
    gateway, _, throughput = await stage.pair(table={"tiers": Tiers(standard_fallback=fallback)})
    await throughput.kill()
    await until(lambda: gateway.ready(THROUGHPUT) == 0)

    got = await gateway.chat()

    assert got.status_code == status
    if status == 200:
        assert got.headers["x-served-by"] == "strict/rev1/r0"
        assert got.headers["x-consistency-tier"] == "standard"
    else:
        assert got.json()["error"]["code"] == "pool_unavailable"


async def test_a_stream_that_breaks_ends_in_an_error_frame_after_whole_events(
    stage: Stage,
) -> None:
    gateway, _, throughput = await stage.pair()
    throughput.reply = begin_then_die
    throughput.go.set()

    got = await gateway.chat(stream=True)

    assert got.status_code == 200
    first, error, done, rest = got.text.split("\n\n")
    assert first + "\n\n" == event(0).decode()
    assert error.startswith('data: {"error":{"message":')
    assert '"upstream_failed"' in error
    assert (done, rest) == ("data: [DONE]", "")


async def test_an_unstreamed_answer_that_breaks_never_looks_complete(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()

    async def half(exchange: Exchange) -> None:
        exchange.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3000000\r\n\r\n"
            + b"x" * 2_000_000
        )
        await exchange.writer.drain()
        exchange.writer.close()

    throughput.reply = half

    with pytest.raises(httpx.RemoteProtocolError):
        await gateway.chat()


async def test_a_first_byte_that_is_late_is_a_504(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK, first_byte=0.1))
    throughput.reply = hang

    got = await gateway.chat()

    assert (got.status_code, got.json()["error"]["code"]) == (504, "upstream_timeout")
    await until(lambda: throughput.running == 0)


async def test_a_stream_that_pauses_for_too_long_is_cut(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK, idle=0.1))
    throughput.reply = begin_then_hang

    got = await gateway.chat(stream=True)

    assert '"upstream_timeout"' in got.text
    assert got.text.endswith("data: [DONE]\n\n")
    await until(lambda: throughput.running == 0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_total_time_is_bounded(stage: Stage, is_streamed: bool) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK, total=0.2))
    throughput.reply = begin_then_hang if is_streamed else hang

    got = await gateway.chat(stream=is_streamed)

    assert '"upstream_timeout"' in got.text
    assert got.status_code == (200 if is_streamed else 504)
    await until(lambda: throughput.running == 0)


async def test_a_worker_that_is_killed_and_comes_back_is_used_again(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    assert (await gateway.chat()).status_code == 200
    await throughput.kill()

    down = await gateway.chat()
    assert (down.status_code, down.json()["error"]["code"]) == (502, "upstream_failed")
    await until(lambda: gateway.ready(THROUGHPUT) == 0)
    assert (await gateway.chat()).json()["error"]["code"] == "pool_unavailable"

    await throughput.start()
    began = time.monotonic()
    await until(lambda: gateway.ready(THROUGHPUT) == 1)
    assert time.monotonic() - began < 2
    assert (await gateway.chat()).status_code == 200


async def test_a_kept_connection_that_the_worker_closed_is_no_failure(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    assert (await gateway.chat()).status_code == 200

    async def hang_up_once(exchange: Exchange) -> None:
        await (die if len(throughput.seen) == 2 else answer)(exchange)

    # The gateway learns of the close only when it writes: the worker hangs up on the request.
    throughput.reply = hang_up_once
    got = await gateway.chat()

    assert got.status_code == 200
    assert len(throughput.seen) == 3
    (replica,) = [r for r in gateway.runtime.fleet.replicas() if r.id.pool is THROUGHPUT]
    assert replica.state == Closed()


async def test_errors_that_requests_cause_do_not_take_the_pool_out_for_good(
    stage: Stage,
) -> None:
    gateway, _, throughput = await stage.pair()
    throughput.reply = fail
    for _ in range(12):
        assert (await gateway.chat()).status_code in (502, 503)

    throughput.reply = answer
    await until(lambda: gateway.ready(THROUGHPUT) == 1)

    assert (await gateway.chat()).status_code == 200


async def test_a_worker_that_accepts_and_never_answers_is_taken_out(stage: Stage) -> None:
    bad, good = await stage.worker(name="bad"), await stage.worker(name="good")
    bad.reply = bad.probe = hang
    times = replace(QUICK, suspect=0.2, probe=0.2)
    gateway = await stage.gateway(stage.table(bad, good), timeouts=times)
    await until(lambda: gateway.ready() == 2)

    answers = await asyncio.gather(
        *(gateway.chat({"x-conversation-id": f"c{n}"}) for n in range(12))
    )

    assert all(got.status_code == 200 for got in answers)
    assert all(got.headers["x-served-by"].endswith("/good") for got in answers)
    assert bad.seen
    await until(lambda: bad.probes)
    assert gateway.ready() == 1
    bad.probe = answer
    bad.never.set()
    await until(lambda: gateway.ready() == 2)


async def test_a_single_replica_that_never_answers_is_a_504(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK, suspect=0.1, probe=0.1))
    throughput.reply = throughput.probe = hang

    got = await gateway.chat()

    assert (got.status_code, got.json()["error"]["code"]) == (504, "upstream_timeout")


async def test_a_request_at_a_silent_replica_ends_although_no_table_names_it_any_more(
    stage: Stage,
) -> None:
    bad, good = await stage.worker(name="bad"), await stage.worker(name="good")
    bad.reply = bad.probe = hang
    gateway = await stage.gateway(
        stage.table(bad), timeouts=replace(QUICK, suspect=0.2, probe=0.2, first_byte=60)
    )
    await until(lambda: gateway.ready() == 1)
    waiting = asyncio.create_task(gateway.chat())
    await until(lambda: bad.running)

    stage.write(stage.table(good), "table0.json")

    async with asyncio.timeout(10):
        assert (await waiting).status_code == 200
    assert len(good.seen) == 1


async def test_a_long_unstreamed_answer_is_not_suspected_while_the_engine_works(
    stage: Stage,
) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK, suspect=0.3, probe=0.1))
    throughput.reply = throughput.probe = hang
    task = asyncio.create_task(gateway.chat())
    await until(lambda: throughput.running)
    began = time.monotonic()

    def is_working() -> bool:
        throughput.progress += 1
        return time.monotonic() - began > 1.2

    await until(is_working)

    assert throughput.probes == 0
    assert gateway.ready(THROUGHPUT) == 1
    throughput.never.set()
    assert (await task).status_code == 200


async def test_an_uncertified_worker_gets_no_strict_request(stage: Stage) -> None:
    worker = await stage.worker(STRICT, is_certified=False)
    gateway = await stage.gateway(stage.table(worker))
    await until(lambda: all(r.unanswered == 0 for r in gateway.runtime.fleet.replicas()))

    got = await gateway.chat({"x-consistency-tier": "strict"})

    assert (got.status_code, got.json()["error"]["code"]) == (503, "strict_unavailable")
    worker.is_certified = True
    await until(lambda: gateway.ready() == 1)
    assert (await gateway.chat({"x-consistency-tier": "strict"})).status_code == 200


async def test_a_worker_with_another_fingerprint_gets_no_strict_request(stage: Stage) -> None:
    worker = await stage.worker(STRICT)
    gateway = await stage.gateway(stage.table(worker), check_interval=30.0)
    await until(lambda: gateway.ready() == 1)
    # Another process takes the port between two checks.
    await worker.kill()
    worker.fingerprint = OTHER_FINGERPRINT
    await worker.start()

    got = await gateway.chat({"x-consistency-tier": "strict"})

    assert (got.status_code, got.json()["error"]["code"]) == (503, "strict_unavailable")
    assert worker.seen == []


async def _load(gateway: Gateway, tiers: list[str], results: list[tuple[str, int, str]]) -> None:
    async def one(n: int) -> None:
        tier = tiers[n % len(tiers)]
        got = await gateway.chat({"x-consistency-tier": tier}, stream=n % 2 == 0)
        results.append((tier, got.status_code, got.headers.get("x-served-by", "")))

    await asyncio.gather(*(one(n) for n in range(60)))


async def test_a_kill_under_load_hangs_nobody_and_gives_no_wrong_tier(stage: Stage) -> None:
    workers = [
        await stage.worker(pool, name=name) for pool in (STRICT, THROUGHPUT) for name in ("a", "b")
    ]
    gateway = await stage.gateway(stage.table(*workers))
    await until(lambda: gateway.ready() == 4)
    results: list[tuple[str, int, str]] = []
    tiers = ["strict", "standard", "verified"]

    async def kill_and_start(worker: FakeWorker) -> None:
        await until(lambda: len(results) >= 20)
        await worker.kill()
        await until(lambda: gateway.ready() < 4)
        await worker.start()

    async with asyncio.timeout(20):
        await asyncio.gather(
            kill_and_start(workers[0]),
            *(_load(gateway, tiers, results) for _ in range(4)),
            return_exceptions=False,
        )

    assert len(results) == 240
    served = {(tier, by.partition("/")[0]) for tier, status, by in results if status == 200}
    assert served == {("strict", "strict"), ("verified", "strict"), ("standard", "throughput")}
    assert {status for _, status, _ in results} <= {200, 502, 503}
    assert sum(status == 200 for _, status, _ in results) > 200
    await until(lambda: gateway.ready() == 4)


async def test_an_unreadable_table_keeps_the_last_good_one(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    file = stage.folder / "tables" / "table0.json"
    good = file.read_text()

    for n, bad in enumerate(("{", good.replace('"weight": 100', '"weight": 99'), "[]"), start=1):
        file.write_text(bad)
        await until(lambda n=n: gateway.runtime.source.rejected == n)  # type: ignore[misc]
        assert (await gateway.chat()).status_code == 200
    assert await gateway.metric("isobatch_gateway_table_rejected_total") == 3
    assert await gateway.metric("isobatch_gateway_table_age_seconds") > 0

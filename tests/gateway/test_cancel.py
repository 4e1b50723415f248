"""Who leaves early: the client, or the gateway itself."""

import asyncio
import json
from dataclasses import replace

import pytest
from isobatch_contracts.resource import TierLimits, Tiers
from isobatch_contracts.tiers import Tier

from tests.gateway.fakes import (
    CHAT,
    HELLO,
    QUICK,
    THROUGHPUT,
    Stage,
    answer,
    begin_then_hang,
    hang,
    until,
)


async def leave(port: int, body: bytes, *, after: bytes | None) -> None:
    """Ask, wait for `after`, and close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    if after is not None:
        await reader.readuntil(after)
    else:
        await asyncio.sleep(0)
    writer.transport.abort()


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "unstreamed"])
async def test_a_client_that_leaves_ends_the_work_of_the_worker(
    stage: Stage, is_streamed: bool
) -> None:
    gateway, _, throughput = await stage.pair()
    throughput.reply = begin_then_hang if is_streamed else hang
    body = json.dumps(HELLO | {"stream": is_streamed}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await until(lambda: throughput.running == 1)
    if is_streamed:
        await reader.readuntil(b"\n\n")

    writer.close()

    await until(lambda: throughput.running == 0, seconds=2)
    assert throughput.left == 1
    await until(lambda: not gateway.runtime.open)
    assert await gateway.metric('isobatch_requests_total{code="499"') == 1
    assert await gateway.metric("isobatch_inflight") == 0
    assert all(r.in_flight == 0 for r in gateway.runtime.fleet.replicas())


async def test_clients_that_leave_take_nobody_out(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair()
    throughput.reply = begin_then_hang
    body = json.dumps(HELLO | {"stream": True}).encode()

    await asyncio.gather(*(leave(gateway.port, body, after=b"data: {") for _ in range(20)))

    await until(lambda: throughput.running == 0)
    assert throughput.left == 20
    throughput.reply = answer
    assert gateway.ready(THROUGHPUT) == 1
    assert (await gateway.chat()).status_code == 200


async def test_who_leaves_the_queue_is_never_sent(stage: Stage) -> None:
    limits = {Tier.STANDARD: TierLimits(concurrent=1, queue_size=5)}
    gateway, _, throughput = await stage.pair(table={"tiers": Tiers(limits=limits)})
    throughput.reply = hang
    first = asyncio.create_task(gateway.chat())
    await until(lambda: throughput.running)
    gate = gateway.runtime.fleet.services["m"].gates[Tier.STANDARD]
    second = asyncio.create_task(gateway.chat())
    await until(lambda: len(gate._waiting) == 1)

    second.cancel()

    await until(lambda: len(gate._waiting) == 0)
    throughput.never.set()
    await first
    await until(lambda: gate.running == 0)
    assert len(throughput.seen) == 1


async def test_a_draining_gateway_takes_nothing_new(stage: Stage) -> None:
    gateway, _, _ = await stage.pair()
    gateway.runtime.is_draining = True

    standard = await gateway.chat()
    strict = await gateway.chat({"x-consistency-tier": "strict"})

    assert (await gateway.http.get("/readyz")).status_code == 503
    assert (await gateway.http.get("/healthz")).status_code == 200
    for got, code in ((standard, "pool_unavailable"), (strict, "strict_unavailable")):
        assert (got.status_code, got.json()["error"]["code"]) == (503, code)
        assert got.headers["retry-after"]
        assert got.headers["connection"] == "close"


async def test_at_the_drain_deadline_a_stream_gets_its_error_frame(stage: Stage) -> None:
    gateway, _, throughput = await stage.pair(timeouts=replace(QUICK))
    throughput.reply = begin_then_hang
    task = asyncio.create_task(gateway.chat(stream=True))
    await until(lambda: throughput.running)
    waiting = asyncio.create_task(gateway.chat())
    await until(lambda: throughput.running == 2)
    await until(lambda: any(r.answering for r in gateway.runtime.fleet.replicas()))

    async with gateway.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as third:
        first_chunk = await anext(third.aiter_bytes())
        gateway.runtime.end_all()
        got, refused = await asyncio.gather(task, waiting)

    assert first_chunk
    assert got.text.endswith("data: [DONE]\n\n")
    assert '"pool_unavailable"' in got.text
    assert '"pool_unavailable"' in refused.text
    await until(lambda: throughput.running == 0)

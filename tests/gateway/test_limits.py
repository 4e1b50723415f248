import asyncio

from isobatch_contracts.resource import TierLimits
from isobatch_gateway.idempotency import IdempotencyKeys
from isobatch_gateway.limits import Gate, TooMany, WaitedTooLong, take

from tests.gateway.fakes import until


def test_a_minute_admits_its_number_and_says_when_the_next_may_come() -> None:
    gate, limits = Gate(), TierLimits(requests_per_minute=3)
    got = [gate.admit_rate(limits, 100.0) for _ in range(4)]

    assert got == [None, None, None, TooMany("requestsPerMinute", 20)]
    assert gate.admit_rate(limits, 120.0) is None


def test_a_lowered_limit_holds_at_once() -> None:
    bucket, _ = take(None, 100, 0.0)
    bucket, wait = take(bucket, 1, 0.0)

    assert wait == 0.0
    assert take(bucket, 1, 0.0)[1] == 60.0


async def test_a_full_gate_without_a_queue_refuses() -> None:
    gate, limits = Gate(), TierLimits(concurrent=1)

    assert await gate.enter(limits) is None
    assert await gate.enter(limits) == TooMany("concurrent", 1)
    gate.leave()
    assert await gate.enter(limits) is None


async def test_the_queue_is_served_in_order_and_bounded() -> None:
    gate, limits = Gate(), TierLimits(concurrent=1, queue_size=2)
    assert await gate.enter(limits) is None
    order: list[int] = []

    async def wait(n: int) -> None:
        assert await gate.enter(limits) is None
        order.append(n)

    waiting = [asyncio.create_task(wait(n)) for n in range(2)]
    await until(lambda: len(gate._waiting) == 2)
    assert await gate.enter(limits) == TooMany("concurrent", 1)
    gate.leave()
    await until(lambda: order == [0])
    gate.leave()
    await asyncio.gather(*waiting)

    assert order == [0, 1]
    assert gate.running == 1


async def test_a_queue_that_takes_too_long_says_so_and_keeps_no_place() -> None:
    gate, limits = Gate(), TierLimits(concurrent=1, queue_size=1, queue_timeout="10ms")
    assert await gate.enter(limits) is None

    assert await gate.enter(limits) == WaitedTooLong(0.01)
    gate.leave()
    assert gate.running == 0


async def test_who_leaves_the_queue_takes_no_place_with_them() -> None:
    gate, limits = Gate(), TierLimits(concurrent=1, queue_size=1)
    assert await gate.enter(limits) is None
    waiting = asyncio.create_task(gate.enter(limits))
    await until(lambda: gate._waiting)

    gate.leave()  # the place passes to the one who waits
    waiting.cancel()  # and who leaves in that very moment
    await asyncio.gather(waiting, return_exceptions=True)

    assert gate.running == 0


def test_idempotency_keys_are_held_to_their_request_and_forgotten_in_time() -> None:
    keys = IdempotencyKeys(most=2, seconds=10)

    assert not keys.is_reused("t", "k", b"1", 0)
    assert not keys.is_reused("t", "k", b"1", 1)
    assert keys.is_reused("t", "k", b"2", 2)
    assert not keys.is_reused("u", "k", b"2", 3)
    assert not keys.is_reused("t", "k", b"2", 11)


def test_the_memory_of_idempotency_keys_is_bounded() -> None:
    keys = IdempotencyKeys(most=3, seconds=1000)
    for n in range(100):
        keys.is_reused("t", f"k{n}", b"1", 0)

    assert len(keys._seen) <= 4

"""Performs: gets some replica to begin the answer, trying another where that is safe."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from isobatch_contracts import errors
from isobatch_contracts.numerics import NUMERICS_PATH
from isobatch_contracts.tiers import PoolName
from prometheus_client import Gauge

from isobatch_gateway import outcomes
from isobatch_gateway.breaker import Event
from isobatch_gateway.errors import (
    BadAnswer,
    ConnectFailed,
    ConnectionDied,
    FirstByteTimedOut,
    ReplicaSilent,
    ServerFailed,
    UpstreamError,
)
from isobatch_gateway.fleet import Replica, ReplicaId, Service
from isobatch_gateway.health import admitted
from isobatch_gateway.orders import Order
from isobatch_gateway.refusals import Refusal
from isobatch_gateway.relay import Opening, Relay
from isobatch_gateway.routing import choose
from isobatch_gateway.settings import Timeouts
from isobatch_gateway.upstream.connection import Connection
from isobatch_gateway.upstream.control import ask
from isobatch_gateway.upstream.message import request_bytes
from isobatch_gateway.upstream.pool import ConnectionPool, Pools

_MOST_REPLICAS = 3  # tried for one request
_NOT_IMPLEMENTED = 501  # vLLM's word for a request that this model cannot serve: not a failure


class Attempt:
    """One order at one replica. `close` it, whatever happened."""

    def __init__(
        self, replica: Replica, pool: ConnectionPool, timeouts: Timeouts, gauge: Gauge
    ) -> None:
        self.replica = replica
        self._gauge = gauge
        self._pool = pool
        self._timeouts = timeouts
        self._relay: Relay | None = None
        replica.in_flight += 1
        gauge.inc()

    @property
    def relay(self) -> Relay:
        """The answer under way; there is one once `open` has returned."""
        assert self._relay is not None
        return self._relay

    async def open(self, head: list[tuple[bytes, bytes]], order: Order) -> Opening:
        """Send `order` and wait for the beginning of its answer. Raises `UpstreamError`."""
        request = request_bytes("POST", order.path, self._pool.authority, head, order.payload)
        connection = await self._connection(is_fresh=False)
        was_kept = connection.exchanges > 0
        try:
            opening = await self._first(connection, request)
        except ConnectionDied:
            if not was_kept or connection.has_answered:
                raise
            # The replica had closed a kept connection: the request never reached it.
            self._drop_relay()
            opening = await self._first(await self._connection(is_fresh=True), request)
        if opening.status >= 500 and opening.status != _NOT_IMPLEMENTED:
            raise ServerFailed(f"status {opening.status}")
        return opening

    def close(self) -> None:
        """End the attempt; an answer that is not complete is given up upstream at once."""
        self.replica.in_flight -= 1
        self._gauge.dec()
        self._drop_relay()

    def _drop_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.abandon()
            self.replica.answering.discard(relay)
            self.replica.heard(relay.last_read)

    async def _first(self, connection: Connection, request: bytes) -> Opening:
        replica = self.replica
        relay = self._relay = Relay(connection, self._timeouts.first_byte, self._timeouts.idle)
        replica.answering.add(relay)
        replica.waiting[relay] = asyncio.get_running_loop().time()
        try:
            connection.start(request, relay)
            return await relay.first()
        finally:
            del replica.waiting[relay]

    async def _connection(self, *, is_fresh: bool) -> Connection:
        """A connection to the replica; to a strict one, only if its process is the certified one.

        A port outlives its process: in the moment after a restart another worker may listen there.
        What is behind one connection never changes, so that one look at each is enough.
        """
        wanted = self.replica.id.fingerprint
        for _ in range(8):
            kept = None if is_fresh else self._pool.idle()
            connection = kept or await self._pool.connect()
            if self.replica.id.pool is not PoolName.STRICT or connection.verified == wanted:
                return connection
            look = request_bytes("GET", NUMERICS_PATH, self._pool.authority, [], b"")
            try:
                answer = await ask(connection, look, self._timeouts.check)
            except ConnectionDied:
                if kept is not None:
                    continue
                raise
            certified = admitted(answer.body, wanted) if answer.status == 200 else None
            if certified is None:
                connection.close()
                self.replica.is_ready = False
                raise BadAnswer("the worker is not the certified one of the table")
            self.replica.certified = certified
            # It is back in the pool by now, the first to be taken.
            connection.verified = wanted
            is_fresh = False
        raise BadAnswer("no certified connection")


async def _first_look(replicas: tuple[Replica, ...], seconds: float) -> bool:
    """Wait until something is known of one of `replicas`; False if that takes too long."""
    looks = [asyncio.create_task(replica.looked.wait()) for replica in replicas]
    try:
        done, _ = await asyncio.wait(looks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for look in looks:
            look.cancel()


def event_of(error: UpstreamError) -> Event | None:
    """What the breaker hears of `error`."""
    match error:
        case ConnectFailed():
            return Event.OUTAGE
        case ReplicaSilent():
            return None  # it is out already
        case ServerFailed():
            return Event.BAD_ANSWER
        case _:
            return Event.FAILURE


class Dispatching(NamedTuple):
    """What a dispatch needs to know besides the order.

    `gauge` counts what a pool works on; `failed` hears of each attempt that a replica failed.
    """

    timeouts: Timeouts
    gauge: Callable[[PoolName], Gauge]
    failed: Callable[[Replica], None]


async def dispatch(
    service: Service,
    order: Order,
    pools: Pools,
    head: list[tuple[bytes, bytes]],
    settings: Dispatching,
) -> tuple[Attempt, Opening] | Refusal:
    """The attempt whose answer has begun. The caller closes it.

    Nothing has reached the client yet, so that another replica may be tried: each once, and none
    after a late first byte, since a second wait would be as long.
    """
    tried: set[ReplicaId] = set()
    error: UpstreamError | None = None
    may_wait = True
    while len(tried) < _MOST_REPLICAS and not isinstance(error, FirstByteTimedOut):
        candidate = choose(service.candidates(tried), order.pools, order.asker)
        if candidate is None:
            unknown = service.unknown(order.pools)
            if not may_wait or not unknown:
                break
            # A table may move all traffic to replicas that it names for the first time.
            may_wait = await _first_look(unknown, settings.timeouts.connect)
            continue
        replica = service.replica(candidate)
        tried.add(replica.id)
        pool, gauge = pools.at(replica.id.url), settings.gauge(replica.id.pool)
        attempt = Attempt(replica, pool, settings.timeouts, gauge)
        try:
            return attempt, await attempt.open(head, order)
        except UpstreamError as exc:
            attempt.close()
            error = exc
            event = event_of(exc)
            if event is not None:
                replica.note(event)
                settings.failed(replica)
        except BaseException:
            attempt.close()
            raise
    if error is not None:
        return outcomes.failed(order.tier, error)
    if order.asker.fingerprint is not None:
        return Refusal(
            errors.FINGERPRINT_UNAVAILABLE,
            f"No ready replica has the fingerprint {order.asker.fingerprint}; "
            "GET /isobatch/v1/services lists those that are served.",
            param="x-require-fingerprint",
        )
    return outcomes.unavailable(order.tier)

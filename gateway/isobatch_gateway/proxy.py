"""Performs: the life of a proxied request, from its headers to the end of its answer."""

import asyncio
import contextlib
import random
import time

from isobatch_contracts import errors
from isobatch_contracts import headers as names

from isobatch_gateway import asked as asking
from isobatch_gateway import logs, outcomes
from isobatch_gateway.admission import Ticket, admit
from isobatch_gateway.asked import Asked
from isobatch_gateway.body import read_body
from isobatch_gateway.breaker import Event
from isobatch_gateway.client import Client, Receive, Record, Scope, Send
from isobatch_gateway.dispatch import Attempt, Dispatching, dispatch, event_of
from isobatch_gateway.errors import (
    ClientGone,
    ClientStalled,
    Interrupted,
    LedgerUnavailable,
    TotalTimedOut,
    UpstreamError,
)
from isobatch_gateway.fleet import Service
from isobatch_gateway.identity import SEED_RANGE
from isobatch_gateway.interrupt import Interruptible
from isobatch_gateway.metrics import Labels
from isobatch_gateway.orders import (
    Chance,
    Context,
    Order,
    Principal,
    find_model,
    make_order,
    tier_of,
)
from isobatch_gateway.receipts.request import RequestReceipt
from isobatch_gateway.receipts.taking import Reading, take_receipt
from isobatch_gateway.refusals import Headers, Refusal, error_frame
from isobatch_gateway.relay import Opening, Relay, Writer
from isobatch_gateway.runtime import Runtime
from isobatch_gateway.token_ids import out_of_vocabulary
from isobatch_gateway.upstream.message import passed_on

_CLIENT_LEFT = 499  # nginx's number for it; nobody sees it but logs and metrics
_STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
BAD_KEY = Refusal(
    errors.INVALID_API_KEY,
    "The API key is missing or unknown. Send Authorization: Bearer KEY with a valid one.",
)


class Proxy:
    """The ASGI application of the paths that replicas answer."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._log = logs.access_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        picked = asking.pick(scope["headers"])
        own_id = f"req-{random.getrandbits(128):032x}"  # unique, not secret
        record = Record(scope["path"], asking.request_id(picked, own_id))
        client = Client(scope, receive, send, record)
        loop = asyncio.get_running_loop()
        work = Interruptible()
        self._runtime.open.add(work)
        total = self._runtime.settings.timeouts.total
        clock = loop.call_later(total, work.end, TotalTimedOut("took too long"))
        try:
            with work:
                refusal = await self._serve(client, work, picked, own_id)
                if refusal is not None:
                    await self._refuse(client, refusal)
        except Interrupted as exc:
            await self._interrupted(client, exc)
        except Exception:  # noqa: BLE001  # the last resort: a bug must not look like a closed socket
            await self._broken(client)
        finally:
            clock.cancel()
            client.stop_watching()
            self._runtime.open.discard(work)
            if record.receipt is not None:
                left = record.status == _CLIENT_LEFT
                record.receipt.leave(record.status, record.outcome, is_aborted=left)
            self._account(record)

    async def _serve(
        self, client: Client, work: Interruptible, picked: dict[bytes, list[bytes]], own_id: str
    ) -> Refusal | None:
        """Answer the request, or say why not (before anything was sent)."""
        runtime, record = self._runtime, client.record
        principal = principal_of(runtime, asking.authorization(picked))
        if principal is None:
            return BAD_KEY
        record.tenant, record.key_id = principal.tenant, principal.key_id
        asked = asking.read_headers(picked)
        if isinstance(asked, Refusal):
            return asked
        settings = runtime.settings
        raw = await client.body(asked.length, settings.bounds, settings.timeouts)
        if isinstance(raw, Refusal):
            return raw
        client.end_when_gone(work)
        made = self._order(record, asked, raw, principal)
        if runtime.receipts is not None:
            reading = Reading(record, asked, raw, made)
            record.receipt = take_receipt(runtime.receipts, reading, runtime.fleet, principal)
        if isinstance(made, Refusal):
            return made
        service, order = made
        if record.receipt is not None:
            record.receipt.worker_id = own_id
            if runtime.receipts is not None and runtime.receipts.is_failing:
                # Not after the work: the answer could not be given.
                unrecorded = await self._opened(record)
                if unrecorded is not None:
                    return unrecorded
        ticket = Ticket(order.pools)
        with ticket.held():
            waiting_since = time.perf_counter()
            full = await admit(ticket, order, principal, service, runtime.key_gates)
            record.queued = time.perf_counter() - waiting_since
            if full is not None:
                return full
            return await self._answer(client, service, order, ticket, _upstream_head(asked, own_id))

    def _order(
        self, record: Record, asked: Asked, raw: bytes, principal: Principal
    ) -> tuple[Service, Order] | Refusal:
        runtime = self._runtime
        body = read_body(raw)
        if isinstance(body, Refusal):
            return body
        model = find_model(body, runtime.fleet.services, principal)
        if isinstance(model, Refusal):
            return model
        service = runtime.fleet.services[model]
        tier = tier_of(record.path, asked, body, principal, service.table)
        if isinstance(tier, Refusal):
            record.labels = Labels(model)
            return tier
        record.tier, record.labels = tier, Labels(model, tier.value)
        if runtime.is_draining:
            return outcomes.draining(tier)
        # Neither number is a secret: one spreads load, the other is told to the client.
        chance = Chance(random.random(), random.randrange(SEED_RANGE))  # noqa: S311
        salt = runtime.salt(principal.tenant)
        context = Context(principal, salt, service.table, runtime.secret, chance)
        foreign = out_of_vocabulary(body.document, service.vocabulary)
        if foreign is not None:
            return foreign
        order = make_order(record.path, asked, body, tier, context)
        if isinstance(order, Order) and self._is_reused(order):
            return Refusal(
                errors.IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key was used for another request. Use a new key for a new one.",
                param=names.IDEMPOTENCY_KEY,
            )
        return order if isinstance(order, Refusal) else (service, order)

    def _is_reused(self, order: Order) -> bool:
        if order.digest is None or order.idempotency_key is None:
            return False
        now = asyncio.get_running_loop().time()
        return self._runtime.idempotency.is_reused(
            order.asker.tenant, order.idempotency_key, order.digest, now
        )

    async def _answer(
        self, client: Client, service: Service, order: Order, ticket: Ticket, head: Headers
    ) -> Refusal | None:
        record, runtime = client.record, self._runtime
        sent = time.perf_counter()
        if ticket.pools is not order.pools:
            order = order._replace(pools=ticket.pools)
        labels = record.labels
        settings = Dispatching(
            runtime.settings.timeouts,
            lambda pool: runtime.metrics.under_way(labels, pool),
            runtime.metrics.upstream_failed,
        )
        begun = await dispatch(service, order, runtime.pools, head, settings)
        record.upstream_wait = time.perf_counter() - sent
        if isinstance(begun, Refusal):
            return begun
        attempt, opening = begun
        served_by = attempt.replica.id
        record.labels = labels._replace(pool=served_by.pool.value, revision=served_by.revision)
        record.replica = served_by.name
        try:
            refusal = None
            if opening.status >= 400 and opening.is_whole and not opening.is_stream:
                refusal = outcomes.put_in_shape(order.path, opening.status, attempt.relay.held)
            if record.receipt is not None:
                record.receipt.replica = attempt.replica
                if refusal is None:
                    refusal = await self._opened(record)
            if refusal is None:
                refusal = await self._pass(client, attempt, opening, order)
        finally:
            attempt.close()
        return refusal

    async def _opened(self, record: Record) -> Refusal | None:
        """Wait for the receipt's first record. Without one strict is refused; standard goes on."""
        if record.receipt is None:
            return None
        try:
            await record.receipt.opened()
        except LedgerUnavailable:
            if record.receipt.tier.is_bitwise:
                return outcomes.unrecorded()
            receipt, record.receipt = record.receipt, None
            receipt.leave(0, "unrecorded", is_aborted=False)
        return None

    async def _pass(
        self, client: Client, attempt: Attempt, opening: Opening, order: Order
    ) -> Refusal | None:
        """Pass the answer on; a refusal if nothing was sent yet and nothing may be."""
        headers = [*passed_on(opening.headers), *_own_headers(order, attempt)]
        if opening.is_whole and not opening.is_stream:
            headers.append((b"content-length", b"%d" % opening.size))
        if opening.is_stream:
            # Ours replace the replica's: a proxy in front must not gather the chunks.
            headers = [pair for pair in headers if pair not in _STREAM_HEADERS]
            headers += _STREAM_HEADERS
        client.is_stream = opening.is_stream
        try:
            await self._send(client, attempt.relay, opening, headers)
        except LedgerUnavailable as exc:
            if not client.has_started:
                return outcomes.unrecorded()
            await self._cut_off(client, exc)
        except UpstreamError as exc:
            event = event_of(exc)
            if event is not None:
                attempt.replica.note(event)
                self._runtime.metrics.upstream_failed(attempt.replica)
            await self._cut_off(client, exc)
        else:
            if opening.status < 300:
                attempt.replica.note(Event.SUCCESS)
        finally:
            client.record.bytes_out = attempt.relay.bytes_out
        return None

    async def _send(self, client: Client, relay: Relay, opening: Opening, headers: Headers) -> None:
        """Send an answer; where it has a receipt, its end once that is durable.

        Raises `UpstreamError`, `ClientStalled` or `LedgerUnavailable`.
        """
        receipt, last = client.record.receipt, b""
        writer: Writer = client
        if receipt is not None:
            headers.append((names.RECEIPT_ID.encode(), receipt.id.encode()))
            writer = receipt.writer(client, is_stream=opening.is_stream)
        if opening.is_whole:
            last = await _end_of(relay, receipt, opening.status)
        await client.start(opening.status, headers)
        self._note_first_byte(client.record)
        if not opening.is_whole:
            await relay.pass_on(writer, self._runtime.settings.timeouts.write)
            last = await _end_of(relay, receipt, opening.status)
        await client.end(last)

    async def _refuse(self, client: Client, refusal: Refusal) -> None:
        """Answer with an error; if the request has a receipt, that comes first."""
        receipt, headers = client.record.receipt, list[tuple[bytes, bytes]]()
        if receipt is not None:
            with contextlib.suppress(LedgerUnavailable):
                await receipt.refused(refusal.kind.status, refusal.kind.code)
                headers.append((names.RECEIPT_ID.encode(), receipt.id.encode()))
        await client.refuse(refusal, headers)

    def _note_first_byte(self, record: Record) -> None:
        record.first_byte = time.perf_counter() - record.started
        own = time.perf_counter() - record.body_read - record.queued - record.upstream_wait
        record.overhead = max(0.0, own)
        # The loop writes to sockets once its callbacks are done: this one can wait for the next.
        asyncio.get_running_loop().call_soon(
            self._runtime.metrics.began, record.labels, record.first_byte, record.overhead
        )

    async def _interrupted(self, client: Client, error: Interrupted) -> None:
        record = client.record
        if isinstance(error, ClientGone | ClientStalled):
            record.status, record.outcome = _CLIENT_LEFT, "client_gone"
            client.abort()
        elif client.has_started:
            await self._cut_off(client, error)
        else:
            await self._refuse(client, outcomes.too_late(record.tier, error))

    async def _cut_off(
        self, client: Client, error: UpstreamError | Interrupted | LedgerUnavailable
    ) -> None:
        """End an answer that has begun: a stream by an error frame, any other by its connection.

        Only whole events were sent, so that the frame stands on its own.
        """
        refusal = outcomes.cut_off(error)
        client.record.outcome = refusal.kind.code
        self._log.warning("cut off", request_id=client.record.request_id, reason=str(error))
        if not client.is_stream:
            client.abort()
            return
        try:
            async with asyncio.timeout(self._runtime.settings.timeouts.write):
                await client.end(error_frame(refusal))
        except TimeoutError:
            client.abort()

    async def _broken(self, client: Client) -> None:
        self._log.exception("internal error", request_id=client.record.request_id)
        if client.has_started:
            client.record.outcome = errors.INTERNAL_ERROR.code
            client.abort()
            return
        await self._refuse(
            client,
            Refusal(
                errors.INTERNAL_ERROR,
                f"The gateway failed; its log knows why under {client.record.request_id}.",
            ),
        )

    def _account(self, record: Record) -> None:
        seconds = time.perf_counter() - record.started
        self._runtime.metrics.finished(record.labels, record.status, seconds)
        if not self._runtime.settings.access_log:
            return
        self._log.info(
            "request",
            request_id=record.request_id,
            path=record.path,
            status=record.status,
            outcome=record.outcome,
            tenant=record.tenant,
            key=record.key_id,
            model=record.labels.model,
            tier=record.labels.tier,
            pool=record.labels.pool,
            revision=record.labels.revision,
            replica=record.replica,
            seconds=round(seconds, 6),
            first_byte=record.first_byte and round(record.first_byte, 6),
            overhead=record.overhead and round(record.overhead, 6),
            queued=round(record.queued, 6),
            bytes_in=record.bytes_in,
            bytes_out=record.bytes_out,
        )


def principal_of(runtime: Runtime, authorization: str | None) -> Principal | None:
    """Who asks; None if the key is missing or unknown."""
    if runtime.keys is None:
        return Principal()
    return runtime.keys.principal(authorization)


async def _end_of(relay: Relay, receipt: RequestReceipt | None, status: int) -> bytes:
    """The end of the answer. Raises `LedgerUnavailable`."""
    last = relay.take_held()
    return last if receipt is None else await receipt.complete(last, status)


def _upstream_head(asked: Asked, own_id: str) -> Headers:
    """All that a worker is told besides the body. The id is ours: a client's may not be unique."""
    head = [
        (b"content-type", b"application/json"),
        (b"accept", b"*/*"),
        (names.REQUEST_ID.encode(), own_id.encode()),
    ]
    if asked.traceparent is not None:
        head.append((b"traceparent", asked.traceparent))
    return head


def _own_headers(order: Order, attempt: Attempt) -> Headers:
    """What the answer says of how it was served."""
    replica = attempt.replica
    headers = [
        (names.CONSISTENCY_TIER.encode(), order.tier.value.encode()),
        (names.SERVED_BY.encode(), replica.served_by.encode()),
    ]
    if order.tier.is_bitwise and replica.id.fingerprint is not None:
        headers.append((names.NUMERICS_FINGERPRINT.encode(), replica.id.fingerprint.encode()))
    if order.seed is not None:
        headers.append((names.SEED.encode(), b"%d" % order.seed))
    return headers

"""Performs: one client's side of a request: its body in, its answer out, and what was counted."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from isobatch_contracts import errors
from isobatch_contracts import headers as names
from isobatch_contracts.tiers import Tier

from isobatch_gateway.eager import Done, Rest, begin
from isobatch_gateway.errors import ClientGone
from isobatch_gateway.interrupt import Interruptible
from isobatch_gateway.metrics import Labels
from isobatch_gateway.receipts.request import RequestReceipt
from isobatch_gateway.refusals import Headers, Refusal, error_body, error_headers
from isobatch_gateway.settings import Bounds, Timeouts

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABORT = "isobatch.abort"
"""Key in the scope's extensions: closes the client's connection without flushing it."""

TELL = "isobatch.tell"
"""Key in the scope's extensions: has a function called when the client leaves, without a task."""

WRITE = "isobatch.write"
"""Key in the scope's extensions: writes one chunk at once and says True, or False if it cannot."""

_BODY_TOTAL = 10  # a body may take so many times the time between two reads


@dataclass(slots=True)
class Record:
    """What is said of a request when it is over."""

    path: str
    request_id: str
    started: float = field(default_factory=time.perf_counter)
    tenant: str | None = None
    key_id: str | None = None
    tier: Tier | None = None
    labels: Labels = field(default_factory=Labels)
    replica: str | None = None
    status: int = 0
    outcome: str = "ok"
    body_read: float = 0.0  # perf_counter, as `started`
    queued: float = 0.0  # seconds
    upstream_wait: float = 0.0  # seconds until a replica's answer began
    first_byte: float | None = None  # seconds
    receipt: RequestReceipt | None = None
    overhead: float | None = None  # seconds of it that were ours
    bytes_in: int = 0
    bytes_out: int = 0


class Client:
    """The ASGI side of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        self.record = record
        self.send = send
        self.has_started = False
        self.is_stream = False
        self._receive = receive
        self._extensions: dict[str, Any] = scope.get("extensions") or {}
        self.write: Callable[[bytes], bool] = self._extensions.get(WRITE, _cannot)
        self._watch: asyncio.Task[None] | None = None

    async def body(self, length: int | None, bounds: Bounds, timeouts: Timeouts) -> bytes | Refusal:
        """The whole request body. Raises `ClientGone`."""
        if length is not None and length > bounds.body_bytes:
            return _too_large(bounds)
        parts: list[bytes] = []
        size = 0
        end = time.monotonic() + timeouts.body * _BODY_TOTAL
        while True:
            begun = begin(self._receive())
            try:
                message = begun.value if isinstance(begun, Done) else await _until(begun, timeouts)
            except TimeoutError:
                return _stalled(timeouts)
            if message["type"] == "http.disconnect":
                raise ClientGone("left while sending")
            part = message.get("body", b"")
            size += len(part)
            if size > bounds.body_bytes:
                return _too_large(bounds)
            parts.append(part)
            if not message.get("more_body", False):
                break
            if time.monotonic() > end:
                return _stalled(timeouts)
        self.record.bytes_in = size
        self.record.body_read = time.perf_counter()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end_when_gone(self, work: Interruptible) -> None:
        """End `work` as soon as the client leaves."""
        tell = self._extensions.get(TELL)
        if callable(tell):
            tell(lambda: work.end(ClientGone("left before the end")))
        else:
            self._watch = asyncio.create_task(self._await_departure(work))

    def stop_watching(self) -> None:
        """The request is over."""
        if self._watch is not None:
            self._watch.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers, with the request id."""
        self.has_started = True
        self.record.status = status
        tagged = (names.REQUEST_ID.encode(), self.record.request_id.encode())
        await self.send(
            {"type": "http.response.start", "status": status, "headers": [tagged, *headers]}
        )

    async def end(self, body: bytes = b"") -> None:
        """Send the last bytes."""
        self.record.bytes_out += len(body)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, refusal: Refusal, headers: Headers = []) -> None:  # noqa: B006  # never mutated
        """Answer with an error instead."""
        self.record.outcome = refusal.kind.code
        body = error_body(refusal)
        await self.start(refusal.kind.status, [*error_headers(refusal, body), *headers])
        await self.end(body)

    def abort(self) -> None:
        """Close the connection at once: an answer that stays incomplete must not look complete."""
        close = self._extensions.get(ABORT)
        if callable(close):
            close()

    async def _await_departure(self, work: Interruptible) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        work.end(ClientGone("left before the end"))


async def _until(rest: Rest[Message], timeouts: Timeouts) -> Message:
    async with asyncio.timeout(timeouts.body):
        return await rest


def _stalled(timeouts: Timeouts) -> Refusal:
    return Refusal(
        errors.REQUEST_TIMEOUT,
        f"The body did not come: it may pause for {timeouts.body:g} s at most. Send it again, "
        "without pauses.",
        closes=True,
    )


def _cannot(_: bytes) -> bool:
    return False


def _too_large(bounds: Bounds) -> Refusal:
    return Refusal(
        errors.BODY_TOO_LARGE,
        f"The body is larger than {bounds.body_bytes} bytes, which is the limit. Send less.",
    )

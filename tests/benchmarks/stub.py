"""Performs a worker that costs next to nothing: streams marked chunks on time, answers probes.

`python -m tests.benchmarks.stub` prints its port and serves until its standard input ends.
"""

import asyncio
import json
import resource
import sys
from typing import cast

import uvloop
from isobatch_contracts.numerics import NUMERICS_PATH, Certified, OperatorSummary
from isobatch_contracts.receipt import DIGESTS_PATH, AnswerDigests, SequenceDigests

from tests.benchmarks import wire

FINGERPRINT = "sha256:" + "5e" * 32


def _json_answer(document: object) -> bytes:
    return _answer(b"application/json", json.dumps(document).encode())


def _answer(kind: bytes, body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


_CERTIFIED = Certified(
    fingerprint=FINGERPRINT,
    model_digest="sha256:" + "0d" * 32,
    device="stub",
    versions={"stub": "1"},
    operators=(
        OperatorSummary(
            operator="none",
            shape="none",
            reference="none",
            admitted=(),
            refused=(),
            comparisons=0,
        ),
    ),
    from_cache=True,
    certification_seconds=0.0,
)
_COMPLETION = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": wire.MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_MODELS = {"object": "list", "data": [{"id": wire.MODEL, "object": "model", "owned_by": "stub"}]}
FIXED = {
    b"/health": _answer(b"text/plain", b""),
    b"/v1/models": _json_answer(_MODELS),
    NUMERICS_PATH.encode(): _json_answer(_CERTIFIED.model_dump(mode="json")),
}
NOT_FOUND = _answer(b"application/json", b"{}", b"404 Not Found")
_DIGESTS = DIGESTS_PATH.encode()
ANSWERED = _json_answer(
    AnswerDigests(
        sequences=(
            SequenceDigests(
                index=0,
                prompt=0,
                prompt_tokens=9,
                tokens=20,
                finished=True,
                token_ids="sha256:" + "1d" * 32,
            ),
        )
    ).model_dump(mode="json")
)
COMPLETION = _json_answer(_COMPLETION)


class Worker(asyncio.Protocol):
    """One connection: requests one after the other, each answered in full before the next."""

    running = 0  # streams open in this process; the one thing that connections share

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own inherits nothing

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            size = _content_length(head)
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._handle(head, body)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's name
        """Stop the stream, if one is open."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._finish()

    def _handle(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1].split(b"?")[0]
        if path == b"/v1/chat/completions":
            if wire.is_streamed(body):
                self._begin(*wire.asked(body))
            else:
                self._write(COMPLETION)
        elif path == b"/metrics":
            text = b'vllm:num_requests_running{model_name="bench"} %d\n' % Worker.running
            waiting = b'vllm:num_requests_waiting{model_name="bench"} 0\n'
            self._write(_answer(b"text/plain; version=0.0.4", text + waiting))
        elif path.startswith(_DIGESTS):
            self._write(ANSWERED)
        else:
            self._write(FIXED.get(path, NOT_FOUND))

    def _begin(self, interval_ms: float, chunks: int) -> None:
        Worker.running += 1
        self._left = chunks - 1
        self._write(wire.STREAM_HEAD + wire.marked_chunk(wire.clock_ns()))
        self._schedule(self._loop.time() + interval_ms / 1000, interval_ms / 1000)

    def _schedule(self, at: float, interval: float) -> None:
        self._timer = self._loop.call_at(at, self._next, at, interval)

    def _next(self, at: float, interval: float) -> None:
        """Send the next chunk; the one after it is due `interval` after this one was due."""
        if self._left == 0:
            self._write(wire.STREAM_END)
            self._finish()
            return
        self._left -= 1
        self._write(wire.marked_chunk(wire.clock_ns()))
        self._schedule(at + interval, interval)

    def _finish(self) -> None:
        self._timer = None
        Worker.running -= 1

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    lower = head.lower()
    place = lower.find(b"\r\ncontent-length:")
    if place < 0:
        assert b"transfer-encoding: chunked" not in lower, "the stub reads no chunked requests"
        return 0
    return int(lower[place + 17 :].split(b"\r\n", 1)[0])


async def serve() -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Worker(loop), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), gone.set)
    await gone.wait()


def raise_file_limit() -> None:
    """Open as many connections as the machine lets us."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    raise_file_limit()
    uvloop.run(serve())

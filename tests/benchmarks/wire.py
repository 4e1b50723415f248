"""Decides what client and stub say to each other: requests, chunks, and the marks in chunks.

A mark is the stub's clock at the moment a chunk was written, so that the client knows how long each
chunk took. It stands in the chunk's text: a proxy may take a chunk apart and build another.
"""

import json
import re
import time

MODEL = "bench"
DIGITS = 16  # of a monotonic clock in ns: enough for four months of uptime
MARK_BYTES = DIGITS + 2
MARK = re.compile(rb"<([0-9]{%d})>" % DIGITS)
LAST_CHUNK = b"\r\n0\r\n\r\n"

_ORDER = re.compile(rb"interval_ms=([0-9.]+) chunks=([0-9]+)")
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":0,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunked(data: bytes) -> bytes:
    """`data` as one chunk of HTTP's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_BEFORE, _AFTER = chunked(_EVENT % (b"<" + b"0" * DIGITS + b">")).split(b"0" * DIGITS)
STREAM_END = (
    chunked(
        b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":0,'
        b'"model":"bench","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    )
    + chunked(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


def marked_chunk(now_ns: int) -> bytes:
    """One event of about 180 bytes that carries `now_ns`, as it goes over the wire."""
    return b"%b%016d%b" % (_BEFORE, now_ns, _AFTER)


def request(number: int, interval_ms: float, chunks: int, headers: str, address: str) -> bytes:
    """A streamed chat request that asks the stub for `chunks` chunks, `interval_ms` apart.

    Each number is a conversation of its own. `headers` are lines that end in CRLF.
    """
    order = f"number={number} interval_ms={interval_ms} chunks={chunks}"
    messages = [
        {"role": "system", "content": f"You are conversation {number}."},
        {"role": "user", "content": order},
    ]
    document = {"model": MODEL, "messages": messages, "max_tokens": chunks, "stream": True}
    body = json.dumps(document).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n{headers}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def asked(body: bytes) -> tuple[float, int]:
    """Interval in ms and number of chunks that a request's body asks for; one chunk by default."""
    order = _ORDER.search(body)
    return (float(order[1]), int(order[2])) if order else (0.0, 1)


def is_streamed(body: bytes) -> bool:
    """Whether a request's body asks for a stream."""
    return re.search(rb'"stream":\s*true', body) is not None


def delays_ns(data: bytes, now_ns: int) -> tuple[list[int], int]:
    """Age of each mark in `data`, and where the unread rest of `data` begins."""
    ages = []
    end = max(0, len(data) - MARK_BYTES + 1)
    for mark in MARK.finditer(data):
        ages.append(now_ns - int(mark[1]))
        end = max(end, mark.end())
    return ages, end


def clock_ns() -> int:
    """The clock that all processes of this machine share."""
    return time.monotonic_ns()

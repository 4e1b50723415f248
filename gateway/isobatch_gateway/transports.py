"""Performs what becomes of the bytes of an answer between uvicorn's cycle and the connection."""

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CONTINUE = b"HTTP/1.1 100 "
_CHUNKED = b"transfer-encoding: chunked\r\n"


class HeadHolder:
    """Holds an answer's head until the first bytes of its body: one write for both.

    The body follows at once, as nothing is begun before its first bytes are there. It stands in
    for the transport until then.
    """

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self._head = b""

    def write(self, data: bytes) -> None:
        """Hold a final answer's head; write it together with what follows."""
        if not self._head and not data.startswith(_CONTINUE):
            self._head = data
            return
        self._transport.write(self._head + data)
        if self._head:
            self._cycle.transport = self._transport

    def close(self) -> None:
        """Write what is held, and close."""
        if self._head and self._cycle.transport is not self._transport:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport says."""
        return self._transport.is_closing()


class Unframed:
    """Takes the chunks of an answer apart again for a client of HTTP/1.0, which knows none.

    The end of the connection ends the body (RFC 9112, 6.1 and 6.3).
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_chunked: bool | None = None  # None before the head of the answer

    def write(self, data: bytes) -> None:
        """Write the head without its coding, and of each chunk its data; no 100 at all."""
        if self._is_chunked is None:
            if data.startswith(_CONTINUE):
                return
            self._is_chunked = _CHUNKED in data
            data = data.replace(_CHUNKED, b"")
        elif self._is_chunked:
            data = _data_of(data)
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection: the end of the answer."""
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport says."""
        return self._transport.is_closing()


def _data_of(chunks: bytes) -> bytes:
    """The data of whole chunks; uvicorn writes no part of one."""
    found, at = [], 0
    while at < len(chunks):
        line = chunks.index(b"\r\n", at)
        size = int(chunks[at:line], 16)
        found.append(chunks[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(found)

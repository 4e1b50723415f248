"""Performs: passes an answer on while it is digested, and keeps its end until it has a receipt."""

import hashlib
from collections.abc import MutableMapping
from typing import Any

from isobatch_gateway.relay import Writer
from isobatch_gateway.sse import DONE

_FINISHED = b'"finish_reason":"'
_ERROR = b'data: {"error"'


class AnswerWriter:
    """Stands between a relay and its client. `release` gives what was kept back.

    Of a stream all is kept from the event on that finishes its last sequence, of any other answer
    the last chunk: whoever has the end has an answer, and an answer has a durable receipt.
    """

    def __init__(
        self, client: Writer, *, is_stream: bool, choices: int, keeps_content: bool
    ) -> None:
        """`choices`: how many sequences finish. With `keeps_content` all of it is remembered."""
        self._client = client
        self._is_stream = is_stream
        self._unfinished = choices
        self._digest = hashlib.sha256()
        self._kept = b""
        self._is_keeping = False
        self._now = b""
        self._content: list[bytes] | None = [] if keeps_content else None
        self.bytes = 0
        self.has_error = False

    def write(self, data: bytes) -> bool:
        """As the client's own, for the part of `data` that may go."""
        self._now = self._take(data)
        return not self._now or self._client.write(self._now)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send what `write` could not."""
        await self._client.send({**message, "body": self._now})

    def release(self, last: bytes) -> bytes:
        """What was kept and `last`, counted as handed over."""
        self.has_error = self.has_error or (self._is_stream and _place(_ERROR, last) >= 0)
        end, self._kept = self._kept + last, b""
        self._count(end)
        return end

    def digest(self) -> bytes:
        """SHA-256 of all that was handed over."""
        return self._digest.digest()

    def content(self) -> bytes | None:
        """All that was handed over, if it is remembered."""
        return None if self._content is None else b"".join(self._content)

    def _take(self, data: bytes) -> bytes:
        if not self._is_stream:
            now, self._kept = self._kept, data
        elif self._is_keeping:
            now, self._kept = b"", self._kept + data
        else:
            end = self._end_of_free(data)
            now, self._kept = data[:end], data[end:]
            self._is_keeping = end < len(data)
        self._count(now)
        return now

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self.bytes += len(data)
        if self._content is not None:
            self._content.append(data)

    def _end_of_free(self, data: bytes) -> int:
        """Where the event begins that finishes the answer; the length of `data` if none does.

        vLLM writes JSON without spaces, and inside a text the quotes of the pattern are escaped.
        """
        place = -1
        for _ in range(data.count(_FINISHED)):
            place = data.find(_FINISHED, place + 1)
            self._unfinished -= 1
            if self._unfinished == 0:
                return _begin_of_event(data, place)
        self.has_error = self.has_error or _place(_ERROR, data) >= 0
        place = _place(DONE, data)
        return len(data) if place < 0 else place


def _place(start: bytes, data: bytes) -> int:
    """Where an event begins with `start`; -1 if none does."""
    if data.startswith(start):
        return 0
    found = data.find(b"\n" + start)
    return found if found < 0 else found + 1


def _begin_of_event(data: bytes, place: int) -> int:
    """Where the event begins that `place` is in."""
    separators = (b"\n\n", b"\r\n\r\n")
    ends = [(data.rfind(s, 0, place), len(s)) for s in separators]
    return max((found + size for found, size in ends if found >= 0), default=0)

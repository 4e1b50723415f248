"""Decides where a server-sent event ends, so that only whole ones are passed on."""

import orjson

_MOST_HELD = 16 * 1024 * 1024  # an event longer than this is passed on in pieces
DONE = b"data: [DONE]"


class EventBuffer:
    """Re-chunks a stream into whole events; the concatenation of what comes out is what went in."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The events that are whole once `data` has come; the rest is kept."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            return data
        end = max(_end_of_last(b"\n\n", data), _end_of_last(b"\r\n\r\n", data))
        if len(data) - end > _MOST_HELD:
            return data
        self._held = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What was kept, at the end of a stream that ended as it should."""
        held, self._held = self._held, b""
        return held


def _end_of_last(separator: bytes, data: bytes) -> int:
    found = data.rfind(separator)
    return 0 if found < 0 else found + len(separator)


def server_error_code(events: bytes) -> int | None:
    """The code of a 5xx that a stream begins with; None if it begins otherwise.

    vLLM answers 200 before it has the first token, so that an engine that is dead by then can say
    so only inside the stream.
    """
    if not events.startswith((b'data: {"error"', b'data: {"object":"error"')):
        return None
    try:
        document = orjson.loads(events[len(b"data: ") : events.find(b"\n")])
    except orjson.JSONDecodeError:
        return None
    error = document.get("error", document)
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and code >= 500 else None

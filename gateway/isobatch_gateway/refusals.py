"""Decides how a refusal reads on the wire: OpenAI's error shape, as JSON or as an SSE frame."""

from dataclasses import dataclass

import orjson
from isobatch_contracts.errors import ErrorKind

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served. `retry_after` is in whole seconds.

    `message` says what was wrong, what was expected and what to do; it holds no upstream address,
    no key and no text of another tenant.
    """

    kind: ErrorKind
    message: str
    param: str | None = None
    retry_after: int | None = None
    closes: bool = False  # the connection is not fit for another request


class Refused(Exception):
    """Carries a refusal out of one of our own routes."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


def error_body(refusal: Refusal) -> bytes:
    """The JSON body of `refusal`."""
    kind = refusal.kind
    return orjson.dumps(
        {
            "error": {
                "message": refusal.message,
                "type": kind.type.value,
                "param": refusal.param,
                "code": kind.code,
            }
        }
    )


def is_error(body: bytes) -> bool:
    """Whether `body` is an error in OpenAI's shape."""
    try:
        document = orjson.loads(body)
    except ValueError:
        return False
    return isinstance(document, dict) and isinstance(document.get("error"), dict)


def error_headers(refusal: Refusal, body: bytes) -> Headers:
    """The response headers that go with `body`."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after))
    if refusal.kind.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.closes:
        headers.append((b"connection", b"close"))
    return headers


def error_frame(refusal: Refusal) -> bytes:
    """`refusal` inside a stream that has already begun; SDKs raise on a frame with `error`."""
    return b"data: " + error_body(refusal) + b"\n\ndata: [DONE]\n\n"

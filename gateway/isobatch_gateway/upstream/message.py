"""Decides how a request reads on the wire and which headers of an answer are passed on."""

from collections.abc import Iterable

from isobatch_contracts import headers as names

from isobatch_gateway.upstream.connection import RawHeaders

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REPLACED = frozenset(
    {b"content-length", b"date", b"server", b"set-cookie", b"via"}
    | {
        name.encode()
        for name in (
            names.CONSISTENCY_TIER,
            names.SERVED_BY,
            names.NUMERICS_FINGERPRINT,
            names.SEED,
            names.RECEIPT_ID,
            names.REQUEST_ID,
        )
    }
)
_INTERNAL = names.INTERNAL_PREFIX.encode()


def request_bytes(
    method: str, target: str, authority: str, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> bytes:
    """The whole request, ready for one write."""
    lines = [f"{method} {target} HTTP/1.1\r\nhost: {authority}\r\n".encode("latin-1")]
    lines += [name + b": " + value + b"\r\n" for name, value in headers]
    if body or method not in ("GET", "HEAD"):
        lines.append(b"content-length: %d\r\n" % len(body))
    lines += [b"\r\n", body]
    return b"".join(lines)


def passed_on(headers: RawHeaders) -> RawHeaders:
    """The headers of an answer that its client gets."""
    named = {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }
    return [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP
        and name not in _REPLACED
        and name not in named
        and not name.startswith(_INTERNAL)
    ]


def header(headers: RawHeaders, wanted: bytes) -> bytes | None:
    """The first value of `wanted` (lower case)."""
    for name, value in headers:
        if name == wanted:
            return value
    return None

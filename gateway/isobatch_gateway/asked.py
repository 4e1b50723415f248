"""Decides what the headers of a request say, before its body is looked at."""

import re
from typing import NamedTuple

from isobatch_contracts import errors, headers

from isobatch_gateway.refusals import Refusal

RawHeaders = list[tuple[bytes, bytes]]

_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,128}")
_PRINTABLE_LONG = re.compile(rb"[\x20-\x7e]{1,256}")
_FINGERPRINT = re.compile(rb"sha256:[0-9a-f]{64}")
_JSON_TYPE = re.compile(rb"application/([a-z0-9.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TEXTS = {
    name.encode(): (name, pattern, expected)
    for name, pattern, expected in (
        (headers.CONSISTENCY_TIER, _PRINTABLE_LONG, "a consistency tier"),
        (headers.CONVERSATION_ID, _PRINTABLE_LONG, "1 to 256 printable ASCII characters"),
        (headers.REQUIRE_FINGERPRINT, _FINGERPRINT, "sha256: and 64 hex digits"),
        (headers.IDEMPOTENCY_KEY, _PRINTABLE_LONG, "1 to 256 printable ASCII characters"),
    )
}
_READ = frozenset(
    (
        *(
            name.encode()
            for name in (
                headers.CONSISTENCY_TIER,
                headers.CONVERSATION_ID,
                headers.REQUIRE_FINGERPRINT,
                headers.REQUEST_ID,
                headers.IDEMPOTENCY_KEY,
            )
        ),
        b"authorization",
        b"content-type",
        b"content-length",
        b"content-encoding",
        b"traceparent",
    )
)


class Asked(NamedTuple):
    """The headers that the gateway reads; all others stop here."""

    tier: str | None = None
    conversation: str | None = None
    fingerprint: str | None = None
    idempotency_key: str | None = None
    length: int | None = None
    traceparent: bytes | None = None


def pick(raw: RawHeaders) -> dict[bytes, list[bytes]]:
    """The headers of `raw` that the gateway reads, each with all its values."""
    picked: dict[bytes, list[bytes]] = {}
    for name, value in raw:
        if name in _READ:
            picked.setdefault(name, []).append(value)
    return picked


def request_id(picked: dict[bytes, list[bytes]], fresh: str) -> str:
    """The client's own request id if it is printable ASCII of at most 128, else `fresh`."""
    values = picked.get(headers.REQUEST_ID.encode(), [])
    if len(values) == 1 and _PRINTABLE.fullmatch(values[0]):
        return values[0].decode("ascii")
    return fresh


def authorization(picked: dict[bytes, list[bytes]]) -> str | None:
    """The `Authorization` header, unless it is absent or given twice."""
    values = picked.get(b"authorization", [])
    return values[0].decode("latin-1") if len(values) == 1 else None


def read_headers(picked: dict[bytes, list[bytes]]) -> Asked | Refusal:
    """What the headers ask, or the first thing that is wrong with them."""
    problem = _media_problem(picked)
    if problem is not None:
        return problem
    texts: dict[str, str] = {}
    for raw_name, (name, pattern, expected) in _TEXTS.items():
        if raw_name not in picked:
            continue
        values = set(picked[raw_name])
        value = values.pop()
        if values:
            return _bad(name, "is given several times with different values; send one")
        if not pattern.fullmatch(value):
            return _bad(name, f"must be {expected}")
        texts[name] = value.decode("ascii")
    trace = picked.get(b"traceparent", [])
    return Asked(
        tier=texts.get(headers.CONSISTENCY_TIER),
        conversation=texts.get(headers.CONVERSATION_ID),
        fingerprint=texts.get(headers.REQUIRE_FINGERPRINT),
        idempotency_key=texts.get(headers.IDEMPOTENCY_KEY),
        length=_length(picked),
        traceparent=trace[0] if len(trace) == 1 and _TRACEPARENT.fullmatch(trace[0]) else None,
    )


def _length(picked: dict[bytes, list[bytes]]) -> int | None:
    values = picked.get(b"content-length", [])
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else None


def _media_problem(picked: dict[bytes, list[bytes]]) -> Refusal | None:
    kinds = picked.get(b"content-type", [])
    # The plain form first: a pattern costs more than the comparison.
    if kinds != [b"application/json"] and (len(kinds) != 1 or not _JSON_TYPE.fullmatch(kinds[0])):
        return Refusal(
            errors.UNSUPPORTED_MEDIA_TYPE,
            "The body must be JSON: send the header Content-Type: application/json.",
            param="content-type",
        )
    if any(value.lower() != b"identity" for value in picked.get(b"content-encoding", [])):
        return Refusal(
            errors.UNSUPPORTED_MEDIA_TYPE,
            "Compressed request bodies are not read: send the body without Content-Encoding.",
            param="content-encoding",
        )
    return None


def _bad(field: str, problem: str) -> Refusal:
    return Refusal(errors.invalid_request(field), f"The header {field} {problem}.", param=field)

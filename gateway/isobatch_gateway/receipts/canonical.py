"""Decides the canonical bytes of a record (RFC 8785), and whether bytes are canonical."""

import math
from typing import Any

import orjson
import rfc8785

_SORTED = orjson.OPT_SORT_KEYS
_SMALL = 64 * 1024  # bytes of a request that the slow reference may take up
_EXACT = range(-(1 << 53) + 1, 1 << 53)  # RFC 8785 numbers are doubles


class NotCanonical(ValueError):
    """Bytes or a value that a record cannot be; the message says why, and quotes nothing."""


def canonical(value: Any) -> bytes:
    """RFC 8785's bytes of `value`. Raises `NotCanonical` for floats and other strangers.

    Without floats and with ASCII keys orjson writes the same bytes as the reference
    implementation, at a fiftieth of its time; a property test holds the two together.
    """
    if _is_plain(value):
        return _dumped(value)
    raise NotCanonical("only objects with ASCII keys, arrays, text, integers, booleans and null")


def canonical_of_request(value: Any, size: int) -> bytes:
    """RFC 8785's bytes of what a client sent in `size` bytes, floats included.

    Raises `NotCanonical` where it has none, or where it is large and only the reference could
    write it, which would hold everybody else up.
    """
    try:
        return _dumped(_settled(value))
    except NotCanonical:
        if size > _SMALL:
            raise
    except RecursionError as exc:
        raise NotCanonical("nested too deeply") from exc
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError, UnicodeError) as exc:
        raise NotCanonical("the value has no canonical form") from exc


def parse(raw: bytes) -> Any:
    """The value whose canonical form `raw` is. Raises `NotCanonical`."""
    try:
        value = orjson.loads(raw)
    except ValueError as exc:
        raise NotCanonical("not JSON") from exc
    if canonical(value) != raw:
        raise NotCanonical("not written in the canonical form")
    return value


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_SORTED)
    except TypeError as exc:  # half of a surrogate pair, which no UTF-8 has
        raise NotCanonical("text that UTF-8 cannot hold") from exc


def _settled(value: Any) -> Any:
    """`value` in terms that orjson writes as RFC 8785 does. Raises `NotCanonical` for others."""
    kind = type(value)
    if kind is float:
        # ECMAScript writes a whole number without a point, and small ones as orjson does not.
        if value.is_integer():
            if int(value) in _EXACT:
                return int(value)
        elif 1e-5 <= abs(value) < math.inf:
            return value
    elif kind is dict:
        if all(type(name) is str and name.isascii() for name in value):
            return {name: _settled(inner) for name, inner in value.items()}
    elif kind is list:
        if set(map(type, value)) <= {int} and all(map(_EXACT.__contains__, value)):
            return value
        return [_settled(inner) for inner in value]
    elif _is_plain(value):
        return value
    raise NotCanonical("only the reference writes this")


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return value in _EXACT
    if kind is dict:
        return all(type(k) is str and k.isascii() and _is_plain(v) for k, v in value.items())
    return kind in (list, tuple) and all(_is_plain(item) for item in value)

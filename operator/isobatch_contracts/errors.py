"""Decides which refusals the HTTP API knows, each with its status and OpenAI error type.

The table is the one of the API reference; a code outside it cannot be built.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorType(StrEnum):
    """`error.type`, in OpenAI's words where OpenAI has one."""

    INVALID_REQUEST = "invalid_request_error"
    AUTHENTICATION = "authentication_error"
    PERMISSION = "permission_error"
    NOT_FOUND = "not_found_error"
    CONFLICT = "conflict_error"
    RATE_LIMIT = "rate_limit_error"
    SERVER = "server_error"
    UNAVAILABLE = "service_unavailable_error"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the API's error table. `status` is the HTTP status."""

    code: str
    status: int
    type: ErrorType


MALFORMED_REQUEST = ErrorKind("malformed_request", 400, ErrorType.INVALID_REQUEST)
INVALID_API_KEY = ErrorKind("invalid_api_key", 401, ErrorType.AUTHENTICATION)
TIER_NOT_ALLOWED = ErrorKind("tier_not_allowed", 403, ErrorType.PERMISSION)
MODEL_NOT_FOUND = ErrorKind("model_not_found", 404, ErrorType.NOT_FOUND)
PATH_NOT_FOUND = ErrorKind("path_not_found", 404, ErrorType.NOT_FOUND)
RECEIPT_NOT_FOUND = ErrorKind("receipt_not_found", 404, ErrorType.NOT_FOUND)
METHOD_NOT_ALLOWED = ErrorKind("method_not_allowed", 405, ErrorType.INVALID_REQUEST)
REQUEST_TIMEOUT = ErrorKind("request_timeout", 408, ErrorType.INVALID_REQUEST)
IDEMPOTENCY_KEY_REUSED = ErrorKind("idempotency_key_reused", 409, ErrorType.CONFLICT)
FINGERPRINT_UNAVAILABLE = ErrorKind("fingerprint_unavailable", 412, ErrorType.INVALID_REQUEST)
BODY_TOO_LARGE = ErrorKind("body_too_large", 413, ErrorType.INVALID_REQUEST)
URL_TOO_LONG = ErrorKind("url_too_long", 414, ErrorType.INVALID_REQUEST)
UNSUPPORTED_MEDIA_TYPE = ErrorKind("unsupported_media_type", 415, ErrorType.INVALID_REQUEST)
RATE_LIMIT_EXCEEDED = ErrorKind("rate_limit_exceeded", 429, ErrorType.RATE_LIMIT)
HEADERS_TOO_LARGE = ErrorKind("headers_too_large", 431, ErrorType.INVALID_REQUEST)
INTERNAL_ERROR = ErrorKind("internal_error", 500, ErrorType.SERVER)
UPSTREAM_FAILED = ErrorKind("upstream_failed", 502, ErrorType.SERVER)
POOL_UNAVAILABLE = ErrorKind("pool_unavailable", 503, ErrorType.UNAVAILABLE)
RECEIPTS_UNAVAILABLE = ErrorKind("receipts_unavailable", 503, ErrorType.UNAVAILABLE)
STRICT_UNAVAILABLE = ErrorKind("strict_unavailable", 503, ErrorType.UNAVAILABLE)
UPSTREAM_TIMEOUT = ErrorKind("upstream_timeout", 504, ErrorType.SERVER)


def request_refused(status: int) -> ErrorKind:
    """The 4xx of a replica that says no more than its status, which stays."""
    return ErrorKind("request_refused", status, ErrorType.INVALID_REQUEST)


def invalid_request(field: str) -> ErrorKind:
    """The 400 of a wrong body or header; its code names the field, e.g. `consistency_tier`."""
    return ErrorKind(field, 400, ErrorType.INVALID_REQUEST)

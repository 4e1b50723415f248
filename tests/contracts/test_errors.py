"""The refusals of the HTTP API are the table of the API reference, row by row."""

import pytest
from isobatch_contracts import errors
from isobatch_contracts.errors import ErrorKind, ErrorType, invalid_request

# The API reference's error table: status, `error.code`, `error.type`.
REFERENCE = {
    (401, "invalid_api_key", "authentication_error"),
    (403, "tier_not_allowed", "permission_error"),
    (404, "model_not_found", "not_found_error"),
    (404, "receipt_not_found", "not_found_error"),
    (409, "idempotency_key_reused", "conflict_error"),
    (412, "fingerprint_unavailable", "invalid_request_error"),
    (413, "body_too_large", "invalid_request_error"),
    (414, "url_too_long", "invalid_request_error"),
    (429, "rate_limit_exceeded", "rate_limit_error"),
    (431, "headers_too_large", "invalid_request_error"),
    (502, "upstream_failed", "server_error"),
    (503, "pool_unavailable", "service_unavailable_error"),
    (503, "receipts_unavailable", "service_unavailable_error"),
    (503, "strict_unavailable", "service_unavailable_error"),
    (504, "upstream_timeout", "server_error"),
}

# What any HTTP server must be able to say besides; the reference's prose names them.
PROTOCOL = {
    (400, "malformed_request", "invalid_request_error"),
    (404, "path_not_found", "not_found_error"),
    (405, "method_not_allowed", "invalid_request_error"),
    (408, "request_timeout", "invalid_request_error"),
    (415, "unsupported_media_type", "invalid_request_error"),
    (500, "internal_error", "server_error"),
}

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, ErrorKind)]


def test_error_table_is_the_reference_and_nothing_else() -> None:
    assert {(kind.status, kind.code, kind.type.value) for kind in KINDS} == REFERENCE | PROTOCOL


def test_each_code_has_one_row() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_constant_is_named_like_its_code(kind: ErrorKind) -> None:
    assert getattr(errors, kind.code.upper()) is kind


@pytest.mark.parametrize("field", ["consistency_tier", "model", "x-require-fingerprint"])
def test_invalid_request_is_a_400_whose_code_names_the_field(field: str) -> None:
    assert invalid_request(field) == ErrorKind(field, 400, ErrorType.INVALID_REQUEST)

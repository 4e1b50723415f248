"""Names the HTTP headers of the public API and of the hop between gateway and worker."""

CONSISTENCY_TIER = "x-consistency-tier"
CONVERSATION_ID = "x-conversation-id"
REQUIRE_FINGERPRINT = "x-require-fingerprint"
REQUEST_ID = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"

SERVED_BY = "x-served-by"
NUMERICS_FINGERPRINT = "x-numerics-fingerprint"
SEED = "x-seed"
RECEIPT_ID = "x-receipt-id"

INTERNAL_PREFIX = "x-isobatch-"
"""Headers between gateway and worker: stripped when a client sends them, never returned."""

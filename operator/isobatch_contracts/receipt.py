"""Decides what a record of the receipt ledger is: the shape that gateways write and auditors read.

A ledger is one chain of records per gateway replica. A record is JSON in the canonical form of RFC
8785, and holds no floats: a number that is no integer stands as its text, bits as hex. Each names
the SHA-256 of the record before; all but `open` are signed (ed25519, RFC 8032) over those, and
an `open` is vouched for by the next signed one, which depends on its hash.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from isobatch_contracts.base import Document
from isobatch_contracts.fields import Digest

SCHEMA: Literal["isobatch.receipt/v1"] = "isobatch.receipt/v1"
NO_RECORD = "sha256:" + "0" * 64
"""`prev` of a chain's first record."""

DIGESTS_PATH = "/isobatch/v1/digests/"
"""A strict worker's side channel; the request id that the gateway sent follows."""

Kind = Literal[
    "key",  # a public key that signs from here on; signed by the one before (the first by itself)
    "open",  # a request was taken; durable before the first byte of its answer
    "final",  # what became of it; durable before the last content event
    "checkpoint",  # the chain's head, to be published elsewhere
    "tombstone",  # all before it, up to `through`, passed its retention and was removed
    "replay",  # a receipt was run again, with what verdict
    "suspect",  # receipts of a replica in an interval are not to be relied on
    "violation",  # a replica gave other bits than the expected
]
ReceiptId = Annotated[str, StringConstraints(pattern=r"^rcpt-[0-9a-f]{32}$")]
KeyId = Annotated[str, StringConstraints(pattern=r"^ed25519:[0-9a-f]{16}$")]


class Record(Document):
    """One record; `at` is milliseconds since 1970, UTC."""

    schema_id: Literal["isobatch.receipt/v1"] = Field(SCHEMA, alias="schema")
    chain: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,63}$")]
    seq: Annotated[int, Field(ge=1)]
    prev: Digest
    kind: Kind
    at: Annotated[int, Field(ge=0)]
    key: KeyId
    receipt: ReceiptId | None = None
    body: dict[str, Any]


class SequenceDigests(Document):
    """What a worker says of one sequence of an answer: digests of the first `tokens` tokens.

    `token_ids`: SHA-256 over the ids as little-endian int32. `logprobs`: SHA-256 over the float32
    bits, little-endian, per token the sampled one and then the top ones asked for; None when no
    logprobs were asked for. `ids` are there when asked for.
    """

    index: int
    prompt: int  # which prompt of the request it continues
    prompt_tokens: int
    tokens: int
    finished: bool
    token_ids: Digest
    logprobs: Digest | None = None
    ids: tuple[int, ...] | None = None


class AnswerDigests(Document):
    """The body of the side channel."""

    sequences: tuple[SequenceDigests, ...]

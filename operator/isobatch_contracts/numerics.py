"""Decides what a worker says of its numerics: the body of `GET /isobatch/v1/numerics`.

The path answers 200 with `Certified` once the strict pool's schedules are admitted, else 503 with
`NotCertified`; it is the strict pool's readiness.
"""

from typing import Literal

from isobatch_contracts.base import Document
from isobatch_contracts.fields import Digest

NUMERICS_PATH = "/isobatch/v1/numerics"


class OperatorSummary(Document):
    """One operator shape of the plan: what was proved and which schedules were admitted."""

    operator: str
    shape: str
    reference: str
    admitted: tuple[str, ...]
    refused: tuple[str, ...]
    comparisons: int


class Certified(Document):
    """A worker that may serve strict requests."""

    state: Literal["certified"] = "certified"
    fingerprint: Digest
    model_digest: Digest
    device: str
    versions: dict[str, str]
    operators: tuple[OperatorSummary, ...]
    vocabulary: int | None = None  # tokens that the model has an id for
    from_cache: bool
    certification_seconds: float


class NotCertified(Document):
    """A worker that may not, yet or at all; `reason` says why and what to do."""

    state: Literal["certifying", "refused"]
    reason: str

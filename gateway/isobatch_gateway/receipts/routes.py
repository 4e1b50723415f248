"""Performs: the HTTP routes of receipts. Whoever has no key of the tenant's finds nothing there."""

from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from isobatch_contracts import errors
from isobatch_contracts.base import Document

from isobatch_gateway.errors import LedgerUnavailable
from isobatch_gateway.orders import Principal
from isobatch_gateway.receipts.keeper import Keeper
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.reading import Found, check, find, listed
from isobatch_gateway.receipts.replay import Replayed, Replayer
from isobatch_gateway.receipts.signing import PublicKey, Trusted
from isobatch_gateway.receipts.store import StoreFailed
from isobatch_gateway.receipts.verdict import Verdict
from isobatch_gateway.refusals import Refusal, Refused
from isobatch_gateway.runtime import Runtime

RECEIPTS = "/isobatch/v1/receipts"
KEYS = "/isobatch/v1/receipt-keys"
_MOST_LISTED = 10_000
_ERROR = {"model": dict[str, Any], "description": "OpenAI's error shape."}
_RESPONSES: dict[int | str, dict[str, Any]] = {400: _ERROR, 404: _ERROR, 503: _ERROR}
Id = Annotated[str, Path(min_length=1, max_length=64, description="`rcpt-` and 32 hex digits.")]
Since = Annotated[int, Query(ge=0, lt=1 << 53, description="Milliseconds since 1970.")]
Limit = Annotated[int, Query(ge=1, le=_MOST_LISTED)]


class ReceiptList(Document):
    """Ids of receipts, the oldest first."""

    receipts: list[str]


class Problem(Document):
    """Something wrong with a record. `seq`: its number in its chain."""

    chain: str
    seq: int
    problem: str


class Verification(Document):
    """Whether the records of a receipt are what the gateway signed."""

    receipt: str
    verified: bool
    suspect: bool
    problems: list[Problem]


class FirstDifference(Document):
    """Where two answers part: the sequence, and the token in it, from 0."""

    sequence: int
    token: int


class RecordPlace(Document):
    """Where a record stands."""

    chain: str
    seq: int
    digest: str


class ReplayView(Document):
    """What a replay showed."""

    receipt: str
    verdict: Verdict
    reason: str | None
    first_difference: FirstDifference | None
    replica: str | None
    record: RecordPlace | None


def add_receipts(app: FastAPI, runtime: Runtime, known: Any) -> None:
    """Add the routes; `known` gives the principal."""

    @app.get(RECEIPTS, tags=["receipts"], responses=_RESPONSES)
    async def receipts(
        principal: Principal = known, since: Since = 0, limit: Limit = 1000
    ) -> ReceiptList:
        """Ids of this tenant's receipts that ended at or after `since`."""
        _, ledger = _open(runtime)
        try:
            ids = await listed(ledger, since, principal.tenant, limit)
        except StoreFailed as exc:
            raise Refused(_unreadable()) from exc
        return ReceiptList(receipts=ids)

    @app.get(KEYS, tags=["receipts"], responses=_RESPONSES)
    async def receipt_keys(principal: Principal = known) -> list[PublicKey]:  # noqa: ARG001
        """The public keys that receipts are signed with. Auditors get them another way too."""
        keeper, _ = _open(runtime)
        return [PublicKey(id=s.id, public=s.public.hex()) for s in keeper.signers]

    @app.get(f"{RECEIPTS}/{{receipt}}", tags=["receipts"], responses=_RESPONSES)
    async def receipt(receipt: Id, principal: Principal = known) -> Response:
        """The records of one receipt, each with its signature."""
        found = await _found(runtime, receipt, principal)
        return Response(found.document(), media_type="application/json")

    @app.get(f"{RECEIPTS}/{{receipt}}/verify", tags=["receipts"], responses=_RESPONSES)
    async def verify(receipt: Id, principal: Principal = known) -> Verification:
        """Whether its signatures hold. To trust nobody, verify it yourself: `isobatch receipt`."""
        found = await _found(runtime, receipt, principal)
        keeper, _ = _open(runtime)
        problems = check(found, Trusted({s.id: s.public for s in keeper.signers}))
        return Verification(
            receipt=receipt,
            verified=not problems,
            suspect=bool(found.suspects),
            problems=[Problem(**problem._asdict()) for problem in problems],
        )

    @app.post(f"{RECEIPTS}/{{receipt}}/replay", tags=["receipts"], responses=_RESPONSES)
    async def replay(receipt: Id, request: Request, principal: Principal = known) -> ReplayView:
        """Run it again. The body is the request itself, where only digests of it are kept."""
        found = await _found(runtime, receipt, principal)
        given = await request.body()
        if len(given) > runtime.settings.bounds.body_bytes:
            raise Refused(Refusal(errors.BODY_TOO_LARGE, "The request is larger than any may be."))
        keeper, ledger = _open(runtime)
        replayer = Replayer(keeper, runtime.pools, runtime.settings.timeouts.first_byte)
        opened = found.body("open") or {}
        service = runtime.fleet.services.get(opened.get("model") or "")
        salt = runtime.salt(principal.tenant)
        try:
            replayed = await replayer.replay(ledger, found, given, service, salt)
        except (StoreFailed, LedgerUnavailable) as exc:
            raise Refused(_unreadable()) from exc
        return _view(receipt, replayed)


def _open(runtime: Runtime) -> tuple[Keeper, Ledger]:
    if runtime.receipts is None:
        raise Refused(
            Refusal(errors.RECEIPT_NOT_FOUND, "This gateway keeps no receipts; see --receipts.")
        )
    if runtime.receipts.ledger is None:
        raise Refused(_unreadable())
    return runtime.receipts, runtime.receipts.ledger


async def _found(runtime: Runtime, receipt: str, principal: Principal) -> Found:
    _, ledger = _open(runtime)
    try:
        found = await find(ledger, receipt, principal.tenant)
    except StoreFailed as exc:
        raise Refused(_unreadable()) from exc
    if found is None:
        raise Refused(
            Refusal(
                errors.RECEIPT_NOT_FOUND,
                "There is no such receipt, or it is not this key's tenant's. The header "
                "X-Receipt-Id of an answer has its id.",
            )
        )
    return found


def _unreadable() -> Refusal:
    return Refusal(
        errors.RECEIPTS_UNAVAILABLE,
        "The receipt ledger does not answer. Try again; the gateway's log says what is wrong.",
        retry_after=5,
    )


def _view(receipt: str, replayed: Replayed) -> ReplayView:
    finding, record = replayed.finding, replayed.record
    return ReplayView(
        receipt=receipt,
        verdict=finding.verdict,
        reason=finding.reason,
        first_difference=None
        if finding.first is None
        else FirstDifference(**finding.first._asdict()),
        replica=replayed.replica,
        record=None
        if record is None
        else RecordPlace(chain=record.chain, seq=record.seq, digest=record.digest),
    )

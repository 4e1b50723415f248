"""Decides which requests get a receipt, and what it says of them at the beginning."""

from typing import NamedTuple

from isobatch_contracts.resource import Receipts
from isobatch_contracts.tiers import Tier

from isobatch_gateway.asked import Asked
from isobatch_gateway.body import GENERATING, Body, read_body
from isobatch_gateway.client import Record
from isobatch_gateway.fleet import Fleet, Service
from isobatch_gateway.orders import Order, Principal
from isobatch_gateway.receipts.facts import Asking, mode_of
from isobatch_gateway.receipts.keeper import Keeper
from isobatch_gateway.receipts.request import RequestReceipt
from isobatch_gateway.refusals import Refusal
from isobatch_gateway.tiers import BODY_FIELD, Declared, bits_asked


class Reading(NamedTuple):
    """A request once its body was read: what was made of it, or why not."""

    record: Record
    asked: Asked
    raw: bytes
    made: tuple[Service, Order] | Refusal


def take_receipt(
    keeper: Keeper, reading: Reading, fleet: Fleet, principal: Principal
) -> RequestReceipt | None:
    """The receipt of a request that gets one; its `open` record is on its way."""
    record, asked = reading.record, reading.asked
    if record.path not in GENERATING:
        return None
    seed = None
    if isinstance(reading.made, Refusal):
        read = read_body(reading.raw)
        body = None if isinstance(read, Refusal) else read
        service = fleet.services.get(body.model or "") if body is not None else None
        tier = record.tier or _refused_tier(asked, body, service, principal)
    else:
        service, order = reading.made
        body, tier, seed = order.body, order.tier, order.seed
    if tier is None:
        return None
    mode = mode_of(tier, Receipts() if service is None else service.table.receipts)
    if mode is None:
        return None
    asking = Asking(
        path=record.path,
        request_id=record.request_id,
        tenant=principal.tenant,
        key_id=principal.key_id,
        tier=tier,
        mode=mode,
        model=None if service is None else service.table.model,
        service=None if service is None else service.table.service,
        fingerprint=asked.fingerprint,
        seed=seed,
        raw=reading.raw,
        body=body,
    )
    return keeper.take(asking)


def _refused_tier(
    asked: Asked, body: Body | None, service: Service | None, principal: Principal
) -> Tier | None:
    """The bitwise tier that was asked for by a request that was given none."""
    declared = Declared(asked.tier)
    if body is not None:
        declared = Declared(asked.tier, body.document.get(BODY_FIELD), body.suffix)
    tiers = None if service is None else service.table.tiers
    return bits_asked(declared, principal.policy, tiers)

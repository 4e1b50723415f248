"""Decides what is to be done for a request: for whom, in which tier, with which bytes.

What is made anew for every request (here, and in the modules that this one calls) is a named tuple:
a frozen dataclass takes five times as long to make, and a request makes a dozen of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from isobatch_contracts import errors
from isobatch_contracts.resource import TierLimits
from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName, Tier

from isobatch_gateway import identity
from isobatch_gateway.asked import Asked
from isobatch_gateway.body import (
    GENERATING,
    SALTED,
    Body,
    Seeding,
    request_digest,
    rewrite,
    seed_of,
    strict_refusal,
)
from isobatch_gateway.keys import Key
from isobatch_gateway.refusals import Refusal
from isobatch_gateway.routing import Asker, mark_of
from isobatch_gateway.tiers import BODY_FIELD, Declared, Policy, pools_for, resolve

ANONYMOUS_TENANT = "anonymous"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. Without a keys file everybody is the one anonymous tenant."""

    tenant: str = ANONYMOUS_TENANT
    key_id: str | None = None
    policy: Policy = field(default_factory=Policy)
    models: tuple[str, ...] | None = None
    limits: Mapping[Tier, TierLimits] = field(default_factory=dict)

    @classmethod
    def of(cls, key: Key) -> "Principal":
        """The holder of `key`."""
        return cls(key.tenant, key.id, key.policy, key.models, key.limits)

    def may_see(self, model: str) -> bool:
        """Whether `model` exists for this principal."""
        return self.models is None or model in self.models


class Chance(NamedTuple):
    """The random numbers of one request; a test or a replay pins them."""

    draw: float
    seed: int


class Order(NamedTuple):
    """What is to be done. `digest` is set where an idempotency key must be held against it."""

    path: str
    tier: Tier
    pools: tuple[PoolName, ...]
    asker: Asker
    payload: bytes
    seed: int | None
    idempotency_key: str | None
    digest: bytes | None
    body: Body


def find_model(body: Body, models: Mapping[str, object], principal: Principal) -> str | Refusal:
    """The served model that `body` asks for."""
    visible = [name for name in models if principal.may_see(name)]
    if body.model is None:
        if len(visible) == 1:
            return visible[0]
        return Refusal(
            errors.invalid_request("model"),
            "The body names no model; GET /v1/models lists those that are served.",
            param="model",
        )
    if body.model not in visible:
        return Refusal(
            errors.MODEL_NOT_FOUND,
            f"The model {body.model[:256]!r} does not exist or this key may not use it; "
            "GET /v1/models lists those that are served.",
            param="model",
        )
    return body.model


def tier_of(
    path: str, asked: Asked, body: Body, principal: Principal, table: RoutingTable
) -> Tier | Refusal:
    """The tier of the request, or why it has none."""
    declared = Declared(asked.tier, body.document.get(BODY_FIELD), body.suffix)
    return resolve(declared, principal.policy, table.tiers, path)


def make_order(
    path: str,
    asked: Asked,
    body: Body,
    tier: Tier,
    context: "Context",
) -> Order | Refusal:
    """The order for a request that was given `tier`."""
    principal, table, secret = context.principal, context.table, context.secret
    seed = None
    if tier.is_bitwise and path in GENERATING:
        seeding = Seeding(secret, principal.tenant, asked.idempotency_key, context.chance.seed)
        refused = strict_refusal(body)
        if refused is not None:
            return refused
        given = seed_of(body, seeding, path)
        if isinstance(given, Refusal):
            return given
        seed = given
    salt = context.salt if path in SALTED else None
    payload = rewrite(body, salt=salt, seed=seed)
    if isinstance(payload, Refusal):
        return payload
    asker = Asker(
        tenant=principal.tenant,
        conversation=asked.conversation or identity.conversation(body.document),
        draw=context.chance.draw,
        fingerprint=asked.fingerprint,
    )
    percent = table.standard_to_strict
    is_migrated = percent > 0 and mark_of(asker, "migration") < percent
    has_key = asked.idempotency_key is not None
    return Order(
        path=path,
        tier=tier,
        pools=pools_for(tier, table.tiers, is_migrated=is_migrated),
        asker=asker,
        payload=payload,
        seed=seed,
        idempotency_key=asked.idempotency_key,
        digest=request_digest(path, body) if has_key else None,
        body=body,
    )


class Context(NamedTuple):
    """What an order is made in: who asks, of which table, under which secret and chance.

    `salt` is the tenant's `identity.cache_salt`.
    """

    principal: Principal
    salt: str
    table: RoutingTable
    secret: bytes
    chance: Chance

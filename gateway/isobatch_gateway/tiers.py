"""Decides which tier a request is given, from what it declares and what it may have."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from isobatch_contracts import errors, headers
from isobatch_contracts.resource import StandardFallback, Tiers
from isobatch_contracts.tiers import PoolName, Tier

from isobatch_gateway.refusals import Refusal

_NAMES = ", ".join(tier.value for tier in Tier)
BODY_FIELD = "consistency_tier"


class Declared(NamedTuple):
    """What one request says of its tier. `body` is the field as parsed; None is not declared."""

    header: str | None = None
    body: object = None
    suffix: Tier | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """What a key says of tiers; the default one says nothing."""

    default: Tier | None = None
    allowed: frozenset[Tier] = frozenset(Tier)


def split_model(name: str) -> tuple[str, Tier | None]:
    """`("llama", STRICT)` for `llama:strict`; a suffix that is no tier belongs to the name."""
    base, colon, suffix = name.rpartition(":")
    if colon and base and suffix in set(Tier):
        return base, Tier(suffix)
    return name, None


def resolve(declared: Declared, policy: Policy, tiers: Tiers, path: str) -> Tier | Refusal:
    """The tier of a request to `path`, or why it has none."""
    found = _declarations(declared)
    if isinstance(found, Refusal):
        return found
    if len(set(found.values())) > 1:
        said = ", ".join(f"{place} says {tier.value}" for place, tier in found.items())
        return Refusal(
            errors.invalid_request(BODY_FIELD),
            f"The request declares two different tiers: {said}. Declare one.",
            param=BODY_FIELD,
        )
    asked = next(iter(found.values()), None)
    if path == "/v1/embeddings":
        if asked is not None and asked.is_bitwise:
            return Refusal(
                errors.invalid_request(BODY_FIELD),
                f"Embeddings are served in the standard tier only; the request asks for "
                f"{asked.value}. Leave the tier out, or declare standard.",
                param=BODY_FIELD,
            )
        asked = Tier.STANDARD
    tier = asked or policy.default or tiers.default
    return _permitted(tier, policy, tiers.allowed)


def bits_asked(declared: Declared, policy: Policy, tiers: Tiers | None) -> Tier | None:
    """The bitwise tier that a request without a tier had asked for, if any: it gets a receipt."""
    said = (declared.header, declared.body, declared.suffix)
    given = [value for value in said if value is not None]
    if not given:
        given = [policy.default or (tiers.default if tiers is not None else None)]
    wanted = [tier for tier in (Tier.STRICT, Tier.VERIFIED) if tier in given]
    return wanted[0] if wanted else None


def _declarations(declared: Declared) -> dict[str, Tier] | Refusal:
    found: dict[str, Tier] = {}
    if declared.header is not None:
        if declared.header not in set(Tier):
            return _unknown(headers.CONSISTENCY_TIER, declared.header)
        found["the header"] = Tier(declared.header)
    if declared.body is not None:
        if not isinstance(declared.body, str) or declared.body not in set(Tier):
            return _unknown(BODY_FIELD, declared.body)
        found["the body"] = Tier(declared.body)
    if declared.suffix is not None:
        found["the model's suffix"] = declared.suffix
    return found


def _unknown(field: str, value: object) -> Refusal:
    shown = repr(value)[:64]
    return Refusal(
        errors.invalid_request(field),
        f"{field} is {shown}, which is no consistency tier. Use one of: {_NAMES}.",
        param=field,
    )


def _permitted(tier: Tier, policy: Policy, offered: Collection[Tier]) -> Tier | Refusal:
    if tier not in offered:
        names = ", ".join(t.value for t in offered)
        return Refusal(
            errors.TIER_NOT_ALLOWED,
            f"This service does not offer the tier {tier.value}; it offers: {names}.",
            param=BODY_FIELD,
        )
    if tier not in policy.allowed:
        names = ", ".join(t.value for t in Tier if t in policy.allowed)
        return Refusal(
            errors.TIER_NOT_ALLOWED,
            f"This API key may not use the tier {tier.value}; it may use: {names}.",
            param=BODY_FIELD,
        )
    return tier


def pools_for(tier: Tier, tiers: Tiers, *, is_migrated: bool) -> tuple[PoolName, ...]:
    """The pools that may serve `tier`, in order of preference.

    Strict and verified have one pool and no second. `is_migrated` is whether this conversation is
    in the share of standard traffic that the strict pool serves.
    """
    if tier.is_bitwise:
        return (PoolName.STRICT,)
    if is_migrated:
        return (PoolName.STRICT, PoolName.THROUGHPUT)
    if tiers.standard_fallback is StandardFallback.STRICT:
        return (PoolName.THROUGHPUT, PoolName.STRICT)
    return (PoolName.THROUGHPUT,)

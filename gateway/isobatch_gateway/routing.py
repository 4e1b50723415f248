"""Decides which revision and replica serve a request, from a snapshot of what could."""

import math
from typing import NamedTuple

from isobatch_contracts.tiers import PoolName

from isobatch_gateway import identity

_SPREAD = 1.25  # a replica may hold so many times the average before its conversations move on


class Candidate(NamedTuple):
    """One replica that could serve now. `load` is in requests; `weight` its revision's percent."""

    name: str
    pool: PoolName
    revision: str
    weight: int
    load: int
    fingerprint: str | None = None


class Asker(NamedTuple):
    """Whose request it is. `conversation` None: nothing to be faithful to."""

    tenant: str
    conversation: str | None
    draw: float  # in [0, 1): the caller's random number, for those without a conversation
    fingerprint: str | None = None


def mark_of(asker: Asker, purpose: str) -> float:
    """Where `asker` stands among all, in percent: fixed for a conversation."""
    if asker.conversation is None:
        return asker.draw * 100
    return identity.share(purpose, asker.tenant, asker.conversation) * 100


def choose(
    candidates: tuple[Candidate, ...], pools: tuple[PoolName, ...], asker: Asker
) -> Candidate | None:
    """The replica for `asker`: from the first of `pools` that has one, and from no other pool."""
    for pool in pools:
        found = _in_pool([c for c in candidates if c.pool is pool], asker)
        if found is not None:
            return found
    return None


def _in_pool(candidates: list[Candidate], asker: Asker) -> Candidate | None:
    if asker.fingerprint is not None:
        # Who asks for a fingerprint may have a revision that is being left (weight 0).
        matching = [c for c in candidates if c.fingerprint == asker.fingerprint]
        return _replica(matching, asker) if matching else None
    weighted = [c for c in candidates if c.weight > 0]
    if not weighted:
        return None
    revision = choose_revision({c.revision: c.weight for c in weighted}, asker)
    return _replica([c for c in weighted if c.revision == revision], asker)


def choose_revision(weights: dict[str, int], asker: Asker) -> str:
    """The revision of `asker` among those with a ready replica; `weights` are above 0.

    Names are sorted, so that a revision's share grows and shrinks at one edge: while a rollout
    raises one weight and lowers the other, a conversation changes sides at most once.
    """
    if len(weights) == 1:
        return next(iter(weights))
    mark = mark_of(asker, "revision") * sum(weights.values()) / 100
    for name in sorted(weights):
        mark -= weights[name]
        if mark < 0:
            return name
    return max(weights)


def _replica(candidates: list[Candidate], asker: Asker) -> Candidate:
    if len(candidates) == 1:
        return candidates[0]
    if asker.conversation is None:
        least = min(c.load for c in candidates)
        tied = [c for c in candidates if c.load == least]
        return tied[int(asker.draw * len(tied))]
    total = sum(c.load for c in candidates)
    bound = math.ceil(_SPREAD * (total + 1) / len(candidates))
    ranked = sorted(
        candidates,
        key=lambda c: identity.share("replica", asker.tenant, asker.conversation or "", c.name),
    )
    for candidate in ranked:
        if candidate.load + 1 <= bound:
            return candidate
    return min(ranked, key=lambda c: c.load)

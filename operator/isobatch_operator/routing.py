"""Decides the routing table: which revision of each pool is routed, and to which replicas."""

from collections.abc import Iterable
from dataclasses import dataclass

from isobatch_contracts import routing_table as contract
from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName

from isobatch_operator.observed import Observed, Ready, Replica
from isobatch_operator.revision import Revision, service_pools


@dataclass(frozen=True, slots=True)
class Route:
    """The one revision of a pool that is routed, and its replicas; all of one fingerprint."""

    revision: Revision
    fingerprint: str | None
    replicas: tuple[Replica, ...]


def routable(
    replicas: Iterable[Replica], pool: PoolName, revision: str, ordinals: int
) -> tuple[Replica, ...]:
    """Ready replicas of the first `ordinals` slots; a strict one only with a fingerprint."""
    return tuple(
        sorted(
            (
                replica
                for replica in replicas
                if replica.slot.pool is pool
                and replica.slot.revision == revision
                and replica.slot.ordinal < ordinals
                and isinstance(replica.state, Ready)
                and (pool is PoolName.THROUGHPUT or replica.state.fingerprint is not None)
            ),
            key=lambda replica: replica.slot,
        )
    )


def admitted_fingerprint(replicas: tuple[Replica, ...], published: str | None) -> str | None:
    """The one fingerprint of a strict revision: the published one while a replica still has it."""
    held = [r.state.fingerprint for r in replicas if isinstance(r.state, Ready)]
    if published in held:
        return published
    # The most common; ties go to the lowest ordinal, which `held` has first.
    return max(held, key=held.count, default=None)


def choose_route(
    pool: PoolName, candidates: tuple[Revision, ...], desired: int, observed: Observed
) -> Route | None:
    """The first of `candidates` with someone ready in `pool`; None if there is none."""
    for revision in candidates:
        ready = routable(observed.replicas, pool, revision.name, desired)
        if not ready:
            continue
        if pool is PoolName.THROUGHPUT:
            return Route(revision, None, ready)
        fingerprint = admitted_fingerprint(ready, _published(observed, pool, revision.name))
        same = tuple(
            r for r in ready if isinstance(r.state, Ready) and r.state.fingerprint == fingerprint
        )
        return Route(revision, fingerprint, same)
    return None


def _published(observed: Observed, pool: PoolName, revision: str) -> str | None:
    if observed.table is None:
        return None
    for entry in observed.table.revisions:
        if entry.pool is pool and entry.name == revision:
            return entry.fingerprint
    return None


def next_table(
    service: InferenceService,
    target: Revision,
    routes: dict[PoolName, Route | None],
    previous: contract.RoutingTable | None,
) -> contract.RoutingTable:
    """The table that says `routes`: `previous` itself if nothing changed, else the next version.

    A table has one model name. While two revisions that serve different names are routed, the
    older one's counts, and the other pool has no weight.
    """
    names = {r.revision.served_name for r in routes.values() if r and r.revision != target}
    model = min(names, default=target.served_name)
    entries = tuple(
        _entry(pool, target, route if route and route.revision.served_name == model else None)
        for pool, route in routes.items()
    )
    table = contract.RoutingTable(
        version=previous.version if previous else 1,
        service=service.metadata.name,
        model=model,
        tiers=service.spec.tiers,
        drift=service.spec.drift,
        sentinels=service.spec.sentinels,
        receipts=service.spec.receipts,
        pools=tuple(service_pools(service)),
        revisions=entries,
    )
    if previous is None:
        return table
    if contract.dump(table) == contract.dump(previous):
        return previous
    return table.model_copy(update={"version": previous.version + 1})


def _entry(pool: PoolName, target: Revision, route: Route | None) -> contract.Revision:
    if route is None:
        return contract.Revision(name=target.name, pool=pool, weight=0)
    return contract.Revision(
        name=route.revision.name,
        pool=pool,
        weight=100,
        fingerprint=route.fingerprint,
        endpoints=tuple(contract.Endpoint(name=r.slot.name, url=r.url) for r in route.replicas),
    )

"""Decides the routing table: which revisions of each pool are routed, and to which replicas."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from isobatch_contracts import routing_table as contract
from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName

from isobatch_operator.observed import Observed, Ready, Replica
from isobatch_operator.revision import Revision, service_pools


@dataclass(frozen=True, slots=True)
class Route:
    """One revision of a pool and its replicas that may be routed; all of one fingerprint."""

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


def route(pool: PoolName, revision: Revision, ordinals: int, observed: Observed) -> Route:
    """The replicas of `revision` that may be routed in `pool`: ready, and of one fingerprint.

    Without any the fingerprint is the published one: what the revision had when it answered.
    """
    ready = routable(observed.replicas, pool, revision.name, ordinals)
    if pool is PoolName.THROUGHPUT:
        return Route(revision, None, ready)
    published = _published(observed, pool, revision.name)
    if not ready:
        return Route(revision, published, ())
    fingerprint = admitted_fingerprint(ready, published)
    same = tuple(
        r for r in ready if isinstance(r.state, Ready) and r.state.fingerprint == fingerprint
    )
    return Route(revision, fingerprint, same)


def _published(observed: Observed, pool: PoolName, revision: str) -> str | None:
    if observed.table is None:
        return None
    for entry in observed.table.revisions:
        if entry.pool is pool and entry.name == revision:
            return entry.fingerprint
    return None


def next_table(
    service: InferenceService,
    model: str,
    shares: Mapping[PoolName, tuple[tuple[Route, int], ...]],
    previous: contract.RoutingTable | None,
    service_name: Callable[[PoolName, str], str] | None = None,
) -> contract.RoutingTable:
    """The table that gives each route its share: `previous` itself if nothing changed.

    `service_name` says where the replicas of a revision are found, instead of naming each.
    """
    table = contract.RoutingTable(
        version=previous.version if previous else 1,
        service=service.metadata.name,
        model=model,
        tiers=service.spec.tiers,
        drift=service.spec.drift,
        sentinels=service.spec.sentinels,
        receipts=service.spec.receipts,
        pools=tuple(service_pools(service)),
        revisions=tuple(
            _entry(pool, way, weight, service_name)
            for pool, ways in shares.items()
            for way, weight in [share for share in ways if share[1] > 0] or ways[:1]
        ),
    )
    if previous is None:
        return table
    if contract.dump(table) == contract.dump(previous):
        return previous
    return table.model_copy(update={"version": previous.version + 1})


def _entry(
    pool: PoolName,
    way: Route,
    weight: int,
    service_name: Callable[[PoolName, str], str] | None,
) -> contract.Revision:
    """One entry. Nobody is named in one without weight: who is left there is being drained."""
    name = way.revision.name
    if weight == 0:
        return contract.Revision(name=name, pool=pool, weight=0)
    if service_name is not None:
        return contract.Revision(
            name=name,
            pool=pool,
            weight=weight,
            fingerprint=way.fingerprint,
            service=service_name(pool, name),
        )
    return contract.Revision(
        name=name,
        pool=pool,
        weight=weight,
        fingerprint=way.fingerprint,
        endpoints=tuple(contract.Endpoint(name=r.slot.name, url=r.url) for r in way.replicas),
    )

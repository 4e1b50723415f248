"""Decides what to do next for one service. Same input, same plan: safe to repeat after any crash.

Level-based: nothing is remembered but what `Observed` says. An adapter performs the actions on
processes or on a cluster; what it returns as `stable` the adapter gives back next time.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from isobatch_contracts.resource import InferenceService
from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName

from isobatch_operator.backoff import Backoff, restart_at
from isobatch_operator.observed import (
    Observed,
    Ready,
    Refused,
    Replica,
    Slot,
    Starting,
    Stopping,
    Unready,
)
from isobatch_operator.revision import Revision, revision_of, service_pools
from isobatch_operator.routing import choose_route, next_table, routable
from isobatch_operator.status import Status, summarise


class StopReason(StrEnum):
    """Why a replica is stopped: nobody wants it, or it no longer answers."""

    UNWANTED = "unwanted"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class PublishTable:
    """Make `table` the one that gateways read."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Fill an empty slot with a replica of `revision`."""

    slot: Slot
    revision: Revision


@dataclass(frozen=True, slots=True)
class StopReplica:
    """Empty a slot. The replica has been drained, or there is nothing to drain."""

    slot: Slot
    reason: StopReason


Action = PublishTable | StartReplica | StopReplica


@dataclass(frozen=True, slots=True)
class Policy:
    """The times that the plan goes by."""

    backoff: Backoff = field(default_factory=Backoff)
    drain_settle_seconds: float = 2.0  # for the gateway to read the table that lacks the replica
    drain_deadline_seconds: float = 30.0
    start_deadline_seconds: float = 3600.0  # a first start may download a model
    unready_deadline_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, the table that holds afterwards, and what there is to say meanwhile."""

    actions: tuple[Action, ...]
    table: RoutingTable
    status: Status
    stable: Revision | None


def plan(
    service: InferenceService, observed: Observed, now: float, policy: Policy | None = None
) -> Plan:
    """Decide the next actions for `service`. `now` is in seconds since the epoch."""
    policy = policy or Policy()
    target = revision_of(service)
    desired = {name: pool.desired_replicas for name, pool in service_pools(service).items()}
    is_complete = all(
        len(routable(observed.replicas, pool, target.name, count)) == count
        for pool, count in desired.items()
    )
    stable = target if is_complete else observed.stable
    kept = _kept_revisions(service, target, stable)
    table = next_table(
        service,
        target,
        {pool: choose_route(pool, kept, count, observed) for pool, count in desired.items()},
        observed.table,
    )
    wanted = _wanted_slots(kept, desired)
    actions = (
        *((PublishTable(table),) if table != observed.table else ()),
        *_stops(wanted, observed, now, policy),
        *_starts(service, wanted, observed, now, policy),
    )
    status = summarise(target, desired, observed, table, policy.backoff)
    return Plan(actions, table, status, stable)


def _kept_revisions(
    service: InferenceService, target: Revision, stable: Revision | None
) -> tuple[Revision, ...]:
    """The revisions that should run, in routing order: stable until the target is complete."""
    if stable is None or stable == target or _stops_first(service):
        return (target,)
    return (stable, target)


def _stops_first(service: InferenceService) -> bool:
    rollout = service.spec.rollout
    return rollout.strategy == "Recreate" or rollout.capacity == "InPlace"


def _wanted_slots(kept: tuple[Revision, ...], desired: dict[PoolName, int]) -> dict[Slot, Revision]:
    return {
        Slot(pool, revision.name, ordinal): revision
        for revision in kept
        for pool, count in desired.items()
        if pool in revision.pools
        for ordinal in range(count)
    }


def _stops(
    wanted: dict[Slot, Revision], observed: Observed, now: float, policy: Policy
) -> tuple[StopReplica, ...]:
    stops = []
    for replica in observed.replicas:
        if replica.slot not in wanted:
            if _is_drained(replica, now, policy):
                stops.append(StopReplica(replica.slot, StopReason.UNWANTED))
        elif _is_lost(replica, now, policy):
            stops.append(StopReplica(replica.slot, StopReason.UNHEALTHY))
    return tuple(stops)


def _is_drained(replica: Replica, now: float, policy: Policy) -> bool:
    """Whether stopping `replica` costs nobody an answer, or it has had its time."""
    age = 0.0 if replica.unrouted_since is None else now - replica.unrouted_since
    match replica.state:
        case Starting() | Refused():
            return True  # serves nobody, or must not
        case Ready(requests=requests):
            is_idle = requests == 0 and age >= policy.drain_settle_seconds
            return is_idle or age >= policy.drain_deadline_seconds
        case Unready():
            return age >= policy.drain_deadline_seconds
        case Stopping():
            return False
        case _:
            assert_never(replica.state)


def _is_lost(replica: Replica, now: float, policy: Policy) -> bool:
    """Whether a wanted replica is past hope, so that a new one should take its place."""
    match replica.state:
        case Starting(since):
            return now - since >= policy.start_deadline_seconds
        case Unready(since):
            return now - since >= policy.unready_deadline_seconds
        case Ready() | Refused() | Stopping():
            return False
        case _:
            assert_never(replica.state)


def _starts(
    service: InferenceService,
    wanted: dict[Slot, Revision],
    observed: Observed,
    now: float,
    policy: Policy,
) -> tuple[StartReplica, ...]:
    filled = {replica.slot for replica in observed.replicas}
    # Recreate and InPlace: the places of the old revision must be free first.
    blocked = (
        {slot.pool for slot in filled if slot not in wanted} if _stops_first(service) else set()
    )
    return tuple(
        StartReplica(slot, revision)
        for slot, revision in wanted.items()
        if slot not in filled
        and slot.pool not in blocked
        and now >= restart_at(observed.failures.get(slot, ()), policy.backoff)
    )

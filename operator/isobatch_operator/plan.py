"""Decides what to do next for one service. Same input, same plan: safe to repeat after any crash.

Level-based: nothing is remembered but what `Observed` says. An adapter performs the actions on
processes or on a cluster; the `rollout` and `revisions` of a plan it gives back next time.
"""

from collections.abc import Callable, Mapping
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
from isobatch_operator.revision import Revision, service_pools
from isobatch_operator.rollout import RolloutState, advance, shares_places
from isobatch_operator.routing import next_table
from isobatch_operator.status import Status, summarise
from isobatch_operator.view import View


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
    service_name: Callable[[PoolName, str], str] | None = None  # tables name Services, not replicas


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, the table that holds afterwards, and what there is to say meanwhile.

    `wanted`: the replicas that each revision should have in a pool.
    """

    actions: tuple[Action, ...]
    table: RoutingTable
    status: Status
    rollout: RolloutState
    revisions: Mapping[str, Revision]
    wanted: Mapping[PoolName, Mapping[str, int]]


def plan(
    service: InferenceService, observed: Observed, now: float, policy: Policy | None = None
) -> Plan:
    """Decide the next actions for `service`. `now` is in seconds since the epoch."""
    policy = policy or Policy()
    view = View.of(service, observed, now)
    state = advance(view.state, service.spec.rollout, view.look, now, observed.verb)
    layout = view.layout(state)
    table = next_table(service, layout.model, layout.shares, observed.table, policy.service_name)
    wanted = {
        Slot(pool, name, ordinal): view.revisions[name]
        for pool, counts in layout.wanted.items()
        for name, count in counts.items()
        if pool in view.revisions[name].pools
        for ordinal in range(count)
    }
    actions = (
        *((PublishTable(table),) if table != observed.table else ()),
        *_stops(wanted, observed, now, policy),
        *_starts(service, wanted, observed, now, policy),
    )
    return Plan(
        actions=actions,
        table=table,
        status=summarise(view.target, view.desired, wanted, observed, table, policy.backoff),
        rollout=state,
        revisions={
            name: view.revisions[name]
            for name in (view.target.name, state.stable, state.canary)
            if name is not None
        },
        wanted=layout.wanted,
    )


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
    places = _places(service, wanted, filled)
    starts = []
    for slot, revision in wanted.items():
        is_due = now >= restart_at(observed.failures.get(slot, ()), policy.backoff)
        if slot not in filled and is_due and places[slot.pool] > 0:
            places[slot.pool] -= 1
            starts.append(StartReplica(slot, revision))
    return tuple(starts)


def _places(
    service: InferenceService, wanted: Mapping[Slot, Revision], filled: set[Slot]
) -> dict[PoolName, int]:
    """How many replicas each pool may start now: as many as it likes, or only into free places."""
    rollout = service.spec.rollout
    places = {}
    for pool, spec in service_pools(service).items():
        here = {slot for slot in filled if slot.pool is pool}
        if rollout.strategy == "Recreate" and any(slot not in wanted for slot in here):
            places[pool] = 0
        elif shares_places(rollout):
            places[pool] = max(0, spec.desired_replicas - len(here))
        else:
            places[pool] = len(wanted)
    return places

"""Decides what is said of a service, its pools and its replicas."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from isobatch_contracts.routing_table import RoutingTable, table_checksum
from isobatch_contracts.tiers import PoolName

from isobatch_operator.backoff import Backoff, restart_at, streak
from isobatch_operator.observed import (
    Failure,
    Observed,
    Ready,
    Refused,
    ReplicaState,
    Slot,
    Starting,
    Stopping,
    Unready,
)
from isobatch_operator.revision import Revision
from isobatch_operator.routing import routable

FAILURES_WITHOUT_HOPE = 3
"""Failures in a row after which we say that a replica cannot become ready (and still retry)."""


class Phase(StrEnum):
    """The state of a replica, in one word for people."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    REFUSED = "refused"
    BACKING_OFF = "backing-off"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Health:
    """How one process does. `blocked`: why it cannot become ready by itself, if it cannot."""

    phase: Phase
    detail: str = ""
    since: float | None = None
    failures: int = 0
    restart_at: float | None = None
    blocked: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One slot and how its replica does."""

    slot: Slot
    health: Health


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One pool; `ready` and `certified` count replicas of the revision asked for."""

    name: PoolName
    desired: int
    ready: int
    certified: int
    fingerprints: tuple[str, ...]
    replicas: tuple[ReplicaStatus, ...]

    @property
    def is_ready(self) -> bool:
        """Whether the pool has what the spec says."""
        return self.ready >= self.desired


@dataclass(frozen=True, slots=True)
class Status:
    """The whole. Servable (someone answers) is not ready (all is as the spec says)."""

    revision: str
    pools: tuple[PoolStatus, ...]
    table_version: int
    table_checksum: str
    is_ready: bool
    is_servable: bool


def summarise(
    target: Revision,
    desired: Mapping[PoolName, int],
    wanted: Collection[Slot],
    observed: Observed,
    table: RoutingTable,
    backoff: Backoff,
) -> Status:
    """What there is to say, were `table` published."""
    pools = tuple(
        _pool(name, count, target, [s for s in wanted if s.pool is name], observed, backoff)
        for name, count in desired.items()
    )
    return Status(
        revision=target.name,
        pools=pools,
        table_version=table.version,
        table_checksum=table_checksum(table),
        is_ready=all(pool.is_ready for pool in pools),
        is_servable=any(entry.weight > 0 for entry in table.revisions),
    )


def _pool(
    name: PoolName,
    count: int,
    target: Revision,
    wanted: Collection[Slot],
    observed: Observed,
    backoff: Backoff,
) -> PoolStatus:
    here = sorted(
        (replica for replica in observed.replicas if replica.slot.pool is name),
        key=lambda replica: replica.slot,
    )
    filled = {replica.slot for replica in here}
    empty = sorted(set(wanted) - filled)
    ready = routable(here, name, target.name, count)
    fingerprints = {r.state.fingerprint for r in ready if isinstance(r.state, Ready)} - {None}
    return PoolStatus(
        name=name,
        desired=count,
        ready=len(ready),
        certified=len(ready) if name is PoolName.STRICT else 0,
        fingerprints=tuple(sorted(f for f in fingerprints if f)),
        replicas=(
            *(
                ReplicaStatus(
                    r.slot, describe_living(r.state, observed.failures.get(r.slot, ()), backoff)
                )
                for r in here
            ),
            *(
                ReplicaStatus(slot, describe_absent(observed.failures.get(slot, ()), backoff))
                for slot in empty
            ),
        ),
    )


def describe_living(state: ReplicaState, failures: tuple[Failure, ...], backoff: Backoff) -> Health:
    """How a process in `state` does, that has failed before as `failures` says."""
    count = streak(failures, backoff)
    match state:
        case Starting(since, detail):
            return Health(
                Phase.STARTING, detail, since, count, blocked=_hopeless(failures, backoff)
            )
        case Ready(since):
            return Health(Phase.READY, "", since, count)
        case Unready(since, reason):
            return Health(Phase.UNREADY, reason, since, count)
        case Refused(since, reason):
            return Health(Phase.REFUSED, reason, since, count, blocked=reason)
        case Stopping(since):
            return Health(Phase.STOPPING, "", since, count)
        case _:
            assert_never(state)


def describe_absent(failures: tuple[Failure, ...], backoff: Backoff) -> Health:
    """How a process does that is wanted and not there."""
    if not failures:
        return Health(Phase.PENDING)
    return Health(
        Phase.BACKING_OFF,
        failures[-1].reason,
        failures[-1].at,
        streak(failures, backoff),
        restart_at(failures, backoff),
        _hopeless(failures, backoff),
    )


def _hopeless(failures: tuple[Failure, ...], backoff: Backoff) -> str | None:
    """Why a process that fails again and again will not become ready; None while it may."""
    if not failures:
        return None
    last = failures[-1]
    is_hopeless = last.is_permanent or streak(failures, backoff) >= FAILURES_WITHOUT_HOPE
    return last.reason if is_hopeless else None

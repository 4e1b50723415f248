"""Decides what is written to `state.json`: the plan's status, with the processes behind it."""

from isobatch_contracts.resource import InferenceService

from isobatch_operator.local.fleet import Fleet
from isobatch_operator.local.state import InstancePhase, PoolView, ReplicaView, RolloutView
from isobatch_operator.rollout import RolloutState
from isobatch_operator.status import PoolStatus, ReplicaStatus, Status


def pool_views(status: Status, fleet: Fleet) -> tuple[PoolView, ...]:
    """The pools of `status`, each replica with its process, address and log."""
    return tuple(_pool(pool, fleet) for pool in status.pools)


def _pool(pool: PoolStatus, fleet: Fleet) -> PoolView:
    return PoolView(
        name=pool.name,
        desired=pool.desired,
        ready=pool.ready,
        certified=pool.certified,
        fingerprints=pool.fingerprints,
        replicas=tuple(_replica(replica, fleet) for replica in pool.replicas),
    )


def _replica(replica: ReplicaStatus, fleet: Fleet) -> ReplicaView:
    slot, health = replica.slot, replica.health
    member = fleet.members.get(slot)
    return ReplicaView(
        name=slot.name,
        revision=slot.revision,
        phase=health.phase,
        detail=health.detail,
        since=health.since,
        failures=health.failures,
        restart_at=health.restart_at,
        blocked=health.blocked,
        url=fleet.url(slot),
        pid=None if member is None else member.child.pid,
        log=str(fleet.log_file(slot)),
    )


def rollout_view(state: RolloutState, service: InferenceService) -> RolloutView:
    """What is said of the rollout."""
    return RolloutView(
        phase=state.phase(service.spec.rollout),
        stable_revision=state.stable,
        canary_revision=state.canary,
        step=state.step,
        weight=state.weight,
        phase_started_at=state.since,
        reason=state.reason,
        message=state.message,
    )


def next_phase(before: InstancePhase, *, is_ready: bool) -> InstancePhase:
    """The phase of an instance that runs: once ready, a loss is `degraded`, no longer a start."""
    if is_ready:
        return InstancePhase.READY
    if before is InstancePhase.STARTING:
        return before
    return InstancePhase.DEGRADED

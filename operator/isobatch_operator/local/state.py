"""Decides what `state.json` says: the whole of what `isobatch status` can show. Documents only."""

from enum import StrEnum

from isobatch_contracts.base import Document
from isobatch_contracts.tiers import PoolName

from isobatch_operator.rollout import Phase as RolloutPhase
from isobatch_operator.status import Phase


class InstancePhase(StrEnum):
    """The state of the whole instance, in one word for people."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    STOPPING = "stopping"
    STOPPED = "stopped"
    KILLED = "killed"


class ProcessRecord(Document):
    """A process and its time of creation, so that a reused pid is not taken for it."""

    name: str
    pid: int
    created_at: float
    log: str


class ReplicaView(Document):
    """One replica, or the gateway. Times are seconds since the epoch."""

    name: str
    revision: str = ""
    phase: Phase
    detail: str = ""
    since: float | None = None
    failures: int = 0
    restart_at: float | None = None
    blocked: str | None = None
    url: str | None = None
    pid: int | None = None
    log: str


class PoolView(Document):
    """One pool."""

    name: PoolName
    desired: int
    ready: int
    certified: int
    fingerprints: tuple[str, ...]
    replicas: tuple[ReplicaView, ...]

    @property
    def is_ready(self) -> bool:
        """Whether the pool has what the spec says."""
        return self.ready >= self.desired


class Routing(Document):
    """The published table; `acknowledged`: the version that the gateway says it serves."""

    version: int
    checksum: str
    acknowledged: int | None = None


class RolloutView(Document):
    """Where the rollout stands; `weight` is the canary's percent that was granted."""

    phase: RolloutPhase
    stable_revision: str | None
    canary_revision: str | None
    step: int
    weight: int
    phase_started_at: float
    reason: str
    message: str


class LocalState(Document):
    """One instance of `isobatch up`."""

    instance: str
    name: str
    phase: InstancePhase
    model: str
    url: str
    host: str
    port: int
    manifest: str | None
    manifest_problems: tuple[str, ...] = ()
    revision: str = ""
    supervisor: ProcessRecord
    pools: tuple[PoolView, ...] = ()
    gateway: ReplicaView | None = None
    routing: Routing | None = None
    rollout: RolloutView | None = None
    processes: tuple[ProcessRecord, ...] = ()

    @property
    def blocked(self) -> tuple[ReplicaView, ...]:
        """What cannot become ready by itself, of the revision asked for, or the gateway."""
        replicas = [r for p in self.pools for r in p.replicas if r.revision == self.revision]
        everything = [*replicas, *([self.gateway] if self.gateway else [])]
        return tuple(view for view in everything if view.blocked is not None)

"""Decides nothing: the words in which an adapter tells the planner what it sees. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName

from isobatch_operator.revision import Revision
from isobatch_operator.rollout import Outcome, RolloutState, Verb


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The place of one replica: at most one process or pod fills it at a time."""

    pool: PoolName
    revision: str
    ordinal: int

    @property
    def name(self) -> str:
        """A DNS label, unique in the service."""
        return f"{self.pool.value}-{self.ordinal}-{self.revision}"


@dataclass(frozen=True, slots=True)
class Starting:
    """Alive, never ready yet. Times are seconds since the epoch, here and below."""

    since: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Answers. `requests`: in flight, None if nobody looked; `misses`: probes lost in a row."""

    since: float
    fingerprint: str | None = None
    requests: int | None = None
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Unready:
    """Was ready and is not now."""

    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A strict worker that says it will not be certified: a restart would not change it."""

    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """Was told to stop."""

    since: float


ReplicaState = Starting | Ready | Unready | Refused | Stopping


@dataclass(frozen=True, slots=True)
class Replica:
    """One living replica. `unrouted_since`: when it left the table; None while it stands there."""

    slot: Slot
    url: str
    state: ReplicaState
    unrouted_since: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """One unwanted end of a replica. Permanent: it says itself that trying again is no use."""

    at: float
    lived_seconds: float
    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """What the adapter sees of one service.

    `rollout` and `revisions` are what the last plan returned as such; `table` the last one
    published, at `published_at`; `acknowledged` the version that every gateway serves, None where
    nobody says; `failures` of a slot are oldest first; `outcome` is what the gates say of the
    canary.
    """

    replicas: tuple[Replica, ...] = ()
    failures: Mapping[Slot, tuple[Failure, ...]] = field(default_factory=dict)
    rollout: RolloutState = field(default_factory=RolloutState)
    revisions: Mapping[str, Revision] = field(default_factory=dict)
    table: RoutingTable | None = None
    published_at: float = 0.0
    acknowledged: int | None = None
    verb: Verb | None = None
    outcome: Outcome = Outcome.PASS
    outcome_message: str = ""

"""Decides nothing: the words in which an adapter tells the planner what it sees. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName

from isobatch_operator.revision import Revision


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

    `stable` is what the last plan returned as such; `table` the last one published; `failures` of
    a slot are oldest first.
    """

    replicas: tuple[Replica, ...] = ()
    failures: Mapping[Slot, tuple[Failure, ...]] = field(default_factory=dict)
    stable: Revision | None = None
    table: RoutingTable | None = None

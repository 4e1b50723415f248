"""Performs: holds the services that are routed, their replicas, and what is known of each now."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from isobatch_contracts.numerics import Certified
from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName, Tier

from isobatch_gateway import breaker
from isobatch_gateway.errors import ReplicaSilent
from isobatch_gateway.limits import Gate
from isobatch_gateway.relay import Relay
from isobatch_gateway.routing import Candidate
from isobatch_gateway.settings import Breaking


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """Which replica: the same id in two tables is the same process's address."""

    service: str
    pool: PoolName
    revision: str
    name: str
    url: str
    fingerprint: str | None


@dataclass(frozen=True, slots=True)
class Figures:
    """vLLM's own figures. `progress` grows while the engine works."""

    running: int = 0
    waiting: int = 0
    progress: float = 0.0


class Replica:
    """What is known of one replica now."""

    def __init__(self, identity: ReplicaId, model: str, rules: Breaking) -> None:
        self.id = identity
        self.model = model
        self.is_ready = False
        self.certified: Certified | None = None  # what a strict worker last said of its numerics
        self.figures = Figures()
        self.in_flight = 0
        self.state: breaker.State = breaker.Closed()
        self._heard = 0.0
        self.unanswered = 0  # readiness checks in a row
        self.answering: set[Relay] = set()  # answers under way
        self.waiting: dict[Relay, float] = {}  # attempts without a first byte, and their start
        self.looked = asyncio.Event()  # set once something is known of it
        self.doubt = asyncio.Event()  # something went wrong: the next check should not wait
        self._rules = rules

    @property
    def is_eligible(self) -> bool:
        """Whether a request may go there."""
        return self.is_ready and breaker.admits(self.state)

    @property
    def load(self) -> int:
        """Requests there: ours now, or all that vLLM counted a moment ago, whichever is more."""
        return max(self.in_flight, self.figures.running + self.figures.waiting)

    @property
    def served_by(self) -> str:
        """The value of `X-Served-By`."""
        return f"{self.id.pool.value}/{self.id.revision}/{self.id.name}"

    @property
    def last_heard(self) -> float:
        """When there was a sign of life: any byte of any answer, or progress of the engine.

        Asked once in a while, so that a chunk need not tell.
        """
        return max(self._heard, *(relay.last_read for relay in self.answering), 0.0)

    def heard(self, now: float) -> None:
        """There was a sign of life."""
        self._heard = max(self._heard, now)

    def note(self, event: breaker.Event) -> None:
        """Let the breaker know what happened."""
        now = asyncio.get_running_loop().time()
        self.state = breaker.after(self.state, event, now, self._rules)
        if event is not breaker.Event.SUCCESS:
            self.doubt.set()

    def abandon_waiting(self) -> None:
        """End the attempts that still wait for a first byte: nobody will answer them."""
        for relay in list(self.waiting):
            relay.fail(ReplicaSilent(f"{self.served_by} answers nothing"))


@dataclass(slots=True)
class Service:
    """One routed service: its table, replicas and admission."""

    table: RoutingTable
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    gates: dict[Tier, Gate] = field(default_factory=lambda: {tier: Gate() for tier in Tier})
    loaded: int = 0  # when the service was first seen, in Unix seconds

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the largest model that a strict replica has told of; None if none has."""
        told = (replica.certified for replica in self.replicas.values())
        return max((c.vocabulary for c in told if c is not None and c.vocabulary), default=None)

    def candidates(self, tried: Iterable[ReplicaId]) -> tuple[Candidate, ...]:
        """The replicas that may serve now, `tried` ones excepted."""
        weights = {(r.pool, r.name): r.weight for r in self.table.revisions}
        return tuple(
            Candidate(
                name=f"{identity.revision}/{identity.name}",
                pool=identity.pool,
                revision=identity.revision,
                weight=weights.get((identity.pool, identity.revision), 0),
                load=replica.load,
                fingerprint=identity.fingerprint,
            )
            for identity, replica in self.replicas.items()
            if replica.is_eligible and identity not in tried
        )

    def unknown(self, pools: Iterable[PoolName]) -> tuple[Replica, ...]:
        """The routed replicas of `pools` that nobody has looked at yet."""
        weighted = {(r.pool, r.name) for r in self.table.revisions if r.weight}
        return tuple(
            replica
            for identity, replica in self.replicas.items()
            if identity.pool in pools
            and (identity.pool, identity.revision) in weighted
            and not replica.looked.is_set()
        )

    def replica(self, candidate: Candidate) -> Replica:
        """The replica behind `candidate`."""
        return next(
            replica
            for identity, replica in self.replicas.items()
            if identity.pool is candidate.pool
            and f"{identity.revision}/{identity.name}" == candidate.name
        )

    def has_ready(self, pool: PoolName) -> bool:
        """Whether `pool` has anybody to serve."""
        return any(r.is_eligible for i, r in self.replicas.items() if i.pool is pool)


@dataclass(slots=True)
class Fleet:
    """All routed services, by served model name."""

    rules: Breaking
    services: dict[str, Service] = field(default_factory=dict)

    def apply(
        self, tables: Iterable[RoutingTable], unix_now: float
    ) -> tuple[list[Replica], list[Replica]]:
        """Route by `tables`: the replicas that came and those that went.

        The others keep what is known of them.
        """
        came: list[Replica] = []
        went: list[Replica] = []
        wanted = {table.model: table for table in tables}
        for model in [m for m in self.services if m not in wanted]:
            went += self.services.pop(model).replicas.values()
        for model, table in wanted.items():
            service = self.services.get(model)
            if service is None:
                service = self.services[model] = Service(table, loaded=int(unix_now))
            elif service.table is table:
                continue
            service.table = table
            ids = set(replica_ids(table))
            went += [service.replicas.pop(i) for i in list(service.replicas) if i not in ids]
            for identity in ids - set(service.replicas):
                replica = Replica(identity, model, self.rules)
                service.replicas[identity] = replica
                came.append(replica)
        return came, went

    def replicas(self) -> Iterable[Replica]:
        """All replicas of all services."""
        for service in self.services.values():
            yield from service.replicas.values()


def replica_ids(table: RoutingTable) -> Iterable[ReplicaId]:
    """The replicas that `table` names."""
    for revision in table.revisions:
        for endpoint in revision.endpoints:
            yield ReplicaId(
                service=table.service,
                pool=revision.pool,
                revision=revision.name,
                name=endpoint.name,
                url=endpoint.url,
                fingerprint=revision.fingerprint,
            )

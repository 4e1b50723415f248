"""What holds of the planner in every world: a simulated one, with edits, crashes and time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from isobatch_contracts.resource import InferenceService
from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName
from isobatch_operator.observed import (
    Failure,
    Observed,
    Ready,
    Refused,
    Replica,
    ReplicaState,
    Slot,
    Starting,
    Stopping,
    Unready,
)
from isobatch_operator.plan import Action, Plan, PublishTable, StartReplica, StopReplica, plan
from isobatch_operator.revision import Revision, revision_of, service_pools
from isobatch_operator.rollout import RolloutState, Stage, Verb

PRINTS = ["sha256:" + letter * 64 for letter in "ab"]


def service_of(
    strict: int | None, throughput: int | None, flag: str, strategy: str
) -> InferenceService:
    """`None` replicas: the service lacks the pool."""
    pools: dict[str, dict[str, Any]] = {
        "strict": {"replicas": strict, "runtime": {"args": [flag]}},
        "throughput": {"replicas": throughput},
    }
    return InferenceService.model_validate(
        {
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"uri": "builtin://m"},
                "pools": {name: p for name, p in pools.items() if p["replicas"] is not None},
                "rollout": {"strategy": strategy},
            },
        }
    )


@dataclass
class World:
    """Performs actions at once; what happens to replicas is the test's to say."""

    replicas: dict[Slot, Replica] = field(default_factory=dict)
    failures: dict[Slot, tuple[Failure, ...]] = field(default_factory=dict)
    table: RoutingTable | None = None
    published_at: float = 0.0
    rollout: RolloutState = field(default_factory=RolloutState)
    revisions: Mapping[str, Revision] = field(default_factory=dict)
    now: float = 1000.0
    ports: int = 9000

    def observed(self) -> Observed:
        return Observed(
            replicas=tuple(self.replicas.values()),
            failures=dict(self.failures),
            rollout=self.rollout,
            revisions=self.revisions,
            table=self.table,
            published_at=self.published_at,
        )

    def step(self, service: InferenceService, verb: Verb | None = None) -> Plan:
        done = plan(service, replace(self.observed(), verb=verb), self.now)
        for action in done.actions:
            self.apply(action)
        self.rollout, self.revisions = done.rollout, done.revisions
        return done

    def apply(self, action: Action) -> None:
        match action:
            case PublishTable(table):
                self.table, self.published_at = table, self.now
                routed = {e.name for r in table.revisions for e in r.endpoints}
                for slot, replica in self.replicas.items():
                    since = replica.unrouted_since
                    since = None if slot.name in routed else self.now if since is None else since
                    self.replicas[slot] = replace(replica, unrouted_since=since)
            case StartReplica(slot, _):
                assert slot not in self.replicas
                self.ports += 1
                url = f"http://127.0.0.1:{self.ports}"
                self.replicas[slot] = Replica(slot, url, Starting(self.now), self.now)
            case StopReplica(slot, _):
                self.set(slot, Stopping(self.now))

    def set(self, slot: Slot, state: ReplicaState) -> None:
        self.replicas[slot] = replace(self.replicas[slot], state=state)

    def crash(self, slot: Slot) -> None:
        state = self.replicas.pop(slot).state
        if not isinstance(state, Stopping):
            failure = Failure(self.now, 0.0, "boom")
            self.failures[slot] = (*self.failures.get(slot, ()), failure)

    def make_ready(self, slot: Slot, fingerprint: str) -> None:
        is_strict = slot.pool is PoolName.STRICT
        self.set(slot, Ready(self.now, fingerprint if is_strict else None, 0))

    def settle(self) -> None:
        """What a healthy machine does by itself: starts succeed, stops end, time goes by."""
        self.now += 100
        for slot, replica in list(self.replicas.items()):
            if isinstance(replica.state, Stopping):
                del self.replicas[slot]
            elif not isinstance(replica.state, Ready) or (
                slot.pool is PoolName.STRICT and replica.state.fingerprint is None
            ):
                self.make_ready(slot, PRINTS[0])


counts = st.one_of(st.none(), st.integers(0, 3))
services = (
    st.tuples(counts, counts)
    .filter(lambda pair: pair != (None, None))
    .flatmap(
        lambda pair: st.builds(
            service_of,
            strict=st.just(pair[0]),
            throughput=st.just(pair[1]),
            flag=st.sampled_from(["--a", "--b"]),
            strategy=st.sampled_from(["Canary", "Recreate"]),
        )
    )
)
happenings = st.lists(
    st.one_of(
        services.map(lambda s: ("edit", s)),
        st.tuples(
            st.sampled_from(["ready a", "ready b", "no print", "unready", "refuse", "crash"]),
            st.integers(0, 20),
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 3, 40, 4000])),
    ),
    max_size=25,
)


def happen(world: World, kind: str, which: int) -> None:
    slots = sorted(world.replicas)
    if not slots:
        return
    slot = slots[which % len(slots)]
    if kind == "crash":
        world.crash(slot)
    elif not isinstance(world.replicas[slot].state, Stopping):
        match kind:
            case "ready a":
                world.make_ready(slot, PRINTS[0])
            case "ready b":
                world.make_ready(slot, PRINTS[1])
            case "no print":
                world.set(slot, Ready(world.now, None, 0))
            case "unready":
                world.set(slot, Unready(world.now, "slow"))
            case "refuse":
                world.set(slot, Refused(world.now, "no schedule"))


def check_table(done: Plan, world: Observed, before: RoutingTable | None) -> None:
    replicas = {r.slot.name: r for r in world.replicas}
    for entry in done.table.revisions:
        assert entry.weight == (100 if entry.endpoints else 0)
        for endpoint in entry.endpoints:
            state = replicas[endpoint.name].state
            assert isinstance(state, Ready)
            assert replicas[endpoint.name].url == endpoint.url
            assert replicas[endpoint.name].slot.revision == entry.name
            if entry.pool is PoolName.STRICT:
                assert state.fingerprint == entry.fingerprint is not None
    if before is not None:
        is_same = done.table.model_copy(update={"version": before.version}) == before
        assert done.table.version == before.version + (0 if is_same else 1)


@settings(max_examples=150, deadline=None)
@given(services, happenings)
def test_every_step_is_idempotent_and_routes_only_what_may_serve(
    service: InferenceService, events: list[tuple[str, object]]
) -> None:
    world = World()
    for kind, what in [("wait", 0.5), *events]:
        if isinstance(what, InferenceService):
            service = what
        elif kind == "wait":
            assert isinstance(what, (int, float))
            world.now += what
        else:
            assert isinstance(what, int)
            happen(world, kind, what)
        seen = world.observed()

        done = world.step(service)

        check_table(done, seen, seen.table)
        for pool in done.status.pools:
            assert {replica.slot.pool for replica in pool.replicas} <= {pool.name}
        assert plan(service, seen, world.now) == done
        once = world.observed()
        again = world.step(service)
        assert again.actions == ()
        assert world.observed() == once


@settings(max_examples=80, deadline=None)
@given(services, happenings)
def test_a_healthy_world_converges_to_what_the_spec_says(
    service: InferenceService, events: list[tuple[str, object]]
) -> None:
    world = World()
    for kind, what in events:
        if isinstance(what, InferenceService):
            service = what
        elif isinstance(what, int) and kind != "wait":
            happen(world, kind, what)
        world.step(service)

    for _ in range(8):
        world.settle()
        # What failed is not tried again by itself, and other bits are not accepted by themselves.
        stage, pause = world.rollout.stage, world.rollout.pause
        wish = Verb.RETRY if stage is Stage.FAILED else Verb.RESUME if pause else None
        done = world.step(service, wish)

    assert done.actions == ()
    assert done.status.is_ready
    target = revision_of(service).name
    assert sorted(world.replicas) == sorted(
        Slot(name, target, n)
        for name, pool in service_pools(service).items()
        for n in range(pool.desired_replicas)
    )


edits = st.lists(
    st.builds(
        service_of,
        strict=st.integers(1, 2),
        throughput=st.integers(1, 2),
        flag=st.sampled_from(["--a", "--b", "--c"]),
        strategy=st.just("Canary"),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(edits, st.data())
def test_edits_never_take_the_traffic_away_while_nothing_fails(
    versions: list[InferenceService], data: st.DataObject
) -> None:
    world = World()
    service = service_of(1, 1, "--a", "Canary")
    for _ in range(3):
        world.step(service)
        world.settle()

    for service in versions:
        for _ in range(data.draw(st.integers(0, 6))):
            world.now += data.draw(st.sampled_from([0.5, 5.0]))
            starting = [s for s, r in world.replicas.items() if isinstance(r.state, Starting)]
            if starting:
                world.make_ready(data.draw(st.sampled_from(sorted(starting))), PRINTS[0])
            done = world.step(service)
            for pool in PoolName:
                assert sum(r.weight for r in done.table.revisions if r.pool is pool) == 100

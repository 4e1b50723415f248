"""What the planner does in one step, case by case."""

from dataclasses import replace
from typing import Any

import pytest
from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName, Tier
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
from isobatch_operator.plan import (
    Action,
    Plan,
    PublishTable,
    StartReplica,
    StopReason,
    StopReplica,
    plan,
)
from isobatch_operator.revision import revision_of
from isobatch_operator.rollout import Phase

NOW = 1000.0
PRINT_A = "sha256:" + "a" * 64
PRINT_B = "sha256:" + "b" * 64
S, T = PoolName.STRICT, PoolName.THROUGHPUT
READY_S = Ready(NOW - 50, PRINT_A, 0)
READY_T = Ready(NOW - 50, None, 0)


def at(
    service: InferenceService,
    pool: PoolName,
    state: ReplicaState,
    ordinal: int = 0,
    unrouted_since: float | None = None,
) -> Replica:
    slot = Slot(pool, revision_of(service).name, ordinal)
    return Replica(slot, f"http://127.0.0.1:{9000 + ordinal}", state, unrouted_since)


def settled(service: InferenceService, *replicas: Replica) -> Observed:
    """The world after `replicas` became ready and their table was published."""
    seen = Observed(replicas=replicas)
    done = plan(service, seen, NOW)
    return replace(seen, table=done.table, rollout=done.rollout, revisions=done.revisions)


def starts(done: Plan) -> list[Slot]:
    return [a.slot for a in done.actions if isinstance(a, StartReplica)]


def stops(done: Plan) -> list[tuple[Slot, StopReason]]:
    return [(a.slot, a.reason) for a in done.actions if isinstance(a, StopReplica)]


def weights(done: Plan) -> dict[str, tuple[str, int, list[str]]]:
    return {
        r.pool.value: (r.name, r.weight, [e.name for e in r.endpoints])
        for r in done.table.revisions
    }


def test_first_step_publishes_an_empty_table_and_starts_every_replica(make_service: Any) -> None:
    service = make_service(strict=2, throughput=1)

    done = plan(service, Observed(), NOW)

    assert isinstance(done.actions[0], PublishTable)
    assert done.table.version == 1
    assert {r.weight for r in done.table.revisions} == {0}
    assert [(s.pool, s.ordinal) for s in starts(done)] == [(S, 0), (S, 1), (T, 0)]
    assert not done.status.is_servable


def test_a_pool_is_routed_as_soon_as_one_of_its_replicas_is_ready(make_service: Any) -> None:
    service = make_service(throughput=2)
    seen = Observed(
        replicas=(
            at(service, S, Starting(NOW)),
            at(service, T, READY_T, 0),
            at(service, T, Starting(NOW), 1),
        )
    )

    done = plan(service, seen, NOW)

    assert weights(done)["strict"][1:] == (0, [])
    assert weights(done)["throughput"][1:] == (100, [seen.replicas[1].slot.name])
    assert done.status.is_servable
    assert not done.status.is_ready


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(Starting(NOW), id="starting"),
        pytest.param(Ready(NOW, None), id="ready without a fingerprint"),
        pytest.param(Unready(NOW, "x"), id="unready"),
        pytest.param(Refused(NOW, "x"), id="refused"),
        pytest.param(Stopping(NOW), id="stopping"),
    ],
)
def test_strict_is_routed_only_when_ready_and_certified(
    make_service: Any, state: ReplicaState
) -> None:
    service = make_service()

    done = plan(service, Observed(replicas=(at(service, S, state),)), NOW)

    assert weights(done)["strict"][1:] == (0, [])


def test_strict_replicas_of_another_fingerprint_are_not_routed(make_service: Any) -> None:
    service = make_service(strict=3)
    seen = settled(service, at(service, S, READY_S, 2), at(service, T, READY_T))
    other = [at(service, S, Ready(NOW, PRINT_B), n) for n in (0, 1)]

    done = plan(service, replace(seen, replicas=(*other, *seen.replicas)), NOW)

    entry = next(r for r in done.table.revisions if r.pool is S)
    assert entry.fingerprint == PRINT_A  # the published one stays, though it is the rarer
    assert [e.name for e in entry.endpoints] == [seen.replicas[0].slot.name]


def test_nothing_to_do_when_all_is_as_the_spec_says(make_service: Any) -> None:
    service = make_service()
    seen = settled(service, at(service, S, READY_S), at(service, T, READY_T))

    done = plan(service, seen, NOW + 500)

    assert done.actions == ()
    assert done.table == seen.table
    assert done.status.is_ready


def test_an_edit_starts_the_new_revision_beside_the_old_which_keeps_its_traffic(
    make_service: Any,
) -> None:
    old, new = make_service(), make_service(throughput_args=("--x",))
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))

    done = plan(new, seen, NOW)

    assert {s.revision for s in starts(done)} == {revision_of(new).name}
    assert len(starts(done)) == 2
    assert stops(done) == []
    assert done.table == seen.table


def test_traffic_moves_when_all_pools_of_the_new_revision_are_ready(make_service: Any) -> None:
    old, new = make_service(), make_service(throughput_args=("--x",))
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))
    half = replace(
        seen,
        replicas=(*seen.replicas, at(new, T, READY_T, 0, NOW), at(new, S, Starting(NOW), 0, NOW)),
    )
    whole = replace(
        seen, replicas=(*seen.replicas, at(new, T, READY_T, 0, NOW), at(new, S, READY_S, 0, NOW))
    )

    assert plan(new, half, NOW).actions == ()
    done = plan(new, whole, NOW)

    name = revision_of(new).name
    assert {entry[0] for entry in weights(done).values()} == {name}
    assert done.table.version == seen.table.version + 1 if seen.table else False
    assert stops(done) == []  # drained first
    assert done.rollout.phase(new.spec.rollout) is Phase.PROMOTING  # the old one stays warm
    served = replace(whole, table=done.table, rollout=done.rollout, revisions=done.revisions)
    assert plan(new, served, NOW + 1).rollout.stable == name


@pytest.mark.parametrize(
    ("state", "seconds", "is_stopped"),
    [
        pytest.param(Ready(0, PRINT_A, 0), 1, False, id="idle, table not yet read"),
        pytest.param(Ready(0, PRINT_A, 0), 2, True, id="idle"),
        pytest.param(Ready(0, PRINT_A, 3), 29, False, id="busy"),
        pytest.param(Ready(0, PRINT_A, None), 29, False, id="load unknown"),
        pytest.param(Ready(0, PRINT_A, 3), 30, True, id="busy at the deadline"),
        pytest.param(Unready(0, "x"), 29, False, id="unready, may hold streams"),
        pytest.param(Unready(0, "x"), 30, True, id="unready at the deadline"),
        pytest.param(Starting(0), 0, True, id="starting"),
        pytest.param(Refused(0, "x"), 0, True, id="refused"),
        pytest.param(Stopping(0), 99, False, id="stopping already"),
    ],
)
def test_unwanted_replicas_are_stopped_once_drained(
    make_service: Any, state: ReplicaState, seconds: float, is_stopped: bool
) -> None:
    service = make_service()
    seen = settled(service, at(service, S, READY_S), at(service, T, READY_T))
    extra = at(service, S, state, 1, unrouted_since=NOW - seconds)

    done = plan(service, replace(seen, replicas=(*seen.replicas, extra)), NOW)

    assert stops(done) == ([(extra.slot, StopReason.UNWANTED)] if is_stopped else [])


def test_scaling_only_adds_or_removes(make_service: Any) -> None:
    one, two = make_service(throughput=1), make_service(throughput=2)
    seen = settled(one, at(one, S, READY_S), at(one, T, READY_T))

    up = plan(two, seen, NOW)
    assert [(s.pool, s.ordinal, s.revision) for s in starts(up)] == [(T, 1, revision_of(one).name)]
    assert up.table == seen.table

    both = settled(two, *seen.replicas, at(two, T, READY_T, 1))
    down = plan(one, both, NOW)
    assert weights(down)["throughput"][2] == [seen.replicas[1].slot.name]
    assert starts(down) == []
    assert stops(down) == []


def test_recreate_frees_the_places_before_it_starts(make_service: Any) -> None:
    old = make_service(strategy="Recreate")
    new = make_service(strategy="Recreate", throughput_args=("--x",))
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))

    first = plan(new, seen, NOW)
    assert {entry[1] for entry in weights(first).values()} == {0}
    assert starts(first) == []

    drained = replace(
        seen,
        table=first.table,
        replicas=tuple(replace(r, unrouted_since=NOW - 5) for r in seen.replicas),
    )
    assert len(stops(plan(new, drained, NOW))) == 2
    assert len(starts(plan(new, replace(drained, replicas=()), NOW))) == 2


def test_a_pool_that_an_edit_adds_is_started_in_the_new_revision_alone(make_service: Any) -> None:
    old, new = make_service(strict=None), make_service()
    seen = settled(old, at(old, T, READY_T))

    done = plan(new, seen, NOW)

    assert {s.revision for s in starts(done)} == {revision_of(new).name}
    assert [(s.pool, s.ordinal) for s in starts(done)] == [(S, 0), (T, 0)]
    assert weights(done)["throughput"][0] == revision_of(old).name


def test_a_pool_that_an_edit_removes_is_drained(make_service: Any) -> None:
    old, new = make_service(), make_service(strict=None)
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))

    done = plan(new, seen, NOW)

    assert done.table.pools == (T,)
    assert weights(done)["throughput"] == (revision_of(old).name, 100, [seen.replicas[1].slot.name])
    assert stops(done) == []  # drained first


def test_a_superseded_edit_is_stopped_and_the_stable_revision_stays(make_service: Any) -> None:
    old, second = make_service(), make_service(strict_args=("--a",))
    third = make_service(strict_args=("--b",))
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))
    between = at(second, S, Starting(NOW), 0, NOW)

    done = plan(third, replace(seen, replicas=(*seen.replicas, between)), NOW)

    assert stops(done) == [(between.slot, StopReason.UNWANTED)]
    assert {s.revision for s in starts(done)} == {revision_of(third).name}


def test_a_crash_of_the_stable_revision_is_repaired_while_the_new_one_is_not_ready(
    make_service: Any,
) -> None:
    old, new = make_service(), make_service(strict_args=("--a",))
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))

    done = plan(new, replace(seen, replicas=seen.replicas[:1]), NOW)

    assert Slot(T, revision_of(old).name, 0) in starts(done)


def renamed(service: InferenceService, name: str) -> InferenceService:
    model = service.spec.model.model_copy(update={"name": name})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"model": model})})


def test_a_changed_served_name_is_taken_with_the_traffic(make_service: Any) -> None:
    old = make_service()
    new = renamed(old, "a-new-name")
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))

    assert plan(new, seen, NOW).table.model == "chat"
    ready = (*seen.replicas, at(new, S, READY_S, 0, NOW), at(new, T, READY_T, 0, NOW))
    assert plan(new, replace(seen, replicas=ready), NOW).table.model == "a-new-name"


def test_a_table_never_routes_to_a_replica_that_serves_another_name(make_service: Any) -> None:
    old = make_service()
    new = renamed(old, "a-new-name")
    seen = settled(old, at(old, S, READY_S), at(old, T, READY_T))
    # The old throughput replica is lost, the new one is there already; strict is still the old.
    replicas = (seen.replicas[0], at(new, T, READY_T, 0, NOW))

    done = plan(new, replace(seen, replicas=replicas), NOW)

    assert done.table.model == "chat"
    assert weights(done)["strict"][:2] == (revision_of(old).name, 100)
    assert weights(done)["throughput"][1:] == (0, [])


@pytest.mark.parametrize(
    ("lived", "after", "is_started"),
    [
        pytest.param([0], 0.9, False, id="first, too soon"),
        pytest.param([0], 1.0, True, id="first"),
        pytest.param([0, 0, 0], 3.9, False, id="third, too soon"),
        pytest.param([0, 0, 0], 4.0, True, id="third"),
        pytest.param([0] * 16, 59.9, False, id="many, too soon"),
        pytest.param([0] * 16, 60.0, True, id="never longer than a minute"),
        pytest.param([0, 0, 0, 500], 1.0, True, id="a long life starts the count anew"),
    ],
)
def test_a_failed_replica_is_restarted_with_back_off(
    make_service: Any, lived: list[float], after: float, is_started: bool
) -> None:
    service = make_service(throughput=None)
    slot = Slot(S, revision_of(service).name, 0)
    failures = {slot: tuple(Failure(NOW, seconds, "boom") for seconds in lived)}

    done = plan(service, Observed(failures=failures), NOW + after)

    assert starts(done) == ([slot] if is_started else [])


@pytest.mark.parametrize(
    ("state", "is_stopped"),
    [
        pytest.param(Unready(NOW - 59, "x"), False, id="unready for a while"),
        pytest.param(Unready(NOW - 60, "x"), True, id="unready too long"),
        pytest.param(Starting(NOW - 3599), False, id="a slow start"),
        pytest.param(Starting(NOW - 3600), True, id="a start without end"),
        pytest.param(Refused(NOW - 9999, "x"), False, id="refused: a restart changes nothing"),
    ],
)
def test_lost_replicas_are_stopped_as_unhealthy(
    make_service: Any, state: ReplicaState, is_stopped: bool
) -> None:
    service = make_service(throughput=None)
    replica = at(service, S, state, 0, NOW)

    done = plan(service, Observed(replicas=(replica,)), NOW)

    assert stops(done) == ([(replica.slot, StopReason.UNHEALTHY)] if is_stopped else [])


@pytest.mark.parametrize(
    ("failures", "state", "blocked"),
    [
        pytest.param([], Refused(NOW, "no schedule"), "no schedule", id="refused"),
        pytest.param([Failure(NOW, 0, "boom")], None, None, id="failed once"),
        pytest.param([Failure(NOW, 0, "boom")] * 3, None, "boom", id="failed three times"),
        pytest.param([Failure(NOW, 0, "boom")] * 3, Starting(NOW), "boom", id="and tries again"),
        pytest.param([Failure(NOW, 0, "boom")] * 3, READY_S, None, id="and made it"),
        pytest.param(
            [Failure(NOW, 0, "bad flag", is_permanent=True)], None, "bad flag", id="wrong use"
        ),
    ],
)
def test_status_says_what_cannot_become_ready(
    make_service: Any, failures: list[Failure], state: ReplicaState | None, blocked: str | None
) -> None:
    service = make_service(throughput=None)
    slot = Slot(S, revision_of(service).name, 0)
    replicas = () if state is None else (at(service, S, state, 0, NOW),)

    done = plan(service, Observed(replicas, {slot: tuple(failures)}), NOW)

    assert [r.health.blocked for r in done.status.pools[0].replicas] == [blocked]


def test_a_change_of_tiers_alone_makes_a_new_table_and_no_new_revision(make_service: Any) -> None:
    service = make_service()
    seen = settled(service, at(service, S, READY_S), at(service, T, READY_T))
    tiers = service.spec.tiers.model_copy(update={"default": Tier.STRICT})
    edited = InferenceService.model_validate(
        service.model_copy(
            update={"spec": service.spec.model_copy(update={"tiers": tiers})}
        ).model_dump()
    )

    done = plan(edited, seen, NOW)

    actions: tuple[Action, ...] = (PublishTable(done.table),)
    assert done.actions == actions
    assert seen.table is not None
    assert done.table.version == seen.table.version + 1

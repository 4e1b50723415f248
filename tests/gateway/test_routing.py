import itertools

from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.tiers import PoolName
from isobatch_gateway.routing import Asker, Candidate, choose, choose_revision

names = st.sampled_from([f"r{n}" for n in range(6)])
pools = st.sampled_from(list(PoolName))
draws = st.floats(0, 1, exclude_max=True)
conversations = st.none() | st.text(max_size=20)
askers = st.builds(
    Asker, tenant=names, conversation=conversations, draw=draws, fingerprint=st.none()
)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Candidate, ...]:
    found = draw(
        st.lists(
            st.builds(
                Candidate,
                name=names,
                pool=pools,
                revision=st.sampled_from(["old", "new"]),
                weight=st.integers(0, 100),
                load=st.integers(0, 50),
                fingerprint=st.sampled_from([None, "f1", "f2"]),
            ),
            max_size=8,
            unique_by=lambda c: (c.pool, c.revision, c.name),
        )
    )
    weights = {(c.pool, c.revision): c.weight for c in found}
    return tuple(
        Candidate(c.name, c.pool, c.revision, weights[c.pool, c.revision], c.load, c.fingerprint)
        for c in found
    )


@given(fleets(), st.lists(pools, unique=True).map(tuple), askers)
def test_the_choice_never_leaves_its_pools_nor_takes_what_has_no_weight(
    fleet: tuple[Candidate, ...], allowed: tuple[PoolName, ...], asker: Asker
) -> None:
    got = choose(fleet, allowed, asker)

    open_ = [c for c in fleet if c.pool in allowed and c.weight > 0]
    if got is None:
        assert not open_
    else:
        assert got in open_
        assert got.pool is next(p for p in allowed if any(c.pool is p for c in open_))


@given(fleets(), askers, st.sampled_from(["f1", "f2", "f3"]))
def test_a_required_fingerprint_is_met_or_nobody_is_chosen(
    fleet: tuple[Candidate, ...], asker: Asker, fingerprint: str
) -> None:
    asking = Asker(asker.tenant, asker.conversation, asker.draw, fingerprint)

    got = choose(fleet, (PoolName.STRICT,), asking)

    matching = [c for c in fleet if c.pool is PoolName.STRICT and c.fingerprint == fingerprint]
    assert (got in matching) if matching else got is None


@given(fleets(), askers)
def test_a_conversation_keeps_its_replica_while_nothing_changes(
    fleet: tuple[Candidate, ...], asker: Asker
) -> None:
    first = choose(fleet, tuple(PoolName), asker)

    assert choose(fleet, tuple(PoolName), asker) == first
    assert choose(tuple(reversed(fleet)), tuple(PoolName), asker) == first or (
        asker.conversation is None  # ties of load are broken by the draw and the order
    )


@given(st.text(min_size=1, max_size=20), st.lists(st.integers(1, 99), min_size=1, unique=True))
def test_a_conversation_changes_its_revision_at_most_once_in_a_rollout(
    conversation: str, steps: list[int]
) -> None:
    asker = Asker("t", conversation, 0.0)
    seen = [choose_revision({"stable": 100 - w, "canary": w}, asker) for w in sorted(steps)]

    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert changes <= 1
    assert seen in (sorted(seen), sorted(seen, reverse=True))


def test_weights_are_respected() -> None:
    weights = {"a": 5, "b": 25, "c": 70}
    count = 20_000
    got = [choose_revision(weights, Asker("t", f"conversation {n}", 0.0)) for n in range(count)]

    for name, weight in weights.items():
        assert abs(got.count(name) / count - weight / 100) < 0.015


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6), st.text(min_size=1, max_size=10))
def test_affinity_never_overloads_a_replica(loads: list[int], conversation: str) -> None:
    fleet = tuple(
        Candidate(f"r{n}", PoolName.THROUGHPUT, "rev", 100, load) for n, load in enumerate(loads)
    )

    got = choose(fleet, (PoolName.THROUGHPUT,), Asker("t", conversation, 0.0))

    assert got is not None
    average = (sum(loads) + 1) / len(loads)
    assert got.load + 1 <= 1.25 * average + 1


def test_the_least_loaded_is_taken_where_there_is_no_conversation() -> None:
    fleet = tuple(
        Candidate(f"r{n}", PoolName.THROUGHPUT, "rev", 100, load)
        for n, load in enumerate((4, 1, 9))
    )

    got = choose(fleet, (PoolName.THROUGHPUT,), Asker("t", None, 0.9))

    assert got is not None
    assert got.name == "r1"


def test_conversations_spread_over_replicas_and_move_only_from_one_that_is_lost() -> None:
    fleet = tuple(Candidate(f"r{n}", PoolName.STRICT, "rev", 100, 0) for n in range(4))
    asking = [Asker("t", f"c{n}", 0.0) for n in range(400)]
    before = [choose(fleet, (PoolName.STRICT,), asker) for asker in asking]
    after = [choose(fleet[:3], (PoolName.STRICT,), asker) for asker in asking]

    counts = [before.count(candidate) for candidate in fleet]
    assert min(counts) > 60
    assert all(b == a for b, a in zip(before, after, strict=True) if b != fleet[3])

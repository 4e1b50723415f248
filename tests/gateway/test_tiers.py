import pytest
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.resource import StandardFallback, Tiers
from isobatch_contracts.tiers import PoolName, Tier
from isobatch_gateway.refusals import Refusal
from isobatch_gateway.tiers import Declared, Policy, pools_for, resolve, split_model

CHAT = "/v1/chat/completions"
STRICT, VERIFIED, STANDARD = Tier.STRICT, Tier.VERIFIED, Tier.STANDARD
ALL = Tiers()
tiers = st.sampled_from(list(Tier))


@pytest.mark.parametrize(
    ("declared", "policy", "expected"),
    [
        pytest.param(Declared(), Policy(), STANDARD, id="service default"),
        pytest.param(Declared(), Policy(default=VERIFIED), VERIFIED, id="key before service"),
        pytest.param(
            Declared(suffix=STRICT), Policy(default=STANDARD), STRICT, id="suffix before key"
        ),
        pytest.param(Declared(body="strict"), Policy(), STRICT, id="body"),
        pytest.param(Declared(header="strict"), Policy(default=STANDARD), STRICT, id="header"),
        pytest.param(
            Declared(header="strict", body="strict", suffix=STRICT), Policy(), STRICT, id="agreed"
        ),
    ],
)
def test_a_tier_is_resolved_in_the_order_of_the_reference(
    declared: Declared, policy: Policy, expected: Tier
) -> None:
    assert resolve(declared, policy, ALL, CHAT) is expected


@pytest.mark.parametrize(
    ("declared", "policy", "offer", "path", "status", "code"),
    [
        pytest.param(
            Declared(header="strict", body="standard"),
            Policy(),
            ALL,
            CHAT,
            400,
            "consistency_tier",
            id="header against body",
        ),
        pytest.param(
            Declared(body="standard", suffix=STRICT),
            Policy(),
            ALL,
            CHAT,
            400,
            "consistency_tier",
            id="body against suffix",
        ),
        pytest.param(
            Declared(header="STRICT"), Policy(), ALL, CHAT, 400, "x-consistency-tier", id="header"
        ),
        pytest.param(
            Declared(body="best"), Policy(), ALL, CHAT, 400, "consistency_tier", id="unknown body"
        ),
        pytest.param(Declared(body=3), Policy(), ALL, CHAT, 400, "consistency_tier", id="number"),
        pytest.param(Declared(body=[]), Policy(), ALL, CHAT, 400, "consistency_tier", id="list"),
        pytest.param(
            Declared(header="strict"),
            Policy(),
            Tiers(allowed=(STANDARD,)),
            CHAT,
            403,
            "tier_not_allowed",
            id="service",
        ),
        pytest.param(
            Declared(),
            Policy(allowed=frozenset({STRICT})),
            ALL,
            CHAT,
            403,
            "tier_not_allowed",
            id="key",
        ),
        pytest.param(
            Declared(header="verified"),
            Policy(),
            ALL,
            "/v1/embeddings",
            400,
            "consistency_tier",
            id="embeddings",
        ),
    ],
)
def test_a_tier_is_refused(
    declared: Declared, policy: Policy, offer: Tiers, path: str, status: int, code: str
) -> None:
    got = resolve(declared, policy, offer, path)

    assert isinstance(got, Refusal)
    assert (got.kind.status, got.kind.code) == (status, code)


def test_embeddings_are_standard_where_nothing_is_declared() -> None:
    assert resolve(Declared(), Policy(default=STRICT), ALL, "/v1/embeddings") is STANDARD


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama:strict", ("llama", STRICT)),
        ("a:b:standard", ("a:b", STANDARD)),
        ("llama:q4", ("llama:q4", None)),
        ("llama:", ("llama:", None)),
        (":strict", (":strict", None)),
        ("strict", ("strict", None)),
    ],
)
def test_a_suffix_that_is_no_tier_belongs_to_the_name(
    name: str, expected: tuple[str, Tier | None]
) -> None:
    assert split_model(name) == expected


@given(st.text(max_size=12), tiers)
def test_a_tier_suffix_is_always_found(base: str, tier: Tier) -> None:
    expected = (base, tier) if base else (f":{tier.value}", None)

    assert split_model(f"{base}:{tier.value}") == expected


@given(tiers, st.sampled_from(list(StandardFallback)), st.booleans())
def test_strict_and_verified_have_the_strict_pool_alone(
    tier: Tier, fallback: StandardFallback, is_migrated: bool
) -> None:
    pools = pools_for(tier, Tiers(standard_fallback=fallback), is_migrated=is_migrated)

    if tier.is_bitwise:
        assert pools == (PoolName.STRICT,)
    elif is_migrated:
        assert pools == (PoolName.STRICT, PoolName.THROUGHPUT)
    else:
        falls_back = fallback is StandardFallback.STRICT
        assert pools == (PoolName.THROUGHPUT,) + (PoolName.STRICT,) * falls_back

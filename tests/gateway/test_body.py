import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.tiers import Tier
from isobatch_gateway import identity
from isobatch_gateway.body import Body, Seeding, read_body, rewrite, seed_of
from isobatch_gateway.refusals import Refusal

CHAT = "/v1/chat/completions"
SEEDING = Seeding(b"secret", "t", None, 1234)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def read(document: Any) -> Body:
    got = read_body(json.dumps(document).encode())
    assert isinstance(got, Body)
    return got


@given(st.dictionaries(st.text(max_size=6), values, max_size=6))
def test_what_is_not_ours_reaches_the_worker_unchanged(document: dict[str, Any]) -> None:
    raw = rewrite(read(document | {"model": "m:strict"}), salt="salt", seed=7)

    assert isinstance(raw, bytes)
    sent = json.loads(raw)
    ours = {"consistency_tier", "cache_salt", "priority", "kv_transfer_params"}
    expected = {k: v for k, v in document.items() if k not in ours}
    assert sent == expected | {"model": "m", "cache_salt": "salt", "seed": 7}


def test_a_body_without_anything_of_ours_is_passed_byte_for_byte() -> None:
    raw = b'{ "model" : "m",  "input":"x" }'
    body = read_body(raw)

    assert isinstance(body, Body)
    assert rewrite(body, salt=None, seed=None) == raw


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"", "body", id="empty"),
        pytest.param(b"{", "body", id="broken"),
        pytest.param(b"[]", "body", id="array"),
        pytest.param(b"3", "body", id="number"),
        pytest.param(b'"x"', "body", id="string"),
        pytest.param(b"null", "body", id="null"),
        pytest.param(b'{"a": "\xff"}', "body", id="invalid UTF-8"),
        pytest.param(b'{"a": \x00}', "body", id="NUL"),
        pytest.param(b'{"a": NaN}', "body", id="NaN"),
        pytest.param(b'{"a": NaN, "b": 12345678901234567890}', "body", id="NaN, long number"),
        pytest.param(b'{"a": 1e999}', "body", id="infinite"),
        pytest.param(b'{"a":' * 3000 + b"1" + b"}" * 3000, "body", id="deep"),
        pytest.param(
            b'{"a": 12345678901234567890, "b":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
            "body",
            id="deep, long number",
        ),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "body", id="a number without end"),
        pytest.param(b'{"model": 3}', "model", id="model is a number"),
        pytest.param(b'{"model": ["m"]}', "model", id="model is a list"),
    ],
)
def test_a_bad_body_is_a_clear_400(raw: bytes, code: str) -> None:
    got = read_body(raw)

    assert isinstance(got, Refusal)
    assert (got.kind.status, got.kind.code, got.param) == (400, code, code)


def test_nesting_that_can_be_read_but_not_written_is_a_400_or_passes_whole() -> None:
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    raw = rewrite(read({"model": "m", "x": deep}), salt="s", seed=None)

    assert isinstance(raw, Refusal) or json.loads(raw)["x"] == deep


@pytest.mark.parametrize("seed", [0, 1, -5, (1 << 63) - 1, -(1 << 63)])
def test_a_given_seed_is_kept(seed: int) -> None:
    assert seed_of(read({"seed": seed}), SEEDING, CHAT) == seed


@pytest.mark.parametrize(
    "seed", [True, False, 1.5, 1.0, "1", [1], 1 << 63, -(1 << 63) - 1, 1 << 80]
)
def test_a_seed_that_is_no_64_bit_integer_is_refused(seed: object) -> None:
    got = seed_of(read({"seed": seed}), SEEDING, CHAT)

    assert isinstance(got, Refusal)
    assert (got.kind.status, got.kind.code) == (400, "seed")


@pytest.mark.parametrize(("seed", "count"), [(-2, 2), (-3, 3), (-8, 64)])
def test_a_seed_whose_choices_reach_vllm_s_word_for_none_is_refused(seed: int, count: int) -> None:
    got = seed_of(read({"seed": seed, "n": count}), SEEDING, CHAT)

    assert isinstance(got, Refusal)
    assert (got.kind.status, got.kind.code) == (400, "seed")


@pytest.mark.parametrize(("seed", "count"), [(-2, 1), (-3, 2), (0, 8), (5, 8), (-9, 8)])
def test_a_seed_whose_choices_all_have_one_is_kept(seed: int, count: int) -> None:
    assert seed_of(read({"seed": seed, "n": count}), SEEDING, CHAT) == seed


@pytest.mark.parametrize("document", [{}, {"seed": None}, {"seed": -1}])
def test_a_seed_is_drawn_where_vllm_would_have_none(document: dict[str, Any]) -> None:
    assert seed_of(read(document), SEEDING, CHAT) == 1234


def test_a_keyed_seed_depends_on_tenant_key_and_content_alone() -> None:
    def keyed(tenant: str, key: str, document: dict[str, Any]) -> object:
        return seed_of(read(document), Seeding(b"secret", tenant, key, 99), CHAT)

    one = keyed("t", "k", {"a": 1, "b": 2})

    assert isinstance(one, int)
    assert 0 <= one < 1 << 53
    assert one == keyed("t", "k", {"b": 2, "a": 1})
    assert len({one, keyed("u", "k", {"a": 1, "b": 2}), keyed("t", "l", {"a": 1, "b": 2})}) == 3
    assert one != keyed("t", "k", {"a": 1, "b": 3})


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_no_two_lists_of_fields_are_packed_alike(a: list[str], b: list[str]) -> None:
    assert (identity.packed(*a) == identity.packed(*b)) == (a == b)


def test_salts_differ_by_tenant_and_secret() -> None:
    salts = {identity.cache_salt(s, t) for s in (b"1", b"2") for t in ("a", "b")}

    assert len(salts) == 4


def test_a_conversation_is_named_by_what_stays_the_same_as_it_grows() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    later = [*first, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]
    other = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]

    named = identity.conversation({"messages": first})
    assert named is not None
    assert named == identity.conversation({"messages": later})
    assert named != identity.conversation({"messages": other})
    assert identity.conversation({"prompt": "p" * 600}) == identity.conversation(
        {"prompt": "p" * 900}
    )


@pytest.mark.parametrize("document", [{}, {"messages": 3}, {"messages": []}, {"prompt": {}}])
def test_nothing_to_go_by_names_no_conversation(document: dict[str, Any]) -> None:
    assert identity.conversation(document) is None


def test_a_tier_suffix_is_taken_off() -> None:
    body = read({"model": "m:verified"})

    assert (body.model, body.suffix) == ("m", Tier.VERIFIED)

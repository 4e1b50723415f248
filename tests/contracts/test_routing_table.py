"""The routing table: what `dump` seals, `load` gives back; anything else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.resource import (
    Drift,
    Receipts,
    Sentinels,
    StandardFallback,
    TierLimits,
    Tiers,
)
from isobatch_contracts.routing_table import (
    Endpoint,
    Revision,
    RoutingTable,
    TableRejected,
    checksum,
    dump,
    load,
    table_checksum,
)
from isobatch_contracts.tiers import PoolName, Tier
from pydantic import ValidationError

from tests.conftest import CheckGolden

GOLDEN = Path(__file__).with_name("golden")
FINGERPRINT = "sha256:" + "5e" * 32

TABLE = RoutingTable(
    version=7,
    service="chat",
    model="llama-3.1-8b",
    tiers=Tiers(
        standard_fallback=StandardFallback.STRICT,
        limits={Tier.STRICT: TierLimits(requests_per_minute=600, concurrent=32, queue_size=64)},
    ),
    standard_to_strict=10,
    pools=(PoolName.STRICT, PoolName.THROUGHPUT),
    revisions=(
        Revision(
            name="a1",
            pool=PoolName.STRICT,
            weight=100,
            fingerprint=FINGERPRINT,
            endpoints=(Endpoint(name="strict-0", url="http://127.0.0.1:8001"),),
        ),
        Revision(name="a1", pool=PoolName.THROUGHPUT, weight=95, service="chat-throughput-a1"),
        Revision(name="b2", pool=PoolName.THROUGHPUT, weight=5, service="chat-throughput-b2"),
    ),
)


def sealed(document: dict[str, Any]) -> str:
    """`document` as an alien writer would write it, with the right checksum."""
    body = {key: value for key, value in document.items() if key != "checksum"}
    return json.dumps(body | {"checksum": checksum(body)})


def document(**changes: Any) -> dict[str, Any]:
    """The golden table's document with top-level fields changed."""
    base: dict[str, Any] = json.loads(dump(TABLE))
    return base | changes


def with_revisions(*revisions: dict[str, Any]) -> dict[str, Any]:
    return document(revisions=list(revisions))


def revision(name: str = "a1", weight: int = 100, **fields: Any) -> dict[str, Any]:
    return {"name": name, "pool": "throughput", "weight": weight} | fields


names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,5}[a-z0-9])?", fullmatch=True)
durations = st.from_regex(r"[1-9][0-9]{0,2}(ms|s|m|h|d)", fullmatch=True)
fingerprints = st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)
limits = st.builds(
    TierLimits,
    requests_per_minute=st.none() | st.integers(1, 1000),
    concurrent=st.none() | st.integers(1, 1000),
    queue_size=st.integers(0, 1000),
    queue_timeout=durations,
)


@st.composite
def tier_policies(draw: st.DrawFn) -> Tiers:
    allowed = draw(st.lists(st.sampled_from(Tier), min_size=1, unique=True))
    return Tiers(
        default=draw(st.sampled_from(allowed)),
        allowed=tuple(allowed),
        standard_fallback=draw(st.sampled_from(StandardFallback)),
        limits=draw(st.dictionaries(st.sampled_from(Tier), limits)),
    )


@st.composite
def pool_revisions(draw: st.DrawFn, pool: PoolName) -> tuple[Revision, ...]:
    """Revisions of one pool, with weights that sum to 100, or to 0."""
    found = draw(st.lists(names, max_size=3, unique=True))
    cuts = sorted(draw(st.tuples(st.integers(0, 100), st.integers(0, 100))))
    shares = [cuts[0], cuts[1] - cuts[0], 100 - cuts[1]]
    if len(found) < 3:
        shares = [100, 0] if draw(st.booleans()) else [0, 0]
    urls = st.integers(1, 65535).map(lambda port: f"http://127.0.0.1:{port}")
    endpoints = st.lists(
        st.builds(Endpoint, name=names, url=urls), max_size=3, unique_by=lambda e: e.name
    ).map(tuple)
    return tuple(
        Revision(
            name=name,
            pool=pool,
            weight=share,
            fingerprint=draw(fingerprints if share else st.none() | fingerprints),
            endpoints=draw(endpoints),
        )
        for name, share in zip(found, shares, strict=False)
    )


@st.composite
def tables(draw: st.DrawFn) -> RoutingTable:
    pools = draw(st.lists(st.sampled_from(PoolName), min_size=1, unique=True))
    return RoutingTable(
        version=draw(st.integers(1, 2**53)),
        service=draw(names),
        model=draw(st.sampled_from(["m", "org/model-1.5:latest", "Llama_3"])),
        tiers=draw(tier_policies()),
        standard_to_strict=draw(st.integers(0, 100)),
        drift=Drift(sample_rate=draw(st.sampled_from(["0", "0.01", "1"]))),
        sentinels=Sentinels(every=draw(durations)),
        receipts=Receipts(strict=draw(st.sampled_from(["Digest", "Full"]))),
        pools=tuple(pools),
        revisions=tuple(r for pool in pools for r in draw(pool_revisions(pool))),
    )


def test_table_is_golden(check_golden: CheckGolden) -> None:
    check_golden(GOLDEN / "routing_table.json", dump(TABLE))


def test_schema_is_golden(check_golden: CheckGolden) -> None:
    schema = json.dumps(RoutingTable.model_json_schema(), indent=2, sort_keys=True)

    check_golden(GOLDEN / "routing_table.schema.json", schema + "\n")


def test_golden_table_loads() -> None:
    assert load((GOLDEN / "routing_table.json").read_bytes()) == TABLE


@given(tables())
def test_round_trip_gives_the_same_table_and_the_same_text(table: RoutingTable) -> None:
    text = dump(table)

    assert load(text) == table
    assert load(text.encode()) == table
    assert dump(load(text)) == text
    assert json.loads(text)["checksum"] == table_checksum(table)


@given(tables(), st.integers(1, 2**53))
def test_checksum_tells_one_version_from_another(table: RoutingTable, version: int) -> None:
    other = table.model_copy(update={"version": version})

    assert (table_checksum(table) == table_checksum(other)) == (table == other)


@given(st.data())
def test_altered_byte_is_refused_or_changes_nothing(data: st.DataObject) -> None:
    text = bytearray(dump(TABLE).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    try:
        loaded = load(bytes(text))
    except TableRejected:
        return

    # White space between the tokens is all that may differ.
    assert loaded == TABLE


@given(st.data())
def test_cut_text_is_refused(data: st.DataObject) -> None:
    text = dump(TABLE).rstrip()
    end = data.draw(st.integers(0, len(text) - 1))

    with pytest.raises(TableRejected):
        load(text[:end])


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_garbage_is_refused_and_never_raises_anything_else(text: bytes | str) -> None:
    with pytest.raises(TableRejected):
        load(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="too-deep"),
        pytest.param('{"schema": "\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"schema": "\xff"}', id="invalid-utf-8"),
        pytest.param('{"version": ' + "9" * 5000 + "}", id="huge-number"),
        pytest.param('{"version": NaN}', id="not-a-number"),
        pytest.param("null", id="no-object"),
        pytest.param("", id="empty"),
    ],
)
def test_hostile_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(TableRejected):
        load(text)


def test_wrong_checksum_is_refused_with_both() -> None:
    wrong = "sha256:" + "0" * 64

    with pytest.raises(TableRejected) as refusal:
        load(json.dumps(document(checksum=wrong)))

    assert wrong in str(refusal.value)
    assert table_checksum(TABLE) in str(refusal.value)


def test_missing_checksum_is_refused() -> None:
    body = document()
    del body["checksum"]

    with pytest.raises(TableRejected, match="checksum None"):
        load(json.dumps(body))


ENDPOINT = {"name": "e0", "url": "http://127.0.0.1:8000"}

REFUSED = [
    pytest.param(document(colour="red"), "colour", id="unknown-field"),
    pytest.param(with_revisions(revision(colour="red")), "colour", id="unknown-nested-field"),
    pytest.param(document(schema="isobatch.routing/v2"), "schema", id="other-schema"),
    pytest.param(document(version=0), "version", id="version-zero"),
    pytest.param(document(version="7"), "version", id="version-as-text"),
    pytest.param(document(version=7.0), "version", id="version-as-a-float"),
    pytest.param(document(version=True), "version", id="version-as-a-boolean"),
    pytest.param(document(standard_to_strict=10), "standard_to_strict", id="second-spelling"),
    pytest.param(document(standardToStrict=101), "standardToStrict", id="share-above-100"),
    pytest.param(document(model="chat:verified"), ":verified", id="model-ends-in-a-tier"),
    pytest.param(document(pools=[]), "pools", id="no-pool"),
    pytest.param(document(pools=["strict", "throughput", "strict"]), "twice", id="pool-twice"),
    pytest.param(document(pools=["strict"]), "lacks", id="revision-of-an-absent-pool"),
    pytest.param(with_revisions(revision(weight=99)), "sum to 99", id="weights-below-100"),
    pytest.param(
        with_revisions(revision("a1", 60), revision("b2", 60)), "sum to 120", id="weights-above-100"
    ),
    pytest.param(with_revisions(revision("a1", 0), revision("a1")), "twice", id="revision-twice"),
    pytest.param(with_revisions(revision(weight=-1)), "weight", id="negative-weight"),
    pytest.param(
        with_revisions(revision(pool="strict")), "no fingerprint", id="strict-uncertified"
    ),
    pytest.param(
        with_revisions(revision(service="s", endpoints=[ENDPOINT])), "both", id="two-addresses"
    ),
    pytest.param(
        with_revisions(revision(endpoints=[ENDPOINT, ENDPOINT])), "one name", id="endpoint-twice"
    ),
    pytest.param(
        with_revisions(revision(endpoints=[ENDPOINT | {"url": "http://a/b"}])), "url", id="path"
    ),
    pytest.param(with_revisions(revision(fingerprint="md5:0")), "fingerprint", id="digest"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED)
def test_well_sealed_document_of_another_shape_is_refused(
    content: dict[str, Any], said: str
) -> None:
    with pytest.raises(TableRejected) as refusal:
        load(sealed(content))

    assert said in str(refusal.value)


@pytest.mark.parametrize("weights", [(), (0,), (0, 0), (100,), (100, 0), (50, 50), (1, 2, 97)])
def test_weights_that_sum_to_100_or_0_are_accepted(weights: tuple[int, ...]) -> None:
    revisions = [revision(f"r{n}", weight) for n, weight in enumerate(weights)]

    assert [r.weight for r in load(sealed(with_revisions(*revisions))).revisions] == list(weights)


@given(st.lists(st.integers(0, 100), max_size=4))
def test_pool_is_accepted_exactly_when_its_weights_are_whole(weights: list[int]) -> None:
    revisions = tuple(
        Revision(name=f"r{n}", pool=PoolName.THROUGHPUT, weight=weight)
        for n, weight in enumerate(weights)
    )
    fields = {**TABLE.model_dump(exclude={"revisions"}), "revisions": revisions}
    if sum(weights) in (0, 100):
        RoutingTable.model_validate(fields)
    else:
        with pytest.raises(ValidationError, match="weights of pool"):
            RoutingTable.model_validate(fields)


def test_one_revision_may_stand_in_both_pools() -> None:
    assert {(r.pool, r.name) for r in load(dump(TABLE)).revisions} >= {
        (PoolName.STRICT, "a1"),
        (PoolName.THROUGHPUT, "a1"),
    }


def test_document_of_an_older_writer_gets_defaults_for_absent_fields() -> None:
    body = document()
    del body["drift"], body["standardToStrict"]

    loaded = load(sealed(body))

    assert (loaded.drift, loaded.standard_to_strict) == (Drift(), 0)

"""What was done to a chain afterwards is found, with the number of the record."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.receipt import Record
from isobatch_gateway.receipts.canonical import parse
from isobatch_gateway.receipts.chain import START, Draft, Head, Sealed, line, seal, split, verify
from isobatch_gateway.receipts.signing import Signer, Trusted

OURS, FOREIGN = Signer.of(b"\1" * 32), Signer.of(b"\2" * 32)
TRUSTED = Trusted({OURS.id: OURS.public})
Lines = list[bytes]


def chain(signer: Signer = OURS, receipts: int = 4) -> list[Sealed]:
    """`receipts` pairs of open and final: records 1 and 2, 3 and 4, and so on."""
    head, made = START, []
    for number in range(receipts):
        for kind in ("open", "final"):
            draft = Draft(kind, {"n": 100, "kind": kind}, f"rcpt-{number:032x}", number)
            made.append(seal(draft, "gw", head, signer))
            head = Head(made[-1].seq, made[-1].digest)
    return made


def lines_of(records: list[Sealed]) -> Lines:
    return [line(record.payload, record.signature) for record in records]


def changed(lines: Lines) -> Lines:
    return [raw.replace(b'"n":100', b'"n":101') if at == 3 else raw for at, raw in enumerate(lines)]


def rewritten(lines: Lines) -> Lines:
    return [raw.replace(b'"n":100', b'"n":1e2') if at == 3 else raw for at, raw in enumerate(lines)]


def signed_again(lines: Lines) -> Lines:
    record = chain()[3]
    return [*lines[:3], line(record.payload, FOREIGN.sign(record.payload)), *lines[4:]]


def reused(_: Lines) -> Lines:
    records = chain()
    head = Head(records[-1].seq, records[-1].digest)
    draft = Draft("final", {"n": 1}, records[3].receipt, 9)
    return lines_of([*records, seal(draft, "gw", head, OURS)])


@pytest.mark.parametrize(
    ("forge", "seq"),
    [
        pytest.param(changed, 4, id="changed-byte"),
        pytest.param(lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], 5, id="swapped"),
        pytest.param(lambda lines: [*lines[:3], *lines[4:]], 5, id="dropped"),
        pytest.param(signed_again, 4, id="signature-of-another-key"),
        pytest.param(lambda _: lines_of(chain(FOREIGN)), 2, id="signed-again-with-another-key"),
        pytest.param(reused, 9, id="replayed-id"),
        pytest.param(rewritten, 4, id="number-written-another-way"),
        pytest.param(lambda lines: lines[:7], 7, id="ends-in-what-nobody-vouches-for"),
    ],
)
def test_a_forgery_is_found_with_its_number(forge: Callable[[Lines], Lines], seq: int) -> None:
    lines = lines_of(chain())
    assert verify(lines, TRUSTED).findings == []

    assert seq in {found.seq for found in verify(forge(lines), TRUSTED).findings}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(max_codepoint=127)), inner)
    ),
    max_leaves=20,
)


names = st.text(st.characters(codec="ascii"), max_size=9)
bodies = st.dictionaries(names, json_values, max_size=5)
receipts = st.integers(0, 2**128 - 1).map(lambda n: f"rcpt-{n:032x}")
kinds = st.sampled_from(["open", "final", "checkpoint", "replay", "suspect", "violation"])


@given(st.lists(st.tuples(kinds, bodies, st.none() | receipts), min_size=1, max_size=6))
def test_any_receipt_goes_round(drafts: list[tuple[str, dict[str, object], str | None]]) -> None:
    head, lines = START, []
    for number, (kind, body, receipt) in enumerate(drafts):
        record = seal(Draft(kind, body, receipt, number), "gw", head, OURS)
        raw = line(record.payload, record.signature)
        assert split(raw) == (record.payload, record.signature)
        document = parse(record.payload)
        assert (document["body"], document.get("receipt")) == (body, receipt)
        assert Record.model_validate(document).kind == kind
        head = Head(record.seq, record.digest)
        lines.append(raw)

    problems = {found.problem for found in verify(lines, TRUSTED).findings}

    # What hypothesis may draw: a receipt twice, or an end that nobody vouches for.
    assert all("again" in problem or "is unsigned" in problem for problem in problems)

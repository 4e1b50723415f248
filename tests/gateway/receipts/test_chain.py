"""What was done to a chain afterwards is found, with the number of the record."""

from collections.abc import Callable

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from isobatch_gateway.receipts.canonical import canonical
from isobatch_gateway.receipts.chain import START, Draft, Head, Sealed, line, seal, verify
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


@given(json_values)
def test_canonical_bytes_are_those_of_the_reference(value: object) -> None:
    assert canonical(value) == rfc8785.dumps(value)  # type: ignore[arg-type]  # JSON


def test_signatures_are_those_of_rfc_8032() -> None:
    seed = "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7"
    signature = (
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
    )

    assert Signer.of(bytes.fromhex(seed)).sign(b"\xaf\x82").hex() == signature

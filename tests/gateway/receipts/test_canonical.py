"""The bytes that are signed: RFC 8785 and RFC 8032, by their own vectors and a reference."""

import json
import struct
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from isobatch_gateway.receipts.canonical import (
    NotCanonical,
    canonical,
    canonical_of_request,
    parse,
)
from isobatch_gateway.receipts.signing import Signer

# RFC 8785, appendix B.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

# RFC 8785, sections 3.2.2 and 3.2.3.
DOCUMENTS = {
    r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
     "string":
     "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}""": (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    ),
    r"""{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew", "1": "One",
     "\ud83d\ude00": "Emoji", "\u0080": "Control", "\u00f6": "Latin"}""": (
        '{"\\r":"Carriage Return","1":"One","\u0080":"Control","ö":"Latin","€":"Euro Sign",'
        '"😀":"Emoji","\ufb33":"Hebrew"}'
    ),
}

# RFC 8032, section 7.1: private key, public key, message, signature.
SIGNATURES = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701"
        "cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0"
        "f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f76098"
        "4dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(max_codepoint=127)), inner)
    ),
    max_leaves=20,
)
requests = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(1e-8, 1e-3)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.parametrize(("bits", "written"), NUMBERS.items())
def test_numbers_are_written_as_rfc_8785_does(bits: str, written: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))

    assert canonical_of_request(number, 1).decode() == written


@pytest.mark.parametrize(("document", "written"), DOCUMENTS.items(), ids=["values", "order"])
def test_documents_are_written_as_rfc_8785_does(document: str, written: str) -> None:
    assert canonical_of_request(json.loads(document), 1).decode() == written


@given(plain)
def test_a_record_has_the_bytes_of_the_reference(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)
    assert parse(canonical(value)) == value


@given(requests)
def test_a_request_has_the_bytes_of_the_reference(value: Any) -> None:
    assert canonical_of_request(value, 1) == rfc8785.dumps(value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"a": 1.5}, id="float"),
        pytest.param({"a": 1 << 53}, id="integer-beyond-doubles"),
        pytest.param({"ä": 1}, id="key-beyond-ascii"),
        pytest.param({"a": "\ud800"}, id="half-a-surrogate"),
        pytest.param({"a": b"x"}, id="bytes"),
    ],
)
def test_a_record_holds_nothing_that_can_be_written_two_ways(value: Any) -> None:
    with pytest.raises(NotCanonical):
        canonical(value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"a": 1 << 70}, id="integer"),
        pytest.param(json.loads("[" * 900 + "]" * 900), id="deep"),
        pytest.param({"a": "\ud800"}, id="half-a-surrogate"),
        pytest.param(float("inf"), id="infinity"),
    ],
)
def test_a_request_without_a_canonical_form_is_told_and_breaks_nothing(value: Any) -> None:
    try:
        assert canonical_of_request(value, 1) == rfc8785.dumps(value)
    except NotCanonical as refused:
        assert str(refused)  # noqa: PT017  # either is right: what counts is that nothing else comes


@pytest.mark.parametrize("raw", [b'{"b":1,"a":2}', b'{"a": 1}', b'{"a":1.0}', b"{", b'{"a":1e0}'])
def test_bytes_that_are_not_canonical_are_refused(raw: bytes) -> None:
    with pytest.raises(NotCanonical):
        parse(raw)


@pytest.mark.parametrize(("private", "public", "message", "signature"), SIGNATURES)
def test_signatures_are_those_of_rfc_8032(
    private: str, public: str, message: str, signature: str
) -> None:
    signer = Signer.of(bytes.fromhex(private))

    assert signer.public.hex() == public
    assert signer.sign(bytes.fromhex(message)).hex() == signature

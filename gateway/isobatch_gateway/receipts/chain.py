"""Decides how records are chained and sealed, and finds what was done to a chain afterwards."""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from isobatch_contracts.receipt import NO_RECORD, SCHEMA

from isobatch_gateway.receipts.canonical import NotCanonical, canonical, parse
from isobatch_gateway.receipts.signing import Signer, Trusted

UNSIGNED = frozenset({"open"})


class Head(NamedTuple):
    """The last record of a chain."""

    seq: int
    digest: str


START = Head(0, NO_RECORD)


class Draft(NamedTuple):
    """A record that has no place in the chain yet. `at`: milliseconds since 1970."""

    kind: str
    body: dict[str, Any]
    receipt: str | None
    at: int


class Sealed(NamedTuple):
    """A record in its place. `signature` is empty for what the next record vouches for."""

    chain: str
    seq: int
    kind: str
    receipt: str | None
    at: int
    payload: bytes
    signature: bytes

    @property
    def digest(self) -> str:
        """What the next record names. Of the payload, as signatures may be written anew."""
        return digest_of(self.payload)


def digest_of(payload: bytes) -> str:
    """`sha256:…` of a record's canonical bytes."""
    return "sha256:" + hashlib.sha256(payload).hexdigest()


def seal(draft: Draft, chain: str, before: Head, signer: Signer) -> Sealed:
    """`draft` as the record after `before`. Raises `NotCanonical`."""
    seq = before.seq + 1
    document = {
        "schema": SCHEMA,
        "chain": chain,
        "seq": seq,
        "prev": before.digest,
        "kind": draft.kind,
        "at": draft.at,
        "key": signer.id,
        "body": draft.body,
    }
    if draft.receipt is not None:
        document["receipt"] = draft.receipt
    payload = canonical(document)
    signature = b"" if draft.kind in UNSIGNED else signer.sign(payload)
    return Sealed(chain, seq, draft.kind, draft.receipt, draft.at, payload, signature)


def line(payload: bytes, signature: bytes) -> bytes:
    """A record as one line of an export, canonical itself."""
    tail = b',"signature":"' + base64.b64encode(signature) + b'"' if signature else b""
    return b'{"record":' + payload + tail + b"}"


class Finding(NamedTuple):
    """Something wrong with a chain, and the number of the record it was found at."""

    chain: str
    seq: int
    problem: str


@dataclass(slots=True)
class Verifier:
    """Walks the lines of an export in order. `findings` are what is wrong; none: all is whole."""

    trusted: Trusted
    is_excerpt: bool = False  # one receipt out of its chain: its records stand apart
    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    receipts: int = 0
    heads: dict[str, Head] = field(default_factory=dict)
    _unsealed: dict[str, int] = field(default_factory=dict)
    _open_digests: dict[tuple[str, int], str] = field(default_factory=dict)
    _gaps: list[tuple[str, int, str]] = field(default_factory=list)
    _tombs: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    _opened: dict[str, str] = field(default_factory=dict)  # receipt id -> where it is open
    _closed: set[str] = field(default_factory=set)
    _sought: dict[tuple[str, int], str] = field(default_factory=dict)

    def seek(self, chain: str, seq: int, digest: str) -> None:
        """Require that record `seq` of `chain` has `digest`: as a checkpoint or receipt says."""
        self._sought[chain, seq] = digest

    def take(self, number: int, raw: bytes) -> None:
        """Look at one line; `number` stands in where the record does not tell its own."""
        payload, signature = split(raw)
        try:
            record = parse(payload)
            chain, seq, kind = record["chain"], record["seq"], record["kind"]
            name, prev, body = record["key"], record["prev"], record["body"]
            if line(payload, signature) != raw.rstrip(b"\n"):
                raise NotCanonical("not written in the canonical form")
        except (NotCanonical, KeyError, TypeError) as exc:
            why = str(exc) if isinstance(exc, NotCanonical) else "not a record"
            self.findings.append(Finding("?", number, why))
            return
        self.records += 1
        digest = digest_of(payload)
        if not self.is_excerpt:
            self._place(chain, seq, prev)
        self.heads[chain] = Head(seq, digest)
        wanted = self._sought.pop((chain, seq), None)
        if wanted is not None and wanted != digest:
            self._find(chain, seq, "is not the record that the checkpoint names")
        if kind in UNSIGNED and not signature:
            self._unsealed[chain] = seq
            self._open_digests[chain, seq] = digest
        elif not self.trusted.knows(name):
            self._find(chain, seq, f"is signed by {name}, which is not a trusted key")
        elif not self.trusted.is_signed(name, payload, signature):
            self._find(chain, seq, "does not have the signature of its key")
        else:
            self._vouch(chain, body.get("opened"))
        if kind == "tombstone":
            self._tombs.setdefault(chain, []).append((body["through"], body["digest"]))
        self._follow(chain, seq, kind, record.get("receipt"))

    def end(self) -> list[Finding]:
        """All findings, once the last line was taken."""
        for chain, seq, prev in self._gaps:
            if (seq - 1, prev) not in self._tombs.get(chain, ()):
                self._find(chain, seq, "follows records that are missing, without a tombstone")
        for chain, seq in self._unsealed.items():
            self._find(chain, seq, "is unsigned and no signed record follows it")
        for chain, seq in self._sought:
            tombs = self._tombs.get(chain, ())
            if not any(through >= seq for through, _ in tombs):
                self._find(chain, seq, "is named by the checkpoint and is missing: the tail is cut")
        self.findings.sort(key=lambda found: (found.chain, found.seq))
        return self.findings

    def _place(self, chain: str, seq: int, prev: str) -> None:
        before = self.heads.get(chain)
        if before is None:
            if Head(seq - 1, prev) != START:
                self._gaps.append((chain, seq, prev))
        elif seq != before.seq + 1:
            self._find(
                chain, seq, f"stands after record {before.seq}: dropped, swapped or repeated"
            )
        elif prev != before.digest:
            self._find(chain, seq, f"does not name record {before.seq} as it is: one was changed")

    def _vouch(self, chain: str, opened: Any) -> None:
        """A signed record vouches for those before it; in an excerpt for the one it names."""
        if not self.is_excerpt:
            self._unsealed.pop(chain, None)
        elif opened is not None:
            found = self._open_digests.get((chain, opened["seq"]))
            if found is not None and found != opened["digest"]:
                self._find(chain, opened["seq"], "is not the record that the final one names")
            elif found is not None:
                self._unsealed.pop(chain, None)

    def _follow(self, chain: str, seq: int, kind: str, receipt: str | None) -> None:
        if receipt is None or kind not in ("open", "final"):
            return
        if receipt in self._closed or (kind == "open" and receipt in self._opened):
            self._find(chain, seq, f"uses the receipt id {receipt} again")
        elif kind == "open":
            self._opened[receipt] = chain
        else:
            self._opened.pop(receipt, None)
            self._closed.add(receipt)
            self.receipts += 1

    def _find(self, chain: str, seq: int, problem: str) -> None:
        self.findings.append(Finding(chain, seq, problem))


_BEGIN, _SIGNATURE = b'{"record":', b',"signature":"'


def split(raw: bytes) -> tuple[bytes, bytes]:
    """(payload, signature) of a line; a line that is none has a payload that does not parse."""
    raw = raw.rstrip(b"\n")
    if not raw.startswith(_BEGIN) or not raw.endswith(b"}"):
        return raw, b""
    inner = raw[len(_BEGIN) : -1]
    at = inner.rfind(_SIGNATURE)
    # A signature is the last member: 88 characters and the closing quote.
    if at < 0 or len(inner) - at - len(_SIGNATURE) != 89:
        return inner, b""
    try:
        return inner[:at], base64.b64decode(inner[at + len(_SIGNATURE) : -1], validate=True)
    except ValueError:
        return inner, b""


def pinned_by(record: dict[str, Any], payload: bytes) -> Iterator[tuple[int, str, str]]:
    """(seq, chain, digest) of records that a signed `record` shows to have been in its chain."""
    yield record["seq"], record["chain"], digest_of(payload)
    if record["kind"] == "checkpoint":
        yield record["body"]["seq"], record["chain"], record["body"]["digest"]


def lines_of_receipt(document: bytes) -> Iterator[bytes]:
    """The lines within one receipt as the API gives it: `{"records": [line, …]}`."""
    for entry in orjson.loads(document)["records"]:
        signature = base64.b64decode(entry["signature"]) if "signature" in entry else b""
        yield line(orjson.dumps(entry["record"], option=orjson.OPT_SORT_KEYS), signature)


def verify(lines: Iterable[bytes], trusted: Trusted) -> Verifier:
    """A verifier that has taken all of `lines`."""
    verifier = Verifier(trusted)
    for number, raw in enumerate(lines, 1):
        verifier.take(number, raw)
    verifier.end()
    return verifier

"""Performs: runs the request of a receipt again, amid whatever is served, and compares the bits."""

import random
from typing import Any, NamedTuple

from isobatch_contracts import headers as names
from isobatch_contracts.numerics import NUMERICS_PATH
from isobatch_contracts.receipt import AnswerDigests
from isobatch_contracts.tiers import PoolName

from isobatch_gateway.body import Body, read_body, rewrite
from isobatch_gateway.errors import UpstreamError
from isobatch_gateway.fleet import Replica, Service
from isobatch_gateway.health import admitted
from isobatch_gateway.receipts.chain import Sealed
from isobatch_gateway.receipts.content import ContentUnreadable
from isobatch_gateway.receipts.facts import answer_body, numerics_body, request_digests
from isobatch_gateway.receipts.keeper import Keeper
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.reading import Content, Found, content_of
from isobatch_gateway.receipts.side_channel import ask_replica, digests_of
from isobatch_gateway.receipts.verdict import (
    Finding,
    Verdict,
    compare,
    differences,
    first_difference,
)
from isobatch_gateway.refusals import Refusal
from isobatch_gateway.upstream.pool import ConnectionPool, Pools

_REPLACED = ("stream", "stream_options")
_MOST = ("max_tokens", "max_completion_tokens")


class Replayed(NamedTuple):
    """A replay: what it showed, where it ran, and the record that says so."""

    finding: Finding
    replica: str | None
    record: Sealed | None


class _Run(NamedTuple):
    """What is run again. `digests`: the sequences that the receipt has."""

    opened: dict[str, Any]
    final: dict[str, Any]
    sequences: list[dict[str, Any]]
    body: Body
    content: Content | None


class Replayer:
    """Replays receipts on the replicas that are served now."""

    def __init__(self, keeper: Keeper, pools: Pools, seconds: float) -> None:
        """`seconds`: how long one answer may take."""
        self._keeper = keeper
        self._pools = pools
        self._seconds = seconds

    async def replay(
        self, ledger: Ledger, found: Found, given: bytes, service: Service | None, salt: str
    ) -> Replayed:
        """Run it again; `given` is the request where the ledger has digests alone.

        Raises `LedgerUnavailable`, `StoreFailed`.
        """
        run = await self._run(ledger, found, given)
        if isinstance(run, Finding):
            return Replayed(run, None, None)
        replica = self._replica(run, service)
        if isinstance(replica, Finding):
            return Replayed(replica, None, await self._record(ledger, found, replica, None, None))
        told = await self._ask(run, replica, salt)
        if isinstance(told, Finding):
            return Replayed(told, replica.served_by, None)
        key = self._keeper.key(str(run.opened["tenant"]))
        answer = answer_body(told, key)
        finding = compare(run.sequences, answer["sequences"])
        if finding.verdict is Verdict.DIFFERS and run.content is not None:
            now = [list(one.ids or ()) for one in told.sequences]
            finding = finding._replace(first=first_difference(run.content.token_ids, now))
        record = await self._record(ledger, found, finding, replica, answer)
        return Replayed(finding, replica.served_by, record)

    async def _run(self, ledger: Ledger, found: Found, given: bytes) -> _Run | Finding:
        """What is to be run, or why nothing can be."""
        opened, final = found.body("open"), found.body("final")
        if opened is None or final is None:
            return _not("the request is under way, or its record is gone")
        answer = final.get("answer") or {"missing": f"it was {final['outcome']}"}
        if "missing" in answer:
            return _not(f"the receipt has no digests of tokens: {answer['missing']}")
        try:
            content = await content_of(self._keeper, ledger, found.receipt)
        except ContentUnreadable as exc:
            return _not(str(exc))
        raw = given or (b"" if content is None else content.request)
        if not raw:
            return _not("only digests of the request are kept: give the request itself")
        body = read_body(raw)
        if isinstance(body, Refusal):
            return _not("what was given is no request: " + body.message)
        digests = request_digests(raw, body, self._keeper.key(opened["tenant"]))
        known = opened["request"]
        is_same = digests["exact"] == known["exact"] or (
            known["canonical"] is not None and digests["canonical"] == known["canonical"]
        )
        if not is_same:
            return _not("what was given is not the request of this receipt: its digest differs")
        return _Run(opened, final, answer["sequences"], body, content)

    def _replica(self, run: _Run, service: Service | None) -> Replica | Finding:
        """A ready replica of the fingerprint, rather not the one that answered."""
        numerics = run.final["numerics"]
        strict = [] if service is None else _strict(service)
        if numerics is None:
            return _not("the receipt names no fingerprint")
        fit = [r for r in strict if r.id.fingerprint == numerics["fingerprint"]]
        if fit:
            answered = run.final["revision"], run.final["replica"]
            return min(fit, key=lambda r: ((r.id.revision, r.id.name) == answered, r.load))
        served = [numerics_body(r.certified) for r in strict if r.certified is not None]
        now = [differences(numerics, other) for other in served if other is not None]
        said = "; ".join(now[0]) if now else f"no strict replica of {run.opened['model']} is ready"
        return Finding(
            Verdict.UNAVAILABLE, f"the fingerprint {numerics['fingerprint']} is not served: {said}"
        )

    async def _ask(self, run: _Run, replica: Replica, salt: str) -> AnswerDigests | Finding:
        """The digests of the request's answer now, as far as it was answered then."""
        pool = self._pools.at(replica.id.url)
        worker_id = f"req-{random.getrandbits(128):032x}"  # unique, not secret
        payload = _payload(run, salt)
        replica.in_flight += 1
        try:
            if not await _is_certified(pool, replica):
                return _gone()
            headers = [
                (b"content-type", b"application/json"),
                (names.REQUEST_ID.encode(), worker_id.encode()),
            ]
            path = run.opened["path"]
            answer = await ask_replica(pool, ("POST", path), headers, payload, self._seconds)
        except UpstreamError:
            return _gone()
        finally:
            replica.in_flight -= 1
        if answer.status >= 500:
            return _gone()
        if answer.status != 200:
            return Finding(
                Verdict.DIFFERS, f"the request is refused now, with status {answer.status}"
            )
        lengths = {one["index"]: one["tokens"] for one in run.sequences}
        at = [lengths.get(index, 0) for index in range(max(lengths, default=0) + 1)]
        told = await digests_of(pool, worker_id, at=at, with_ids=run.content is not None)
        if isinstance(told, str):
            return _gone()
        if run.final["outcome"] == "complete":
            return told
        # Sequences that had not begun when the client left are not looked at.
        begun = tuple(one for one in told.sequences if one.index in lengths)
        return AnswerDigests(sequences=begun)

    async def _record(
        self,
        ledger: Ledger,
        found: Found,
        finding: Finding,
        replica: Replica | None,
        answer: dict[str, Any] | None,
    ) -> Sealed:
        last = next(record for record in found.records if record.kind == "final")
        body = {
            "of": {"chain": last.chain, "seq": last.seq, "digest": last.digest},
            "verdict": finding.verdict.value,
            "reason": finding.reason,
            "first": None if finding.first is None else finding.first._asdict(),
            "replica": None if replica is None else replica.id.name,
            "revision": None if replica is None else replica.id.revision,
            "numerics": None if replica is None else numerics_body(replica.certified),
            "answer": answer,
        }
        tenant = str((found.body("open") or {}).get("tenant"))
        return await ledger.append("replay", body, found.receipt, tenant)


def _strict(service: Service) -> list[Replica]:
    return [r for i, r in service.replicas.items() if i.pool is PoolName.STRICT and r.is_eligible]


async def _is_certified(pool: ConnectionPool, replica: Replica) -> bool:
    """Whether what listens there is the certified worker: a port outlives its process."""
    answer = await ask_replica(pool, ("GET", NUMERICS_PATH), [], b"", 10.0)
    return answer.status == 200 and admitted(answer.body, replica.id.fingerprint) is not None


def _payload(run: _Run, salt: str) -> bytes:
    """The request as it goes to the worker: unstreamed, and no longer than it was delivered."""
    document = {k: v for k, v in run.body.document.items() if k not in _REPLACED}
    if run.final["outcome"] != "complete" and "min_tokens" not in document:
        # What follows what was delivered is of no interest, and reaches nothing before it.
        for name in _MOST:
            document.pop(name, None)
        document["max_tokens"] = max(1, *(one["tokens"] for one in run.sequences))
    seed = None if run.opened["seed"] is None else int(run.opened["seed"])
    payload = rewrite(run.body._replace(document=document), salt=salt, seed=seed)
    assert isinstance(payload, bytes), "it was written once before"
    return payload


def _not(reason: str) -> Finding:
    return Finding(Verdict.NOT_REPLAYABLE, reason)


def _gone() -> Finding:
    return Finding(Verdict.UNAVAILABLE, "the replica went away or is too busy; try again")

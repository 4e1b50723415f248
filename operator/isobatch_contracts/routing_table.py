"""Decides what a routing table is, and whether a document is one.

One document per service, written by the operator, read by the gateways. `dump` seals it with a
checksum over its canonical form; `load` refuses anything unknown or altered, so that a reader can
keep its last good table.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import from_json

from isobatch_contracts.base import Document
from isobatch_contracts.fields import Digest, DnsLabel, ModelName, Percent
from isobatch_contracts.resource import Drift, Receipts, Sentinels, Tiers
from isobatch_contracts.tiers import PoolName

SCHEMA: Literal["isobatch.routing/v1"] = "isobatch.routing/v1"


class TableRejected(ValueError):
    """A document that is no routing table of this version; the message says why."""


class Endpoint(Document):
    """One replica at a known address (local mode)."""

    name: DnsLabel
    url: Annotated[str, Field(pattern=r"^http://[^/?#]+$", description="Base URL, no path.")]


class Revision(Document):
    """One revision of one pool: its share of the pool's traffic and where its replicas are.

    `weight` is a percent; per pool the weights sum to 100, or to 0 when nobody is ready.
    `fingerprint` is the one numerics fingerprint admitted (strict pool; absent until certified).
    """

    name: DnsLabel
    pool: PoolName
    weight: Percent
    fingerprint: Digest | None = None
    service: DnsLabel | None = None
    endpoints: tuple[Endpoint, ...] = ()

    @model_validator(mode="after")
    def _is_addressable(self) -> Self:
        if self.service is not None and self.endpoints:
            raise ValueError(f"revision {self.name!r} has both a service and endpoints")
        if self.pool is PoolName.STRICT and self.weight > 0 and self.fingerprint is None:
            raise ValueError(f"strict revision {self.name!r} has weight but no fingerprint")
        if len({endpoint.name for endpoint in self.endpoints}) != len(self.endpoints):
            raise ValueError(f"revision {self.name!r} has two endpoints of one name")
        return self


class RoutingTable(Document):
    """What the gateways need to know of one service. `version` is monotone."""

    schema_id: Literal["isobatch.routing/v1"] = Field(SCHEMA, alias="schema")
    version: Annotated[int, Field(ge=1)]
    service: DnsLabel
    model: ModelName
    tiers: Tiers
    standard_to_strict: Percent = 0
    drift: Drift = Drift()
    sentinels: Sentinels = Sentinels()
    receipts: Receipts = Receipts()
    pools: Annotated[
        tuple[PoolName, ...], Field(min_length=1, description="Pools the service has.")
    ]
    revisions: tuple[Revision, ...] = ()

    @model_validator(mode="after")
    def _weights_are_whole(self) -> Self:
        for pool in PoolName:
            total = sum(r.weight for r in self.revisions if r.pool is pool)
            if total not in (0, 100):
                raise ValueError(f"weights of pool {pool.value!r} sum to {total}, not 0 or 100")
        keys = [(r.pool, r.name) for r in self.revisions]
        if len(set(keys)) != len(keys):
            raise ValueError("a revision stands twice in one pool")
        if len(set(self.pools)) != len(self.pools):
            raise ValueError("pools names a pool twice")
        absent = {r.pool for r in self.revisions} - set(self.pools)
        if absent:
            raise ValueError(f"revisions of pools that the service lacks: {sorted(absent)}")
        return self


def checksum(document: dict[str, Any]) -> str:
    """`sha256:…` of a table's JSON document without its own `checksum` field, in canonical form."""
    body = {key: value for key, value in document.items() if key != "checksum"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def dump(table: RoutingTable) -> str:
    """`table` as sealed JSON text, stable for equal tables."""
    document = table.model_dump(mode="json", exclude_none=True)
    document["checksum"] = checksum(document)
    return json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def load(text: str | bytes) -> RoutingTable:
    """The table in `text`. Raises `TableRejected` if it is malformed, unknown or altered."""
    try:
        # Not json.loads: that lets lone surrogates and any depth through, for others to fall over.
        document = from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        raise TableRejected(f"routing table is not JSON: {exc}") from exc
    if not isinstance(document, dict):
        raise TableRejected(f"routing table must be an object, not {type(document).__name__}")
    stated = document.pop("checksum", None)
    found = checksum(document)
    if stated != found:
        raise TableRejected(f"routing table says checksum {stated}, its content has {found}")
    try:
        # Strict and by alias: the writer's one spelling, so that "3" is no number here.
        return RoutingTable.model_validate_json(json.dumps(document), strict=True, by_name=False)
    except ValidationError as exc:
        raise TableRejected(f"routing table is not of schema {SCHEMA}: {exc}") from exc


def table_checksum(table: RoutingTable) -> str:
    """The checksum that `dump` seals `table` with."""
    return checksum(table.model_dump(mode="json", exclude_none=True))

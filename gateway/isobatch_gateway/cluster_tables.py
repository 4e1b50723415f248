"""Decides what to route by in a cluster: tables of ConfigMaps, replicas of EndpointSlices."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isobatch_contracts.routing_table import Endpoint, Revision, RoutingTable
from pydantic import ValidationError

from isobatch_gateway.table_book import TableBook

TABLE_KEY = "table.json"
_SERVICE = "kubernetes.io/service-name"
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """One pod that is ready, by the EndpointSlice that names it."""

    pod: str
    url: str


def addresses_of(slice_: Object) -> tuple[Address, ...]:
    """The pods in a slice that take new requests."""
    ports = slice_.get("ports") or ()
    port = next((p.get("port") for p in ports if p.get("name") == "http"), None)
    if port is None:
        return ()
    found = []
    for endpoint in slice_.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        if conditions.get("ready") is False or conditions.get("terminating"):
            continue
        address = endpoint["addresses"][0]
        host = f"[{address}]" if ":" in address else address
        pod = (endpoint.get("targetRef") or {}).get("name") or address.replace(".", "-")
        found.append(Address(pod, f"http://{host}:{port}"))
    return tuple(found)


@dataclass(slots=True)
class ClusterTables:
    """Everything that was heard of. Mutable: it follows the cluster's events."""

    _book: TableBook = field(default_factory=TableBook)
    _texts: dict[str, str] = field(default_factory=dict)
    _slices: dict[str, dict[str, tuple[Address, ...]]] = field(default_factory=dict)  # by Service
    _service_of: dict[str, str] = field(default_factory=dict)
    _filled: dict[str, RoutingTable] = field(default_factory=dict)
    _stale: set[str] = field(default_factory=set)  # tables whose replicas may be others
    has_changed: bool = False

    @property
    def rejected(self) -> int:
        """Documents that were no acceptable table, so far."""
        return self._book.rejected

    def replace_configs(self, namespace: str | None, items: Iterable[Object]) -> None:
        """These ConfigMaps are all that there are in `namespace`; None: anywhere."""
        known = {name_of(item): item for item in items}
        for gone in _within(namespace, self._texts) - set(known):
            self.drop_config(gone)
        for item in known.values():
            self.put_config(item)

    def put_config(self, item: Object) -> None:
        """This ConfigMap is there, as it is."""
        name, text = name_of(item), (item.get("data") or {}).get(TABLE_KEY)
        if text is None or self._texts.get(name) == text:
            return
        self._texts[name] = text
        if self._book.offer(name, lambda: text):
            self._stale.add(name)
            self.has_changed = True

    def drop_config(self, name: str) -> None:
        """That ConfigMap is gone."""
        if self._texts.pop(name, None) is None:
            return
        self._book.drop(name)
        self._filled.pop(name, None)
        self._stale.discard(name)
        self.has_changed = True
        for other in self._book.refused():
            text = self._texts[other]
            if self._book.offer(other, lambda text=text: text):  # type: ignore[misc]  # bound now
                self._stale.add(other)

    def replace_slices(self, namespace: str | None, items: Iterable[Object]) -> None:
        """These EndpointSlices are all that there are in `namespace`; None: anywhere."""
        known = {name_of(item): item for item in items}
        for gone in _within(namespace, self._service_of) - set(known):
            self.drop_slice(gone)
        for item in known.values():
            self.put_slice(item)

    def put_slice(self, item: Object) -> None:
        """This EndpointSlice is there, as it is."""
        metadata, name = item["metadata"], name_of(item)
        owner = (metadata.get("labels") or {}).get(_SERVICE)
        if owner is None:
            return
        service = f"{metadata['namespace']}/{owner}"
        addresses = addresses_of(item)
        slices = self._slices.setdefault(service, {})
        if slices.get(name) != addresses:
            slices[name] = addresses
            self._service_of[name] = service
            self._touch(service)

    def drop_slice(self, name: str) -> None:
        """That EndpointSlice is gone."""
        service = self._service_of.pop(name, None)
        if service is None:
            return
        self._slices[service].pop(name, None)
        if not self._slices[service]:
            del self._slices[service]
        self._touch(service)

    def mark(self, now: float) -> None:
        """All that we hold was seen to be current at `now`."""
        for name in self._book.entries:
            self._book.mark(name, now)

    def ages(self, now: float) -> dict[str, float]:
        """By model: seconds since its table was last seen to be the cluster's."""
        return self._book.ages(now)

    def tables(self) -> list[RoutingTable]:
        """The tables to route by, each replica with its address.

        A table of which nothing changed is the same object as before.
        """
        found = []
        for name, table in self._book.named():
            if name in self._stale or name not in self._filled:
                self._filled[name] = self._fill(name.partition("/")[0], table)
            found.append(self._filled[name])
        self._stale.clear()
        return found

    def _touch(self, service: str) -> None:
        namespace, _, name = service.partition("/")
        for config, entry in self._book.entries.items():
            if entry.table is None or config.partition("/")[0] != namespace:
                continue
            if any(revision.service == name for revision in entry.table.revisions):
                self._stale.add(config)
                self.has_changed = True

    def _fill(self, namespace: str, table: RoutingTable) -> RoutingTable:
        revisions = tuple(self._with_addresses(namespace, r) for r in table.revisions)
        return table.model_copy(update={"revisions": revisions})

    def _with_addresses(self, namespace: str, revision: Revision) -> Revision:
        if revision.service is None:
            return revision
        slices = self._slices.get(f"{namespace}/{revision.service}", {})
        by_pod = {a.pod: a.url for addresses in slices.values() for a in addresses}
        endpoints = []
        for pod, url in sorted(by_pod.items()):
            try:
                endpoints.append(Endpoint(name=pod, url=url))
            except ValidationError:
                continue  # not a pod of ours
        return revision.model_copy(update={"service": None, "endpoints": tuple(endpoints)})


def _within(namespace: str | None, names: Iterable[str]) -> set[str]:
    return {name for name in names if namespace is None or name.startswith(f"{namespace}/")}


def name_of(item: Object) -> str:
    """`namespace/name`."""
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"

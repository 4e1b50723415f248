"""Performs the look at the gateways: which there are, what they serve, what they counted."""

import asyncio
from collections.abc import Mapping

import httpx

from isobatch_operator.cluster.api import Api
from isobatch_operator.cluster.errors import ClusterError
from isobatch_operator.exposition import Report, read_report

_PORT = 8080
_SLICES = "discovery.k8s.io/v1"


class Gateways:
    """The gateways behind one Service, asked at most so often for all services together."""

    def __init__(self, api: Api, client: httpx.AsyncClient, service: str | None) -> None:
        """`service` is `name.namespace`; without one there is nobody to ask."""
        self._api = api
        self._client = client
        self._service = service
        self._lock = asyncio.Lock()
        self._at = float("-inf")
        self._reports: Mapping[str, Report | None] = {}

    @property
    def is_known(self) -> bool:
        """Whether we are told where gateways are."""
        return self._service is not None

    async def look(self, no_older_than: float) -> Mapping[str, Report | None]:
        """What each gateway said after that time of the loop's clock; None: it did not answer."""
        async with self._lock:
            if self._at < no_older_than:
                at = asyncio.get_running_loop().time()
                self._reports = await self._ask_all()
                self._at = at
            return self._reports

    async def _ask_all(self) -> Mapping[str, Report | None]:
        if self._service is None:
            return {}
        try:
            addresses = await self._addresses(self._service)
        except ClusterError:
            return dict.fromkeys(self._reports, None)
        reports = await asyncio.gather(*(self._ask(address) for address in addresses))
        return dict(zip(addresses, reports, strict=True))

    async def _addresses(self, service: str) -> tuple[str, ...]:
        name, _, namespace = service.partition(".")
        selector = f"kubernetes.io/service-name={name}"
        slices = await self._api.every(_SLICES, "EndpointSlice", namespace, selector)
        found = {
            address
            for one in slices
            for endpoint in one.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready", True)
            for address in endpoint["addresses"]
        }
        return tuple(sorted(found))

    async def _ask(self, address: str) -> Report | None:
        host = f"[{address}]" if ":" in address else address
        try:
            answer = await self._client.get(f"http://{host}:{_PORT}/metrics")
        except httpx.HTTPError:
            return None
        return read_report(answer.text) if answer.status_code == 200 else None


def acknowledged(reports: Mapping[str, Report | None], model: str) -> int | None:
    """The version of `model`'s table that every gateway serves; None where there is no gateway.

    One that does not answer, or does not know the model, may serve any older one: 0.
    """
    if not reports:
        return None
    return min(0 if r is None else r.versions.get(model, 0) for r in reports.values())

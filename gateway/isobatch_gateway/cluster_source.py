"""Performs: follows ConfigMaps and EndpointSlices through the Kubernetes API, by list and watch.

What was last heard stays while the API server is away; the age of each table says since when.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import structlog
from isobatch_contracts.routing_table import RoutingTable
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from isobatch_gateway.cluster_tables import ClusterTables, name_of
from isobatch_gateway.errors import SettingsInvalid

_SELECTOR = "serving.isobatch.dev/service"
_WATCH_SECONDS = 30  # then the server ends it: a connection that died in silence is not for long
_SILENT_SECONDS = 40.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
Object = dict[str, Any]


class _WatchLost(Exception):
    """The list must be read anew."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object: where it is, and who is told of it."""

    path: str
    replace: Callable[[Iterable[Object]], None]
    put: Callable[[Object], None]
    drop: Callable[[str], None]


class ClusterSource:
    """The tables of some namespaces; none given: of all."""

    def __init__(self, namespaces: tuple[str, ...], wake: asyncio.Event) -> None:
        """`wake` is set whenever there is something to take in."""
        self._namespaces = namespaces
        self._tables = ClusterTables()
        self._wake = wake
        self._heard: dict[str, float] = {}  # by path: when it was last known to be current
        self._client: ApiClient | None = None
        self._log = structlog.get_logger()

    @property
    def rejected(self) -> int:
        """Documents that were no acceptable table, so far."""
        return self._tables.rejected

    def poll(self, now: float) -> bool:
        """Whether the tables to route by have changed since the last call."""
        if self._heard and len(self._heard) == len(self._kinds()):
            self._tables.mark(min(*self._heard.values(), now))
        has_changed, self._tables.has_changed = self._tables.has_changed, False
        return has_changed

    def tables(self) -> list[RoutingTable]:
        """The tables to route by, each replica with its address."""
        return self._tables.tables()

    def ages(self, now: float) -> dict[str, float]:
        """By model: seconds since its table was last seen to be the cluster's."""
        return self._tables.ages(now)

    async def connect(self) -> None:
        """Learn where the cluster is. Raises SettingsInvalid where there is none."""
        self._client = await _connect()

    async def run(self) -> None:
        """Follow the cluster until cancelled; `connect` comes first."""
        client = self._client
        assert client is not None
        try:
            async with asyncio.TaskGroup() as group:
                for kind in self._kinds():
                    group.create_task(self._follow(client, kind))
        finally:
            await client.close()

    def _kinds(self) -> list[Kind]:
        tables = self._tables
        found = []
        for namespace in self._namespaces or (None,):
            scope = "" if namespace is None else f"/namespaces/{namespace}"
            found += [
                Kind(
                    f"/api/v1{scope}/configmaps",
                    partial(tables.replace_configs, namespace),
                    tables.put_config,
                    tables.drop_config,
                ),
                Kind(
                    f"/apis/discovery.k8s.io/v1{scope}/endpointslices",
                    partial(tables.replace_slices, namespace),
                    tables.put_slice,
                    tables.drop_slice,
                ),
            ]
        return found

    async def _follow(self, client: ApiClient, kind: Kind) -> None:
        """List, watch, and list again when the watch was lost."""
        pause = _FIRST_PAUSE
        version: str | None = None
        while True:
            try:
                if version is None:
                    version = await self._list(client, kind)
                version = await self._watch(client, kind, version)
                pause = _FIRST_PAUSE
                continue
            except _WatchLost:
                version = None
            except (aiohttp.ClientError, TimeoutError, OSError, ApiException, ValueError) as exc:
                self._log.warning(
                    "cluster not heard",
                    path=kind.path,
                    problem=f"{type(exc).__name__}: {exc}"[:300],
                )
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    async def _list(self, client: ApiClient, kind: Kind) -> str:
        query = {"labelSelector": _SELECTOR, "resourceVersion": "0"}
        answer = await _get(client, kind.path, query, aiohttp.ClientTimeout(total=30))
        found = json.loads(await answer.read())
        kind.replace(found.get("items") or ())
        self._current(kind)
        return str(found["metadata"]["resourceVersion"])

    async def _watch(self, client: ApiClient, kind: Kind, version: str) -> str:
        """Take in events until the server ends the watch; the version to go on from."""
        query = {
            "labelSelector": _SELECTOR,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENT_SECONDS)
        answer = await _get(client, kind.path, query, limits)
        self._current(kind)
        async for event in _events(answer.response):
            item = event["object"]
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    kind.put(item)
                case "DELETED":
                    kind.drop(name_of(item))
                case "BOOKMARK":
                    pass
                case _:
                    raise _WatchLost  # the version is too old, or the server says nothing we know
            version = str(item["metadata"]["resourceVersion"])
            self._current(kind)
        return version

    def _current(self, kind: Kind) -> None:
        """What we hold of `kind` is the cluster's, as of now."""
        self._heard[kind.path] = asyncio.get_running_loop().time()
        if self._tables.has_changed:
            self._wake.set()


async def _connect() -> ApiClient:
    settings = Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=settings)
        except ConfigException:
            await config.load_kube_config(client_configuration=settings)
    except (ConfigException, OSError) as exc:
        raise SettingsInvalid(
            f"--watch: neither in a cluster nor with a usable kubeconfig: {exc}"
        ) from exc
    return ApiClient(settings)


async def _get(
    client: ApiClient, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
) -> Any:
    request = await client.param_serialize(
        "GET",
        path,
        query_params=list(query.items()),
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
    )
    answer = await client.call_api(*request, _request_timeout=limits)
    if answer.status == 410:
        raise _WatchLost
    if answer.status != 200:
        raise ApiException(status=answer.status, reason=answer.reason)
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Object]:
    """The events of a watch, one a line. Lines may be longer than aiohttp's own reader takes."""
    rest = bytearray()
    try:
        async for chunk in response.content.iter_any():
            rest += chunk
            *lines, last = rest.split(b"\n")
            for line in lines:
                if line:
                    yield json.loads(line)
            rest = last
    finally:
        response.close()

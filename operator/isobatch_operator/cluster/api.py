"""Performs requests to the Kubernetes API, in documents as the API has them.

The client library's own models are left out: an object of a later API keeps all its fields, and a
thousand services cost no thousand conversions.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from isobatch_operator.cluster.errors import ClusterError, Conflict, Refused, Unreachable
from isobatch_operator.cluster.names import GROUP, MANAGER, Key

Object = dict[str, Any]
_TIMEOUT_SECONDS = 10.0
_PLURALS = {
    "InferenceService": "inferenceservices",
    "ControllerRevision": "controllerrevisions",
    "Deployment": "deployments",
    "Service": "services",
    "ConfigMap": "configmaps",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Pod": "pods",
    "Event": "events",
    "Lease": "leases",
    "EndpointSlice": "endpointslices",
}


def path_of(api_version: str, kind: str, namespace: str | None, name: str | None = None) -> str:
    """The path of an object, or of all of its kind."""
    root = "/api" if "/" not in api_version else "/apis"
    scope = "" if namespace is None else f"/namespaces/{namespace}"
    rest = "" if name is None else f"/{name}"
    return f"{root}/{api_version}{scope}/{_PLURALS[kind]}{rest}"


async def connect() -> "Api":
    """The API of the pod's own cluster, or of the kubeconfig. Raises ClusterError."""
    settings = Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=settings)
        except ConfigException:
            await config.load_kube_config(client_configuration=settings)
    except (ConfigException, OSError) as exc:
        raise ClusterError(f"neither in a cluster nor with a usable kubeconfig: {exc}") from exc
    return Api(ApiClient(settings))


class Api:
    """One connection to the API server."""

    def __init__(self, client: ApiClient) -> None:
        """`client` is closed with us."""
        self._client = client

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.close()

    async def get(self, api_version: str, kind: str, key: Key) -> Object | None:
        """One object; None if there is none."""
        return await self._find("GET", path_of(api_version, kind, key.namespace, key.name))

    async def definition(self, name: str) -> Object | None:
        """One CustomResourceDefinition."""
        return await self._find(
            "GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        )

    async def every(
        self, api_version: str, kind: str, namespace: str | None, selector: str | None = None
    ) -> tuple[Object, ...]:
        """All objects of a kind, as of some moment not long ago."""
        query = {"resourceVersion": "0"} if selector is None else {"labelSelector": selector}
        found = await self._ask("GET", path_of(api_version, kind, namespace), query=query)
        head = {"apiVersion": api_version, "kind": kind}
        return tuple(head | item for item in found.get("items") or ())

    async def create(self, item: Object) -> Object:
        """Make an object. Raises Conflict if there is one already."""
        place = path_of(item["apiVersion"], item["kind"], item["metadata"]["namespace"])
        return await self._ask("POST", place, item)

    async def replace(self, item: Object) -> Object:
        """Put `item` in the place of the version that it came from. Raises Conflict."""
        return await self._ask("PUT", self._path(item), item)

    async def apply(self, item: Object, *, is_status: bool = False) -> Object:
        """Make the object, or bring what we manage of it to what `item` says."""
        place = self._path(item) + ("/status" if is_status else "")
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self._ask("PATCH", place, item, query, "application/apply-patch+yaml")

    async def patch(self, item: Object, operations: list[Object]) -> Object:
        """Change an object by JSON patch. Raises Conflict where a test in it fails."""
        return await self._ask(
            "PATCH", self._path(item), operations, kind="application/json-patch+json"
        )

    async def merge(self, item: Object, change: Object) -> Object:
        """Change an object by merge patch."""
        return await self._ask(
            "PATCH", self._path(item), change, kind="application/merge-patch+json"
        )

    async def delete(self, item: Mapping[str, Any]) -> None:
        """Remove the object, if it is still the one that was read."""
        conditions = {"preconditions": {"uid": item["metadata"]["uid"]}}
        with suppress(Conflict):
            await self._find(
                "DELETE", self._path(item), conditions | {"propagationPolicy": "Background"}
            )

    def _path(self, item: Mapping[str, Any]) -> str:
        metadata = item["metadata"]
        return path_of(item["apiVersion"], item["kind"], metadata["namespace"], metadata["name"])

    async def _find(self, method: str, path: str, body: Any = None) -> Object | None:
        try:
            return await self._ask(method, path, body)
        except _NotFoundError:
            return None

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> Object:
        headers = {"Content-Type": kind, "Accept": "application/json"}
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._client.call_api(*request, _request_timeout=_TIMEOUT_SECONDS)
            text = await answer.read()
        except ApiException as exc:  # the library raises some itself, and leaves the rest to us
            raise _failure(exc.status or 0, str(exc.body or exc.reason)) from exc
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise Unreachable(f"{method} {path}: {type(exc).__name__}: {exc}") from exc
        if not 200 <= answer.status < 300:
            raise _failure(answer.status, text.decode(errors="replace"))
        found = json.loads(text)
        assert isinstance(found, dict), "the API answers with objects"
        return found


class _NotFoundError(ClusterError):
    """There is no such object."""


def _failure(status: int, body: str) -> ClusterError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body[:300]
    match status:
        case 404:
            return _NotFoundError(message)
        case 409:
            return Conflict(message)
        case 0 | 401 | 408 | 429 | 500 | 502 | 503 | 504:
            return Unreachable(f"{status}: {message}")
        case _:
            return Refused(message)


SERVING = f"{GROUP}/v1alpha1"

"""Decides the objects that a service owns, but for their pods' templates."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from isobatch_contracts import routing_table
from isobatch_contracts.tiers import PoolName

from isobatch_operator.cluster import names
from isobatch_operator.cluster.names import Key
from isobatch_operator.revision import Revision

Object = dict[str, Any]


def _object(
    kind: tuple[str, str], key: Key, name: str, labels: Mapping[str, str], owner: Object
) -> Object:
    """The beginning of an object. It goes when its owner goes."""
    return {
        "apiVersion": kind[0],
        "kind": kind[1],
        "metadata": {
            "name": name,
            "namespace": key.namespace,
            "labels": dict(labels),
            "ownerReferences": [owner],
        },
    }


def owner_reference(resource: Object) -> Object:
    """The reference to `resource`, by which what it owns is removed with it."""
    return {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "name": resource["metadata"]["name"],
        "uid": resource["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


def controller_revision(
    key: Key, revision: Revision, templates: Mapping[PoolName, Object], number: int, owner: Object
) -> Object:
    """A revision's full text, and its pods' templates as they were decided."""
    name = names.revision_object(key.name, revision.name)
    labels = names.labels(key.name) | {names.REVISION_LABEL: revision.name}
    return _object(("apps/v1", "ControllerRevision"), key, name, labels, owner) | {
        "revision": number,
        "data": {
            "servedName": revision.served_name,
            "model": revision.model.model_dump(mode="json", exclude_none=True),
            "pools": {
                pool.value: {
                    "runtime": template.runtime.model_dump(mode="json", exclude_none=True),
                    "hardware": template.hardware.model_dump(mode="json", exclude_none=True),
                    "template": templates[pool],
                }
                for pool, template in revision.pools.items()
            },
        },
    }


def pool_objects(
    key: Key, pool: PoolName, revision: str, template: Object, replicas: int, owner: Object
) -> tuple[Object, ...]:
    """Deployment, Service and PodDisruptionBudget of a revision in a pool."""
    name = names.pool_object(key.name, pool, revision)
    labels = names.pool_labels(key.name, pool, revision)
    deployment = _object(("apps/v1", "Deployment"), key, name, labels, owner) | {
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "revisionHistoryLimit": 0,
            # The template never changes: another one is another revision.
            "strategy": {"type": "Recreate"},
            "progressDeadlineSeconds": 2**31 - 1,
            "template": template,
        }
    }
    service = _object(("v1", "Service"), key, name, labels, owner) | {
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": names.WORKER_PORT, "targetPort": "http"}],
        }
    }
    budget = _object(("policy/v1", "PodDisruptionBudget"), key, name, labels, owner) | {
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    }
    return deployment, service, budget


def table_config(
    key: Key,
    table: routing_table.RoutingTable,
    published_at: float,
    remembered: Mapping[str, str | None],
    owner: Object,
) -> Object:
    """The ConfigMap that gateways read. `remembered` rebuilds a status that was lost."""
    config = _object(
        ("v1", "ConfigMap"), key, names.table_object(key.name), names.labels(key.name), owner
    )
    annotations = {name: value for name, value in remembered.items() if value is not None}
    config["metadata"]["annotations"] = annotations | {
        names.PUBLISHED_ANNOTATION: timestamp(published_at)
    }
    return config | {"data": {names.TABLE_KEY: routing_table.dump(table)}}


def timestamp(seconds: float) -> str:
    """Seconds since the epoch, as the API writes times; to the microsecond."""
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )


def seconds_of(text: str | None) -> float | None:
    """The time that the API wrote, in seconds since the epoch."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def contains(whole: object, part: object) -> bool:
    """Whether `whole` has all that `part` says: then there is nothing to apply."""
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


def canonical(document: object) -> str:
    """One text for equal documents."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))

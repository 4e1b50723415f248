"""Decides the pods of one revision in one pool.

What is decided once is kept with the revision: a later version of the operator restarts no pod.
"""

from collections.abc import Mapping
from typing import Any

from isobatch_contracts.numerics import NUMERICS_PATH
from isobatch_contracts.resource import Hardware, Runtime
from isobatch_contracts.tiers import PoolName

from isobatch_operator.cluster.names import WORKER_PORT, pool_labels
from isobatch_operator.revision import Revision

CONTAINER = "worker"
GRACE_SECONDS = 660  # for open answers; the worker ends as soon as there are none
_START_SECONDS = 3600  # a first start may download a model
_CACHE = "/cache"
_PRODUCT_LABEL = "nvidia.com/gpu.product"


def pod_template(
    service: str, pool: PoolName, revision: Revision, image: str, patch: Mapping[str, Any]
) -> dict[str, Any]:
    """The template; `patch` is merged into it strategically, lists of containers by name."""
    template = revision.pools[pool]
    hardware = template.hardware
    selector = dict(hardware.node_selector)
    if hardware.product is not None:
        selector[_PRODUCT_LABEL] = hardware.product
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pool, revision, image)],
        "volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": "cache", "emptyDir": {}},
            *_model_volumes(revision.model.uri),
        ],
    }
    if selector:
        spec["nodeSelector"] = selector
    if hardware.tolerations:
        spec["tolerations"] = [
            t.model_dump(mode="json", by_alias=True, exclude_none=True)
            for t in hardware.tolerations
        ]
    if template.runtime.secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in template.runtime.secrets]
    whole = {"metadata": {"labels": pool_labels(service, pool, revision.name)}, "spec": spec}
    merged = merged_template(whole, patch)
    assert isinstance(merged, dict)
    return merged


def _container(pool: PoolName, revision: Revision, image: str) -> dict[str, Any]:
    runtime = revision.pools[pool].runtime
    ready_path = NUMERICS_PATH if pool is PoolName.STRICT else "/health"
    ready = {"httpGet": {"path": ready_path, "port": "http"}}
    return {
        "name": CONTAINER,
        "image": runtime.image or image,
        "command": ["isobatch", "worker"],
        "args": worker_arguments(pool, revision),
        "env": _environment(runtime),
        "ports": [{"name": "http", "containerPort": WORKER_PORT}],
        "startupProbe": ready
        | {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": _START_SECONDS // 2},
        "readinessProbe": ready | {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        # Gateways hear of the end while it still answers, and open answers are finished.
        "lifecycle": {"preStop": {"exec": {"command": ["isobatch", "drain", str(WORKER_PORT)]}}},
        "resources": _resources(revision.pools[pool].hardware),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  # a volume of the pod's own
            {"name": "cache", "mountPath": _CACHE},
            *_model_mounts(revision.model.uri),
        ],
    }


def worker_arguments(pool: PoolName, revision: Revision) -> list[str]:
    """What `isobatch worker` is told."""
    model, runtime = revision.model, revision.pools[pool].runtime
    arguments = ["--pool", pool.value, "--model", model_uri(model.uri)]
    if model.digest is not None:
        arguments += ["--digest", model.digest]
    arguments += ["--served-model-name", revision.served_name]
    arguments += ["--host", "0.0.0.0", "--port", str(WORKER_PORT), "--"]  # noqa: S104  # a pod's
    if runtime.max_model_len is not None:
        arguments += ["--max-model-len", str(runtime.max_model_len)]
    # A `$(NAME)` in the spec is an argument, not a reference to a variable.
    return arguments + [argument.replace("$(", "$$(") for argument in runtime.args]


def model_uri(uri: str) -> str:
    """Where the worker finds the model: a claim's folder is mounted."""
    scheme, _, rest = uri.partition("://")
    if scheme != "pvc":
        return uri
    return "file:///models/" + rest.partition("/")[2]


def _model_volumes(uri: str) -> list[dict[str, Any]]:
    scheme, _, rest = uri.partition("://")
    match scheme:
        case "pvc":
            claim = rest.partition("/")[0]
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        case "file":
            source = {"hostPath": {"path": rest, "type": "Directory"}}
        case _:
            return []
    return [{"name": "model", **source}]


def _model_mounts(uri: str) -> list[dict[str, Any]]:
    scheme, _, rest = uri.partition("://")
    path = {"pvc": "/models", "file": rest}.get(scheme)
    return [] if path is None else [{"name": "model", "mountPath": path, "readOnly": True}]


def _environment(runtime: Runtime) -> list[dict[str, Any]]:
    own = {"HOME": "/tmp", "ISOBATCH_CACHE_DIR": _CACHE}  # noqa: S108  # a volume of the pod's own
    given = {variable.name: variable.value.replace("$(", "$$(") for variable in runtime.env}
    return [{"name": name, "value": value} for name, value in (own | given).items()]


def _resources(hardware: Hardware) -> dict[str, Any]:
    found = hardware.resources.model_dump(mode="json")
    if hardware.gpus:
        for side in ("requests", "limits"):
            found[side] = {"nvidia.com/gpu": str(hardware.gpus)} | found[side]
    return {side: amounts for side, amounts in found.items() if amounts}


def merged_template(base: Any, patch: Any) -> Any:
    """`base` with `patch` over it, as a strategic merge: named list members meet by name."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        whole = dict(base)
        for key, value in patch.items():
            if value is None:
                whole.pop(key, None)
            else:
                whole[key] = merged_template(base[key], value) if key in base else value
        return whole
    if isinstance(base, list) and isinstance(patch, list) and _are_named([*base, *patch]):
        mine = {_member_key(member): member for member in base}
        theirs = {_member_key(member): member for member in patch}
        return [
            merged_template(mine[key], theirs[key])
            if key in mine and key in theirs
            else theirs.get(key, mine.get(key))
            for key in {**mine, **theirs}
        ]
    return patch


def _are_named(members: list[Any]) -> bool:
    return bool(members) and all(isinstance(m, Mapping) and "name" in m for m in members)


def _member_key(member: Mapping[str, Any]) -> Any:
    return member.get("mountPath", member["name"])  # one volume may be mounted twice

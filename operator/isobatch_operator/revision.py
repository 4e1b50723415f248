"""Decides what a revision is: everything that shapes a worker, and the digest that names it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from isobatch_contracts.resource import Hardware, InferenceService, Model, Pool, Runtime
from isobatch_contracts.tiers import PoolName

_DIGITS = 10  # of the digest: enough for the edits of one service, short enough for a pod's name


@dataclass(frozen=True, slots=True)
class Template:
    """How a replica of one pool is started."""

    runtime: Runtime
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Revision:
    """The model and the templates of all pools; `name` is their digest, replicas not included."""

    name: str
    served_name: str
    model: Model
    pools: Mapping[PoolName, Template]


def service_pools(service: InferenceService) -> dict[PoolName, Pool]:
    """The pools that `service` has, by name."""
    both = {
        PoolName.STRICT: service.spec.pools.strict,
        PoolName.THROUGHPUT: service.spec.pools.throughput,
    }
    return {name: pool for name, pool in both.items() if pool is not None}


def revision_of(service: InferenceService) -> Revision:
    """The revision that `service` asks for. Equal specs, whatever their spelling, are one."""
    pools = {
        name: Template(pool.runtime, pool.hardware) for name, pool in service_pools(service).items()
    }
    model = service.spec.model
    content = {
        "servedName": service.served_name,
        "model": model.model_dump(mode="json", include={"uri", "digest"}),
        "pools": {
            name.value: [
                template.runtime.model_dump(mode="json"),
                template.hardware.model_dump(mode="json"),
            ]
            for name, template in pools.items()
        },
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return Revision(digest[:_DIGITS], service.served_name, model, pools)

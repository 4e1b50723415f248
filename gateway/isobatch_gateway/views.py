"""Decides what our own routes say of models and services."""

from typing import Literal

from isobatch_contracts.base import Document
from isobatch_contracts.tiers import PoolName, Tier
from pydantic import BaseModel

from isobatch_gateway.fleet import Fleet, Service
from isobatch_gateway.orders import Principal


class Health(BaseModel):
    """The body of `healthz` and `readyz`."""

    status: str


class ModelCard(BaseModel):
    """One model, in OpenAI's shape."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "isobatch"


class ModelList(BaseModel):
    """OpenAI's list of models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ReplicaView(Document):
    """One replica; its address is nobody's business."""

    name: str
    ready: bool


class RevisionView(Document):
    """One revision of one pool."""

    name: str
    pool: PoolName
    weight: int
    fingerprint: str | None
    replicas: list[ReplicaView]


class ServiceView(Document):
    """One service."""

    name: str
    model: str
    table_version: int
    default_tier: Tier
    allowed_tiers: list[Tier]
    standard_to_strict: int
    revisions: list[RevisionView]


class ServiceList(Document):
    """All services that the caller may see."""

    services: list[ServiceView]


def models_view(fleet: Fleet, principal: Principal) -> ModelList:
    """The models that `principal` may use."""
    return ModelList(
        data=[
            ModelCard(id=model, created=service.loaded)
            for model, service in sorted(fleet.services.items())
            if principal.may_see(model)
        ]
    )


def services_view(fleet: Fleet, principal: Principal) -> ServiceList:
    """The services that `principal` may use."""
    return ServiceList(
        services=[
            _service(service)
            for model, service in sorted(fleet.services.items())
            if principal.may_see(model)
        ]
    )


def _service(service: Service) -> ServiceView:
    table = service.table
    return ServiceView(
        name=table.service,
        model=table.model,
        table_version=table.version,
        default_tier=table.tiers.default,
        allowed_tiers=list(table.tiers.allowed),
        standard_to_strict=table.standard_to_strict,
        revisions=[
            RevisionView(
                name=revision.name,
                pool=revision.pool,
                weight=revision.weight,
                fingerprint=revision.fingerprint,
                replicas=[
                    ReplicaView(name=identity.name, ready=replica.is_eligible)
                    for identity, replica in service.replicas.items()
                    if identity.pool is revision.pool and identity.revision == revision.name
                ],
            )
            for revision in table.revisions
        ],
    )

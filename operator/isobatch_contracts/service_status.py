"""Decides what the status of an InferenceService says. Times are RFC 3339, in UTC."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from isobatch_contracts.base import Document

Text = Annotated[str, StringConstraints(max_length=32768)]


class Condition(Document):
    """One condition, as Kubernetes has them."""

    type: Literal["Ready", "Servable", "StrictCertified", "Progressing", "Degraded"]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=1024)]
    message: Text = ""
    last_transition_time: datetime
    observed_generation: int | None = None


class PoolStatus(Document):
    """One pool; `ready` and `certified` count replicas of the revision that the spec asks for."""

    name: Literal["strict", "throughput"]
    desired: int
    ready: int
    certified: int
    fingerprints: tuple[str, ...] = ()


class GateStatus(Document):
    """One gate, as it was last looked at. `value` is absent where nothing could be measured."""

    name: str
    outcome: Literal["Pass", "Fail", "Inconclusive"]
    value: str | None = None
    samples: int = 0
    message: str | None = None


class RolloutStatus(Document):
    """Where the rollout stands: all that is remembered of it, and how it reads."""

    phase: Literal["Idle", "Progressing", "Paused", "Promoting", "RollingBack", "Failed"] = "Idle"
    stage: Literal["Idle", "Moving", "RollingBack", "Failed"] = "Idle"
    stable_revision: str | None = None
    canary_revision: str | None = None
    failed_revision: str | None = Field(
        None, description="Not tried again until the spec changes, or by `rollout retry`."
    )
    step: int = Field(0, description="Of the steps, the last being 100; counted from 0.")
    weight: int = Field(0, description="Percent that the canary was granted.")
    started_at: datetime | None = None
    phase_started_at: datetime | None = None
    reached_at: datetime | None = Field(None, description="When the gateways had the weight.")
    paused_by: str | None = None
    paused_at: datetime | None = None
    stable_fingerprint: str | None = None
    is_fingerprint_allowed: bool = False
    is_forced: bool = False
    taken_verb: str | None = None
    reason: str | None = None
    message: Text | None = None
    gates: tuple[GateStatus, ...] = ()


class RoutingStatus(Document):
    """The routing table that holds; `acknowledged`: the version that every gateway serves."""

    version: int
    checksum: str
    acknowledged: int | None = None


class ThroughputScale(Document):
    """What the scale subresource says of the throughput pool."""

    replicas: int = 0
    selector: str = ""


class ServiceStatus(Document):
    """The whole status."""

    observed_generation: int | None = None
    url: str | None = None
    conditions: tuple[Condition, ...] = Field(
        (),
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    pools: tuple[PoolStatus, ...] = Field(
        (),
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    throughput: ThroughputScale | None = None
    rollout: RolloutStatus | None = None
    routing: RoutingStatus | None = None

"""Decides what an InferenceService may say (`serving.isobatch.dev/v1alpha1`).

The same models validate `isobatch up -f FILE` and give the CRD; `cel` tells the API server a
validator's rule. Numbers that are thresholds or rates are strings, as Kubernetes conventions ask
(no floats in a spec). Every list and text has a bound: a rule over it must have a bounded cost.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from isobatch_contracts.base import Document, cel
from isobatch_contracts.fields import (
    Argument,
    Decimal,
    Digest,
    DnsLabel,
    Duration,
    ModelName,
    ModelUri,
    ObjectName,
    Positive,
    Quantity,
    ResourceName,
    Word,
)
from isobatch_contracts.steering import Migration, Rollout
from isobatch_contracts.tiers import Tier

API_VERSION: Literal["serving.isobatch.dev/v1alpha1"] = "serving.isobatch.dev/v1alpha1"
KIND: Literal["InferenceService"] = "InferenceService"


class Model(Document):
    """Which weights are served, and under which name."""

    name: ModelName | None = Field(None, description="Served name; default: metadata.name.")
    uri: ModelUri
    digest: Digest | None = Field(None, description="The worker refuses other weights.")


class StandardFallback(StrEnum):
    """Where a standard request goes when its pool is full or down."""

    NEVER = "Never"
    STRICT = "Strict"


class TierLimits(Document):
    """Admission limits of one tier; absent means unlimited."""

    requests_per_minute: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)
    queue_size: int = Field(0, ge=0, description="Requests that may wait for a place.")
    queue_timeout: Duration = "30s"


class Tiers(Document):
    """Which tiers the service offers."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            "self.default in self.allowed",
            "tiers.default is not in tiers.allowed: add it there or choose another",
        )
    )

    default: Tier = Tier.STANDARD
    allowed: Annotated[
        tuple[Tier, ...],
        Field(min_length=1, max_length=3, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = tuple(Tier)
    standard_fallback: StandardFallback = StandardFallback.NEVER
    limits: dict[Tier, TierLimits] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Self:
        if self.default not in self.allowed:
            raise ValueError(
                f"tiers.default is {self.default.value!r}, which tiers.allowed "
                f"{[t.value for t in self.allowed]} does not hold: add it there or choose another"
            )
        if len(set(self.allowed)) != len(self.allowed):
            raise ValueError("tiers.allowed names a tier twice")
        return self


class EnvVar(Document):
    """One environment variable of the worker."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=255)]
    value: Annotated[str, StringConstraints(max_length=32768)]


class Runtime(Document):
    """How the worker is started."""

    image: Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=512)] | None = None
    args: tuple[Argument, ...] = Field(
        (), max_length=256, description="vLLM's own flags, in its spelling."
    )
    env: tuple[EnvVar, ...] = Field((), max_length=256)
    max_model_len: int | None = Field(None, ge=1)
    secrets: tuple[ObjectName, ...] = Field(
        (), max_length=16, description="Secrets for the model hub and image pulls."
    )


class Toleration(Document):
    """A Kubernetes toleration, as a pod spec has it."""

    key: Word | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: Word | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Resources(Document):
    """Kubernetes requests and limits, by resource name."""

    requests: dict[Word, Quantity] = Field(default_factory=dict, max_length=32)
    limits: dict[Word, Quantity] = Field(default_factory=dict, max_length=32)


class Hardware(Document):
    """Where a replica may run."""

    gpus: int = Field(0, ge=0, description="GPUs of one replica; 0 is CPU.")
    product: Word | None = Field(None, description="GPU product a strict pool is pinned to.")
    node_selector: dict[Word, Word] = Field(default_factory=dict, max_length=64)
    tolerations: tuple[Toleration, ...] = Field((), max_length=64)
    resources: Resources = Resources()


class Autoscaling(Document):
    """Replicas by load, instead of a fixed number."""

    model_config = ConfigDict(
        json_schema_extra=cel("self.min <= self.max", "autoscaling.min is above autoscaling.max")
    )

    min: int = Field(ge=0)
    max: int = Field(ge=1)
    target_running_per_replica: int = Field(ge=1)
    scale_to_zero_after: Positive | None = None

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"autoscaling.min {self.min} is above autoscaling.max {self.max}")
        return self


class Pool(Document):
    """One pool. Exactly one of `replicas` and `autoscaling`; neither means one replica."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            "!(has(self.replicas) && has(self.autoscaling))",
            "a pool has replicas or autoscaling, not both: remove one",
        )
    )

    replicas: int | None = Field(None, ge=0, le=10_000)
    autoscaling: Autoscaling | None = None
    runtime: Runtime = Runtime()
    hardware: Hardware = Hardware()

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("a pool has replicas or autoscaling, not both: remove one")
        return self

    @property
    def desired_replicas(self) -> int:
        """Replicas to start with: the fixed number, or the autoscaler's minimum."""
        if self.autoscaling is not None:
            return self.autoscaling.min
        return 1 if self.replicas is None else self.replicas


class Pools(Document):
    """The pools of the service; at least one."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            "has(self.strict) || has(self.throughput)",
            "pools names neither strict nor throughput: nobody would answer",
        )
    )

    strict: Pool | None = None
    throughput: Pool | None = None

    @model_validator(mode="after")
    def _some_pool(self) -> Self:
        if self.strict is None and self.throughput is None:
            raise ValueError("pools names neither strict nor throughput: nobody would answer")
        return self


class Drift(Document):
    """Which share of standard traffic is scored on the strict pool afterwards."""

    sample_rate: Annotated[
        Decimal,
        Field(json_schema_extra=cel("double(self) <= 1.0", "sampleRate is a share of 0 to 1")),
    ] = "0.01"
    max_per_minute: int = Field(30, ge=0)

    @model_validator(mode="after")
    def _rate_is_a_share(self) -> Self:
        if float(self.sample_rate) > 1:
            raise ValueError(f"drift.sampleRate is a share of 0 to 1; got {self.sample_rate}")
        return self


class Sentinels(Document):
    """Fixed prompts that are sent through the strict pool amid live traffic."""

    every: Positive = "60s"


class Receipts(Document):
    """What is kept of an answer."""

    strict: Literal["Digest", "Full"] = "Digest"
    standard: Literal["Off", "Digest", "Full"] = "Off"
    retention: Positive = "90d"


class InferenceServiceSpec(Document):
    """The spec of an InferenceService."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            "!(self.tiers.default in ['strict', 'verified']) || has(self.pools.strict)",
            "tiers.default needs the strict pool, but pools.strict is absent",
        )
    )

    model: Model
    tiers: Tiers = Tiers()
    pools: Pools
    rollout: Rollout = Rollout()
    migration: Migration = Migration()
    drift: Drift = Drift()
    sentinels: Sentinels = Sentinels()
    receipts: Receipts = Receipts()

    @model_validator(mode="after")
    def _default_tier_has_a_pool(self) -> Self:
        default = self.tiers.default
        if default.is_bitwise and self.pools.strict is None:
            raise ValueError(f"tiers.default is {default.value!r}, but pools.strict is absent")
        return self


class Metadata(Document):
    """The metadata of a manifest that isobatch reads itself."""

    name: ResourceName
    namespace: DnsLabel | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class InferenceService(Document):
    """A whole manifest."""

    api_version: Literal["serving.isobatch.dev/v1alpha1"] = API_VERSION
    kind: Literal["InferenceService"] = KIND
    metadata: Metadata
    spec: InferenceServiceSpec

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        return self.spec.model.name or self.metadata.name

"""Decides what an InferenceService may say (`serving.isobatch.dev/v1alpha1`).

The same models validate `isobatch up -f FILE` and, later, give the CRD. Numbers that are thresholds
or rates are strings, as Kubernetes conventions ask (no floats in a spec).
"""

import re
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from isobatch_contracts.base import Document
from isobatch_contracts.tiers import Tier

API_VERSION: Literal["serving.isobatch.dev/v1alpha1"] = "serving.isobatch.dev/v1alpha1"
KIND: Literal["InferenceService"] = "InferenceService"

Duration = Annotated[str, StringConstraints(pattern=r"^([0-9]+(ms|s|m|h|d))+$", max_length=32)]
"""A length of time as Kubernetes and Prometheus write it: `500ms`, `30s`, `10m`, `1h30m`, `90d`."""
Decimal = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?$")]
"""A non-negative decimal number as a string: `"0.01"`."""
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Percent = Annotated[int, Field(ge=0, le=100)]
DnsLabel = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", max_length=63)
]


def _without_tier_suffix(name: str) -> str:
    """`name`, unless its end reads as a tier: clients could not ask for it as it is."""
    suffix = name.rpartition(":")[2]
    if suffix != name and suffix in set(Tier):
        raise ValueError(f"the name ends in the tier suffix ':{suffix}': choose another ending")
    return name


ModelName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,252}$"),
    AfterValidator(_without_tier_suffix),
]
ModelUri = Annotated[str, StringConstraints(pattern=r"^(hf|file|pvc|builtin)://.+$")]

_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_seconds(text: Duration) -> float:
    """The length of `text` in seconds: `"1h30m"` -> 5400.0."""
    parts = re.findall(r"([0-9]+)(ms|[smhd])", text)
    return sum(int(number) * _MILLISECONDS[unit] for number, unit in parts) / 1000


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

    default: Tier = Tier.STANDARD
    allowed: Annotated[tuple[Tier, ...], Field(min_length=1)] = tuple(Tier)
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

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str


class Runtime(Document):
    """How the worker is started."""

    image: str | None = None
    args: tuple[str, ...] = Field((), description="vLLM's own flags, in its spelling.")
    env: tuple[EnvVar, ...] = ()
    max_model_len: int | None = Field(None, ge=1)
    secrets: tuple[str, ...] = Field((), description="Secrets for the model hub and image pulls.")


class Toleration(Document):
    """A Kubernetes toleration, as a pod spec has it."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Resources(Document):
    """Kubernetes requests and limits, by resource name."""

    requests: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)


class Hardware(Document):
    """Where a replica may run."""

    gpus: int = Field(0, ge=0, description="GPUs of one replica; 0 is CPU.")
    product: str | None = Field(None, description="GPU product a strict pool is pinned to.")
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    resources: Resources = Resources()


class Autoscaling(Document):
    """Replicas by load, instead of a fixed number."""

    min: int = Field(ge=0)
    max: int = Field(ge=1)
    target_running_per_replica: int = Field(ge=1)
    scale_to_zero_after: Duration | None = None

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"autoscaling.min {self.min} is above autoscaling.max {self.max}")
        return self


class Pool(Document):
    """One pool. Exactly one of `replicas` and `autoscaling`; neither means one replica."""

    replicas: int | None = Field(None, ge=0)
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

    strict: Pool | None = None
    throughput: Pool | None = None

    @model_validator(mode="after")
    def _some_pool(self) -> Self:
        if self.strict is None and self.throughput is None:
            raise ValueError("pools names neither strict nor throughput: nobody would answer")
        return self


class Step(Document):
    """One step of a rollout or migration: a weight, then a hold or a pause."""

    weight: Percent
    hold: Duration | None = None
    pause: bool = False


def require_rising_weights(steps: tuple[Step, ...], where: str) -> None:
    """Raise ValueError unless the weights of `steps` rise strictly."""
    weights = [step.weight for step in steps]
    if any(later <= earlier for earlier, later in pairwise(weights)):
        raise ValueError(f"{where} must rise from step to step; got weights {weights}")


class PrometheusQuery(Document):
    """A gate's own PromQL."""

    query: str


class Metric(StrEnum):
    """What a gate may look at without Prometheus."""

    ERROR_RATE = "errorRate"
    TTFT_P99_SECONDS = "ttftP99Seconds"
    DRIFT_RATE = "driftRate"
    STRICT_VIOLATIONS = "strictViolations"


class Gate(Document):
    """An analysis that must hold for a rollout to go on."""

    name: DnsLabel
    metric: Metric | None = None
    prometheus: PrometheusQuery | None = None
    max: Decimal | None = None
    max_ratio_to_stable: Decimal | None = None

    @model_validator(mode="after")
    def _one_source_one_bound(self) -> Self:
        if (self.metric is None) == (self.prometheus is None):
            raise ValueError(f"gate {self.name!r} needs exactly one of metric and prometheus")
        if (self.max is None) == (self.max_ratio_to_stable is None):
            raise ValueError(f"gate {self.name!r} needs exactly one of max and maxRatioToStable")
        return self


class Rollout(Document):
    """How a new revision takes over."""

    strategy: Literal["Canary", "BlueGreen", "Recreate"] = "Canary"
    capacity: Literal["Surge", "InPlace"] = "Surge"
    steps: tuple[Step, ...] = ()
    gates: tuple[Gate, ...] = ()
    min_requests: int = Field(50, ge=0)
    on_failure: Literal["Rollback", "Pause"] = "Rollback"
    on_inconclusive: Literal["Pause", "Rollback"] = "Pause"
    on_fingerprint_change: Literal["Pause", "Allow"] = "Pause"
    deadline: Duration = "2h"

    @model_validator(mode="after")
    def _weights_rise(self) -> Self:
        require_rising_weights(self.steps, "rollout.steps")
        return self


class StandardToStrict(Document):
    """The share of standard traffic that the strict pool serves, in steps."""

    steps: tuple[Step, ...] = ()
    gates: tuple[Gate, ...] = ()

    @model_validator(mode="after")
    def _weights_rise(self) -> Self:
        require_rising_weights(self.steps, "migration.standardToStrict.steps")
        return self


class Migration(Document):
    """Pool migration: adopting the strict pool is itself a rollout."""

    standard_to_strict: StandardToStrict | None = None


class Drift(Document):
    """Which share of standard traffic is scored on the strict pool afterwards."""

    sample_rate: Decimal = "0.01"
    max_per_minute: int = Field(30, ge=0)

    @model_validator(mode="after")
    def _rate_is_a_share(self) -> Self:
        if float(self.sample_rate) > 1:
            raise ValueError(f"drift.sampleRate is a share of 0 to 1; got {self.sample_rate}")
        return self


class Sentinels(Document):
    """Fixed prompts that are sent through the strict pool amid live traffic."""

    every: Duration = "60s"


class Receipts(Document):
    """What is kept of an answer."""

    strict: Literal["Digest", "Full"] = "Digest"
    standard: Literal["Off", "Digest", "Full"] = "Off"
    retention: Duration = "90d"


class InferenceServiceSpec(Document):
    """The spec of an InferenceService."""

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

    name: DnsLabel
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

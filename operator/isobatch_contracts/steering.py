"""Decides what a spec may say of how traffic moves: steps, gates, rollout, pool migration."""

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from isobatch_contracts.base import RULES, Document, cel
from isobatch_contracts.fields import Decimal, DnsLabel, Duration, Percent, Positive


class Step(Document):
    """One step of a rollout or migration: a weight, then a hold or a pause."""

    weight: Percent
    hold: Duration | None = None
    pause: bool = False


def _rising(where: str) -> ConfigDict:
    """The rule of `require_rising_weights`."""
    rule = (
        "self.steps.map(s, s.weight).isSorted() && "
        "self.steps.all(s, self.steps.exists_one(t, t.weight == s.weight))"
    )
    return ConfigDict(
        json_schema_extra=cel(f"!has(self.steps) || ({rule})", f"{where} must rise step by step")
    )


Steps = Annotated[tuple[Step, ...], Field(max_length=100)]


def require_rising_weights(steps: tuple[Step, ...], where: str) -> None:
    """Raise ValueError unless the weights of `steps` rise strictly."""
    weights = [step.weight for step in steps]
    if any(later <= earlier for earlier, later in pairwise(weights)):
        raise ValueError(f"{where} must rise from step to step; got weights {weights}")


class PrometheusQuery(Document):
    """A gate's own PromQL."""

    query: Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Metric(StrEnum):
    """What a gate may look at without Prometheus."""

    ERROR_RATE = "errorRate"
    TTFT_P99_SECONDS = "ttftP99Seconds"
    DRIFT_RATE = "driftRate"
    STRICT_VIOLATIONS = "strictViolations"


class Gate(Document):
    """An analysis that must hold for a rollout to go on."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES: [
                *cel(
                    "has(self.metric) != has(self.prometheus)",
                    "a gate needs exactly one of metric and prometheus",
                )[RULES],
                *cel(
                    "has(self.max) != has(self.maxRatioToStable)",
                    "a gate needs exactly one of max and maxRatioToStable",
                )[RULES],
            ]
        }
    )

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


Gates = Annotated[tuple[Gate, ...], Field(max_length=32)]


class Rollout(Document):
    """How a new revision takes over."""

    model_config = _rising("rollout.steps")

    strategy: Literal["Canary", "BlueGreen", "Recreate"] = "Canary"
    capacity: Literal["Surge", "InPlace"] = "Surge"
    steps: Steps = ()
    gates: Gates = ()
    min_requests: int = Field(50, ge=0)
    on_failure: Literal["Rollback", "Pause"] = "Rollback"
    on_inconclusive: Literal["Pause", "Rollback"] = "Pause"
    on_fingerprint_change: Literal["Pause", "Allow"] = "Pause"
    deadline: Positive = "2h"

    @model_validator(mode="after")
    def _weights_rise(self) -> Self:
        require_rising_weights(self.steps, "rollout.steps")
        return self


class StandardToStrict(Document):
    """The share of standard traffic that the strict pool serves, in steps."""

    model_config = _rising("migration.standardToStrict.steps")

    steps: Steps = ()
    gates: Gates = ()

    @model_validator(mode="after")
    def _weights_rise(self) -> Self:
        require_rising_weights(self.steps, "migration.standardToStrict.steps")
        return self


class Migration(Document):
    """Pool migration: adopting the strict pool is itself a rollout."""

    standard_to_strict: StandardToStrict | None = None

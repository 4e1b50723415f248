"""What an InferenceService may say: the manifest of the API reference, its refusals, its schema."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.resource import (
    Duration,
    InferenceService,
    Pool,
    StandardFallback,
    Step,
    duration_seconds,
    require_rising_weights,
)
from isobatch_contracts.tiers import Tier
from pydantic import TypeAdapter, ValidationError

from tests.conftest import CheckGolden

GOLDEN = Path(__file__).with_name("golden")
MINIMAL = """
    metadata: {name: chat}
    spec:
      model: {uri: "builtin://smollm2-135m"}
      pools: {throughput: {}}
"""


def manifest(text: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(text, yaml.BaseLoader)
    return document


def changed(path: str, value: Any) -> dict[str, Any]:
    """The minimal manifest with `value` at the dotted `path`."""
    document = manifest(MINIMAL)
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return document


def test_manifest_of_the_reference_is_accepted_and_survives_a_round_trip() -> None:
    document = json.loads((GOLDEN / "inference_service.json").read_text())

    service = InferenceService.model_validate(document)

    assert service.model_dump(mode="json", exclude_unset=True) == document
    assert InferenceService.model_validate_json(service.model_dump_json()) == service


def test_schema_is_golden(check_golden: CheckGolden) -> None:
    schema = json.dumps(InferenceService.model_json_schema(), indent=2, sort_keys=True)

    check_golden(GOLDEN / "inference_service.schema.json", schema + "\n")


def test_minimal_manifest_gets_the_documented_defaults() -> None:
    service = InferenceService.model_validate(manifest(MINIMAL))

    spec = service.spec
    assert service.served_name == "chat"
    assert spec.tiers.default is Tier.STANDARD
    assert spec.tiers.allowed == tuple(Tier)
    assert spec.tiers.standard_fallback is StandardFallback.NEVER
    assert spec.rollout.on_failure == "Rollback"
    assert spec.rollout.on_inconclusive == "Pause"
    assert (spec.drift.sample_rate, spec.drift.max_per_minute) == ("0.01", 30)
    assert (spec.receipts.strict, spec.receipts.standard) == ("Digest", "Off")


def test_model_name_is_served_instead_of_the_resource_name() -> None:
    document = changed("spec.model.name", "llama-3.1-8b")

    assert InferenceService.model_validate(document).served_name == "llama-3.1-8b"


GATE = {"name": "own", "max": "1"}

REFUSED = [
    pytest.param("spec.modle", {}, "modle", id="unknown-field"),
    pytest.param("spec.pools.strict.runtime.arguments", [], "arguments", id="unknown-nested-field"),
    pytest.param("apiVersion", "serving.isobatch.dev/v2", "apiVersion", id="other-api-version"),
    pytest.param("kind", "Service", "kind", id="other-kind"),
    pytest.param("metadata.name", "Chat", "metadata.name", id="name-in-capitals"),
    pytest.param("metadata.name", "a" * 64, "metadata.name", id="name-too-long"),
    pytest.param("spec.model.uri", "s3://bucket/x", "spec.model.uri", id="uri-scheme"),
    pytest.param("spec.model.digest", "sha256:abc", "spec.model.digest", id="short-digest"),
    pytest.param("spec.model.name", "", "spec.model.name", id="empty-model-name"),
    pytest.param("spec.model.name", "chat:strict", ":strict", id="model-name-ends-in-a-tier"),
    pytest.param("spec.pools", {}, "nobody would answer", id="no-pool"),
    pytest.param("spec.pools.throughput.replicas", -1, "replicas", id="negative-replicas"),
    pytest.param(
        "spec.pools.throughput",
        {"replicas": 1, "autoscaling": {"min": 1, "max": 2, "targetRunningPerReplica": 8}},
        "not both",
        id="two-ways-to-scale",
    ),
    pytest.param(
        "spec.pools.throughput.autoscaling",
        {"min": 3, "max": 2, "targetRunningPerReplica": 8},
        "above",
        id="autoscaling-bounds",
    ),
    pytest.param("spec.tiers.default", "exact", "tiers.default", id="unknown-tier"),
    pytest.param("spec.tiers.default", "strict", "pools.strict is absent", id="tier-without-pool"),
    pytest.param("spec.tiers.allowed", [], "tiers.allowed", id="no-tier-allowed"),
    pytest.param("spec.tiers.allowed", ["strict"], "does not hold", id="default-not-allowed"),
    pytest.param("spec.tiers.allowed", ["standard"] * 2, "twice", id="tier-twice"),
    pytest.param("spec.tiers.limits", {"exact": {}}, "limits", id="limits-of-unknown-tier"),
    pytest.param("spec.drift.sampleRate", "1.5", "share of 0 to 1", id="rate-above-one"),
    pytest.param("spec.drift.sampleRate", 0.01, "sampleRate", id="rate-as-a-float"),
    pytest.param("spec.rollout.deadline", "2 hours", "deadline", id="duration-in-words"),
    pytest.param("spec.rollout.deadline", "9" * 40 + "d", "deadline", id="duration-too-long"),
    pytest.param("spec.rollout.strategy", "Rolling", "strategy", id="unknown-strategy"),
    pytest.param("spec.rollout.onInconclusive", "Promote", "onInconclusive", id="never-promote"),
    pytest.param(
        "spec.rollout.steps", [{"weight": 25}, {"weight": 25}], "must rise", id="flat-steps"
    ),
    pytest.param("spec.rollout.steps", [{"weight": 101}], "weight", id="weight-above-100"),
    pytest.param("spec.rollout.gates", [GATE], "metric and prometheus", id="gate-without-source"),
    pytest.param(
        "spec.rollout.gates",
        [GATE | {"metric": "errorRate", "prometheus": {"query": "up"}}],
        "metric and prometheus",
        id="gate-with-two-sources",
    ),
    pytest.param(
        "spec.rollout.gates",
        [{"name": "own", "metric": "errorRate"}],
        "max and maxRatioToStable",
        id="gate-without-bound",
    ),
    pytest.param(
        "spec.migration.standardToStrict.steps",
        [{"weight": 50}, {"weight": 10}],
        "migration.standardToStrict.steps must rise",
        id="falling-migration",
    ),
]


@pytest.mark.parametrize(("path", "value", "said"), REFUSED)
def test_wrong_manifest_is_refused_with_the_place(path: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        InferenceService.model_validate(changed(path, value))

    text = str(refusal.value)
    assert said in text, text


def test_pools_start_with_the_number_that_was_asked_for() -> None:
    scaled = {"autoscaling": {"min": 0, "max": 4, "targetRunningPerReplica": 8}}
    asked = [Pool(), Pool(replicas=0), Pool(replicas=3), Pool.model_validate(scaled)]

    assert [pool.desired_replicas for pool in asked] == [1, 0, 3, 0]


def test_documents_cannot_be_changed_after_validation() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Step(weight=5).weight = 50  # type: ignore[misc]  # what the test is about


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("1001ms", 1.001), ("30s", 30), ("1h30m", 5400), ("90d", 7_776_000)],
)
def test_duration_is_read_as_kubernetes_reads_it(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
parts = st.lists(
    st.tuples(st.integers(0, 99_999), st.sampled_from(sorted(UNITS))), min_size=1, max_size=4
)


@given(parts)
def test_duration_is_the_exact_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in parts)

    assert TypeAdapter(Duration).validate_python(text) == text
    assert duration_seconds(text) == sum(n * UNITS[unit] for n, unit in parts) / 1000


@given(st.text(alphabet="0123456789msdh. -+e", max_size=12))
def test_what_is_no_duration_is_refused(text: str) -> None:
    is_duration = re.fullmatch(r"([0-9]+(ms|s|m|h|d))+", text) is not None
    try:
        TypeAdapter(Duration).validate_python(text)
    except ValidationError:
        assert not is_duration
    else:
        assert is_duration


@given(st.lists(st.integers(0, 100), max_size=6))
def test_steps_are_accepted_exactly_when_they_rise(weights: list[int]) -> None:
    steps = tuple(Step(weight=weight) for weight in weights)
    if weights == sorted(set(weights)):
        require_rising_weights(steps, "rollout.steps")
    else:
        with pytest.raises(ValueError, match=re.escape(str(weights))):
            require_rising_weights(steps, "rollout.steps")

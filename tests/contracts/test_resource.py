"""What an InferenceService may say: the manifest of the API reference, its refusals, its schema."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.fields import Duration, duration_seconds
from isobatch_contracts.resource import InferenceService, Pool, StandardFallback
from isobatch_contracts.steering import Step, require_rising_weights
from isobatch_contracts.tiers import Tier
from pydantic import TypeAdapter, ValidationError

from tests.conftest import CheckGolden
from tests.contracts.malformed import MALFORMED, MINIMAL, Malformed, changed, manifest

GOLDEN = Path(__file__).with_name("golden")


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


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.id)
def test_malformed_manifest_is_refused_with_the_place(case: Malformed) -> None:
    with pytest.raises(ValidationError) as refusal:
        InferenceService.model_validate(changed(case.path, case.value))

    text = str(refusal.value)
    assert case.said in text, text


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

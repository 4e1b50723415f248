"""The definition: the models' own schema, taken by a real API server, which refuses as they do."""

import json
from pathlib import Path

import pytest
from isobatch_operator import crd

from tests.cluster.cluster import Cluster
from tests.cluster.ours import CHART, define
from tests.conftest import CheckGolden
from tests.contracts.malformed import MALFORMED, MINIMAL, Malformed, changed

REFERENCE = Path(__file__).parents[1] / "contracts/golden/inference_service.json"
# A tier that is named twice is refused by the kind of list; every other rule of a validator is one.
VALIDATORS = 11


def test_definition_in_the_chart_is_the_models_own(check_golden: CheckGolden) -> None:
    check_golden(CHART, crd.text())


def test_every_rule_over_several_fields_is_in_the_definition() -> None:
    assert crd.rules(crd.schema()) >= VALIDATORS


def test_what_an_older_definition_lacks_is_named() -> None:
    older = crd.definition()
    places = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del places["spec"]["properties"]["rollout"]["properties"]["steps"]["items"]["properties"][
        "pause"
    ]
    del places["status"]["properties"]["routing"]

    assert crd.missing(older) == ("spec.rollout.steps[].pause", "status.routing")
    assert crd.missing(crd.definition()) == ()
    assert crd.missing({}) == ("version v1alpha1",)


@pytest.fixture(scope="module")
def defined(control_plane: Cluster) -> Cluster:
    """An API server that has the definition."""
    define(control_plane)
    return control_plane


def test_resource_of_the_reference_is_accepted_and_comes_back_as_it_was(defined: Cluster) -> None:
    given = json.loads(REFERENCE.read_text())
    defined.kubectl("apply", "-f", "-", text=json.dumps(given))

    name = given["metadata"]["name"]
    kept = json.loads(defined.kubectl("get", "ibs", name, "--output=json"))

    defined.kubectl("delete", "ibs", name)
    assert contains(kept["spec"], given["spec"])


def contains(whole: object, part: object) -> bool:
    """Whether `whole` is `part` with nothing but more fields."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


def test_defaults_are_stored_and_the_throughput_pool_scales(defined: Cluster) -> None:
    defined.kubectl("apply", "-f", "-", text=MINIMAL)
    defined.kubectl("scale", "ibs", "chat", "--replicas=3")

    spec = json.loads(defined.kubectl("get", "ibs", "chat", "--output=json"))["spec"]
    table = defined.kubectl("get", "isobatch", "--output=wide")

    defined.kubectl("delete", "ibs", "chat")
    assert spec["tiers"]["default"] == "standard"
    assert spec["pools"]["throughput"]["replicas"] == 3
    assert "builtin://smollm2-135m" in table


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.id)
def test_malformed_resource_is_refused_with_the_name_of_its_field(
    defined: Cluster, case: Malformed
) -> None:
    document = json.dumps(changed(case.path, case.value))

    said = defined.kubectl("create", "--dry-run=server", "-f", "-", text=document, check=False)

    assert "created" not in said, said
    assert case.field in said, said

"""A manifest is taken, or refused with the path of the field and what was expected."""

import pytest
from isobatch_contracts.resource import InferenceService
from isobatch_operator.local.manifest_file import default_manifest
from isobatch_operator.manifest import InvalidManifest, parse_manifest
from isobatch_operator.revision import revision_of

GOOD = """\
apiVersion: serving.isobatch.dev/v1alpha1
kind: InferenceService
metadata:
  name: smollm2
spec:
  model:
    uri: builtin://smollm2-135m
  pools:
    strict: {replicas: 1}
    throughput: {replicas: 1}
"""


def problems(text: str) -> str:
    found = parse_manifest(text)
    assert isinstance(found, InvalidManifest), found
    return "\n".join(found.problems)


def test_the_default_is_the_built_in_model_in_one_replica_of_each_pool() -> None:
    service = default_manifest()

    assert service.served_name == "smollm2"
    assert service.spec.model.uri == "builtin://smollm2-135m"
    assert service.spec.pools.strict is not None
    assert service.spec.pools.throughput is not None


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("uri:", "url:"), "spec.model.url: there is no such field; did you mean uri?"),
        (("uri:", "url:"), "spec.model.uri: is required and absent"),
        (
            ("strict: {replicas: 1}", "strict: {replicas: two}"),
            "spec.pools.strict.replicas: expected",
        ),
        (
            ("strict: {replicas: 1}", "strict: {replicas: -1}"),
            "expected greater than or equal to 0",
        ),
        (
            ("strict: {replicas: 1}", "strict: {replica: 1}"),
            "strict.replica: there is no such field",
        ),
        (
            ("strict: {replicas: 1}", "strict: {replicas: 1, replicas: 2}"),
            "'replicas' stands twice",
        ),
        (("builtin://", "ftp://"), "spec.model.uri: must match pattern"),
        (("kind: InferenceService", "kind: Pod"), "kind: expected 'InferenceService', found 'Pod'"),
        (("name: smollm2", "name: Smol_M"), "metadata.name: must match pattern"),
        (("spec:", "spec: ["), "line 7, column"),
        (("spec:", "tiers: {}\nspec:"), "tiers: there is no such field; expected one of"),
        (("  pools:", "  tiers: {default: strict, allowed: [standard]}\n  pools:"), "spec.tiers: "),
        (("kind:", "kind: InferenceService\n---\nkind:"), "found 2 documents"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_field_is_named_with_what_was_expected(
    edit: tuple[str, str], expected: str
) -> None:
    assert expected in problems(GOOD.replace(*edit))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found 0 documents"),
        ("[1]", "found a list"),
        ("\x00", "not YAML"),
        ("? [a]\n: 1", "line 1"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    ],
)
def test_what_is_no_manifest_at_all_is_refused(text: str, expected: str) -> None:
    assert expected in problems(text)


def test_a_word_that_yaml_once_took_for_a_boolean_is_a_word() -> None:
    service = parse_manifest(GOOD + "  receipts: {standard: Off}\n")

    assert isinstance(service, InferenceService)
    assert service.spec.receipts.standard == "Off"


@pytest.mark.parametrize(
    ("edit", "is_new"),
    [
        pytest.param(("replicas: 1", "replicas: 3"), False, id="replicas"),
        pytest.param(("  pools:", "  tiers: {default: strict}\n  pools:"), False, id="tiers"),
        pytest.param(("{replicas: 1}", "{runtime: {args: []}}"), False, id="spelled-out default"),
        pytest.param(("{replicas: 1}", "{runtime: {args: [--x]}}"), True, id="args"),
        pytest.param(("{replicas: 1}", "{runtime: {maxModelLen: 99}}"), True, id="length"),
        pytest.param(("{replicas: 1}", "{hardware: {gpus: 1}}"), True, id="hardware"),
        pytest.param(("135m", "360m"), True, id="model"),
        pytest.param(("uri:", "name: other\n    uri:"), True, id="served name"),
    ],
)
def test_a_revision_is_what_shapes_the_workers(edit: tuple[str, str], is_new: bool) -> None:
    before, after = parse_manifest(GOOD), parse_manifest(GOOD.replace(*edit))

    assert isinstance(before, InferenceService)
    assert isinstance(after, InferenceService)
    assert (revision_of(before).name != revision_of(after).name) == is_new

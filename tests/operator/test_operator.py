"""The operator against a real API server, without a node: what it makes, says, and survives."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ours
from tests.cluster.cluster import Cluster
from tests.cluster.ours import Program, condition, owned, read, status
from tests.cluster.processes import wait_until


@pytest.fixture(scope="module")
def defined(control_plane: Cluster) -> Cluster:
    """An API server that has the definition."""
    ours.define(control_plane)
    return control_plane


@pytest.fixture(scope="module")
def acting(defined: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """An operator that acts; whatever it is given, its log has no traceback."""
    with ours.operator(defined, tmp_path_factory.mktemp("operator")) as program:
        wait_until(lambda: '"event": "leader"' in program.text, "it is the leader")
        yield program
    assert "Traceback" not in program.text


def gone(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", "ibs", name, "--ignore-not-found")
    wait_until(lambda: not owned(cluster, name), "what it owned is gone")


def test_service_gets_its_objects_and_a_delete_takes_them(
    defined: Cluster, acting: Program
) -> None:
    ours.apply(defined, ours.service("made", strict=1, throughput=2))

    wait_until(lambda: len(owned(defined, "made")) == 8, "all is there")
    kinds = sorted(name.partition("/")[0].partition(".")[0] for name in owned(defined, "made"))
    table = json.loads(read(defined, "configmap", "made-routing")["data"]["table.json"])

    assert kinds == sorted(
        ["configmap", "controllerrevision", *["deployment", "poddisruptionbudget", "service"] * 2]
    )
    assert {r["weight"] for r in table["revisions"]} == {0}
    assert condition(defined, "made", "Ready")["reason"] == "PoolsNotReady"
    assert condition(defined, "made", "Servable")["status"] == "False"
    assert "finalizers" not in read(defined, "ibs", "made")["metadata"]
    gone(defined, "made")


def test_pods_are_restricted_and_name_no_secret(defined: Cluster, acting: Program) -> None:
    ours.apply(defined, ours.service("tight", strict=1, throughput=None))
    wait_until(lambda: len(owned(defined, "tight")) == 5, "all is there")

    (deployment,) = [name for name in owned(defined, "tight") if name.startswith("deployment")]
    template = read(defined, deployment)["spec"]["template"]["spec"]
    namespace = {"pod-security.kubernetes.io/enforce": "restricted"}
    document = {"kind": "Namespace", "apiVersion": "v1"}
    ours.apply(defined, document | {"metadata": {"name": "narrow", "labels": namespace}})
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "narrow"}}
    said = defined.kubectl(
        "create", "--dry-run=server", "-f", "-", text=json.dumps(pod | {"spec": template})
    )

    assert "created" in said, "the API server's own restricted standard takes the pod"
    assert template["automountServiceAccountToken"] is False
    gone(defined, "tight")


def test_replicas_follow_the_scale_subresource(defined: Cluster, acting: Program) -> None:
    ours.apply(defined, ours.service("wide", throughput=1))
    wait_until(lambda: len(owned(defined, "wide")) == 5, "all is there")
    (deployment,) = [name for name in owned(defined, "wide") if name.startswith("deployment")]

    defined.kubectl("scale", "ibs", "wide", "--replicas=4")

    took = wait_until(lambda: read(defined, deployment)["spec"]["replicas"] == 4, "it has 4")
    assert took < 5
    gone(defined, "wide")


def test_change_by_another_hand_is_undone(defined: Cluster, acting: Program) -> None:
    ours.apply(defined, ours.service("kept", throughput=2))
    wait_until(lambda: len(owned(defined, "kept")) == 5, "all is there")
    (deployment,) = [name for name in owned(defined, "kept") if name.startswith("deployment")]

    defined.kubectl("scale", deployment, "--replicas=7")
    defined.kubectl("delete", "configmap", "kept-routing")

    wait_until(lambda: read(defined, deployment)["spec"]["replicas"] == 2, "it has 2 again")
    wait_until(lambda: bool(read(defined, "configmap", "kept-routing")), "the table is back")
    gone(defined, "kept")


def test_younger_of_two_services_of_one_name_says_so(defined: Cluster, acting: Program) -> None:
    document = ours.service("first", model={"uri": "builtin://smollm2-135m", "name": "same"})
    ours.apply(defined, document)
    wait_until(lambda: len(owned(defined, "first")) == 5, "the first is served")
    ours.apply(defined, document | {"metadata": {"name": "second"}})

    wait_until(
        lambda: condition(defined, "second", "Ready").get("reason") == "NameConflict",
        "the second is refused",
    )

    assert "default/first" in condition(defined, "second", "Ready")["message"]
    assert owned(defined, "second") == set()
    gone(defined, "first")
    gone(defined, "second")


HOSTILE = [
    pytest.param({"hardware": {"nodeSelector": {"a b": "c d"}}}, id="no-label"),
    pytest.param({"hardware": {"resources": {"limits": {"no/such/thing": 1}}}}, id="no-resource"),
    pytest.param({"runtime": {"args": ["$(HOME)", "\u0000\u202e", "-" * 4000]}}, id="odd-args"),
    pytest.param({"runtime": {"image": "UPPER:case:twice"}}, id="no-image"),
]


@pytest.mark.parametrize("pool", HOSTILE)
def test_what_the_api_server_will_not_have_is_said_and_no_traceback(
    defined: Cluster, acting: Program, pool: dict[str, object]
) -> None:
    document = ours.service("hostile", pools={"throughput": pool})
    ours.apply(defined, document)

    wait_until(lambda: bool(condition(defined, "hostile", "Ready")), "it is looked at")

    assert condition(defined, "hostile", "Ready")["status"] == "False"
    assert "Traceback" not in acting.text
    gone(defined, "hostile")


def test_unknown_verb_is_taken_away_and_named(defined: Cluster, acting: Program) -> None:
    ours.apply(defined, ours.service("verbs"))
    wait_until(lambda: len(owned(defined, "verbs")) == 5, "all is there")
    word = "serving.isobatch.dev/rollout"

    defined.kubectl("annotate", "ibs", "verbs", f"{word}=explode")

    def is_taken() -> bool:
        return word not in read(defined, "ibs", "verbs")["metadata"].get("annotations", {})

    wait_until(is_taken, "the verb is taken")
    wait_until(
        lambda: "explode" in defined.kubectl("get", "events", "--output=json"), "it is named"
    )
    gone(defined, "verbs")


def test_lost_status_is_written_anew(defined: Cluster, acting: Program) -> None:
    ours.apply(defined, ours.service("lost"))
    wait_until(lambda: "routing" in status(defined, "lost"), "it has a status")

    nothing = json.dumps([{"op": "remove", "path": "/status"}])
    defined.kubectl("patch", "ibs", "lost", "--subresource=status", "--type=json", "-p", nothing)

    wait_until(lambda: "routing" in status(defined, "lost"), "it has a status again")
    gone(defined, "lost")


def test_one_of_two_operators_acts_and_the_other_takes_over(
    defined: Cluster, acting: Program, tmp_path: Path
) -> None:
    with ours.operator(defined, tmp_path, name="operator-1") as second:
        wait_until(lambda: second.log.exists() and second.process.poll() is None, "it runs")
        ours.apply(defined, ours.service("handed"))
        wait_until(lambda: len(owned(defined, "handed")) == 5, "all is there")
        wait_until(lambda: second.metric("isobatch_operator_leader") == 0, "the second waits")

        acting.process.send_signal(19)  # SIGSTOP: it is not gone, it only says nothing
        try:
            wait_until(lambda: second.metric("isobatch_operator_leader") == 1, "it takes over", 40)
            defined.kubectl("scale", "ibs", "handed", "--replicas=3")
            (name,) = [one for one in owned(defined, "handed") if one.startswith("deployment")]
            wait_until(lambda: read(defined, name)["spec"]["replicas"] == 3, "the second acts")
        finally:
            acting.process.send_signal(18)  # SIGCONT
        wait_until(lambda: '"event": "not leader"' in acting.text, "the first sees that")
        gone(defined, "handed")
    wait_until(lambda: acting.metric("isobatch_operator_leader") == 1, "the first begins again", 40)


def test_definition_of_an_older_release_is_refused_at_start(
    defined: Cluster, acting: Program, tmp_path: Path
) -> None:
    place = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/sentinels"
    older = json.dumps([{"op": "remove", "path": place}])
    name = "inferenceservices.serving.isobatch.dev"
    defined.kubectl("patch", "crd", name, "--type=json", "-p", older)
    try:
        with ours.operator(defined, tmp_path, name="operator-2") as program:
            assert program.process.wait(30) == 1
        assert "lacks spec.sentinels" in program.text
    finally:
        ours.define(defined)

"""What the operator makes of what it sees of one service, without a cluster."""

import json
from dataclasses import replace
from typing import Any

import pytest
from isobatch_contracts import routing_table
from isobatch_contracts.tiers import PoolName
from isobatch_operator.cluster import names, render
from isobatch_operator.cluster.observe import Heard, Owned
from isobatch_operator.cluster.pod_template import merged_template, worker_arguments
from isobatch_operator.cluster.step import Step, Workers, decide, parse
from isobatch_operator.revision import revision_of
from isobatch_operator.rollout import Stage

WORKERS = Workers("image:1")
NOW = 1_000_000.0


def resource(status: dict[str, Any] | None = None, **pool: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.isobatch.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "n", "uid": "u1", "generation": 3},
        "spec": {
            "model": {"uri": "builtin://smollm2-135m"},
            "pools": {"throughput": {"replicas": 2} | pool},
        },
        "status": status,
    }


def step(document: dict[str, Any], owned: Owned, workers: Workers = WORKERS) -> Step:
    service = parse(document, workers)
    assert not isinstance(service, str), service
    return decide(service, document, owned, Heard(), workers, NOW)


def pod(revision: str, number: int, *, is_ready: bool = True, **metadata: Any) -> dict[str, Any]:
    since = render.timestamp(NOW - 100)
    labels = names.pool_labels("chat", PoolName.THROUGHPUT, revision)
    ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": since}
    running = {"restartCount": 0, "started": True, "state": {"running": {}}}
    return {
        "metadata": {"uid": f"{revision}-{number}", "labels": labels, "creationTimestamp": since}
        | metadata,
        "status": {"podIP": "10.0.0.1", "conditions": [ready], "containerStatuses": [running]},
    }


def after(document: dict[str, Any], owned: Owned, done: Step) -> tuple[dict[str, Any], Owned]:
    """What there is once `done` was carried out."""
    config = next((o for o in done.objects if o["kind"] == "ConfigMap"), owned.config)
    found = {kind: [o for o in done.objects if o["kind"] == kind] for kind in ("Deployment",)}
    return document | {"status": done.status}, replace(
        owned,
        config=config,
        revisions=(*owned.revisions, *done.revisions),
        deployments=tuple(found["Deployment"]) or owned.deployments,
    )


def served() -> tuple[dict[str, Any], Owned, str]:
    """A service whose first revision is served by two pods."""
    document, owned = resource(), Owned()
    document, owned = after(document, owned, step(document, owned))
    (kept,) = owned.revisions
    name = kept["metadata"]["labels"][names.REVISION_LABEL]
    owned = replace(owned, pods=(pod(name, 0), pod(name, 1)))
    for _ in range(2):
        document, owned = after(document, owned, step(document, owned))
    return document, owned, name


def counts(done: Step) -> dict[str, int]:
    return {
        o["metadata"]["labels"][names.REVISION_LABEL]: o["spec"]["replicas"]
        for o in done.objects
        if o["kind"] == "Deployment"
    }


def test_served_service_has_nothing_more_to_do() -> None:
    document, owned, name = served()

    done = step(document, owned)

    assert done.status["rollout"]["stableRevision"] == name
    assert [
        o["kind"] for o in done.objects if o["kind"] not in ("Service", "PodDisruptionBudget")
    ] == []
    assert done.look_again is None
    table = routing_table.load(owned.config["data"]["table.json"] if owned.config else "")
    (entry,) = table.revisions
    assert (entry.weight, entry.service) == (100, f"chat-throughput-{name}")


def test_another_operator_restarts_no_pod() -> None:
    document, owned, _ = served()
    newer = Workers("image:1", {"spec": {"priorityClassName": "high"}})

    assert counts(step(document, owned, newer)) == {}


def test_another_default_image_is_another_revision() -> None:
    document, owned, _ = served()

    done = step(document, owned, Workers("image:2"))

    assert done.plan.rollout.stage is Stage.MOVING
    (new,) = done.revisions
    template = new["data"]["pools"]["throughput"]["template"]
    assert template["spec"]["containers"][0]["image"] == "image:2"
    assert counts(done) == {new["metadata"]["labels"][names.REVISION_LABEL]: 2}


def test_lost_status_is_found_in_what_is_owned() -> None:
    document, owned, name = served()

    done = step(document | {"status": None}, owned)

    assert done.plan.rollout.stable == name
    assert done.plan.rollout.stage is Stage.IDLE
    assert counts(done) == {}


def test_pod_that_ends_takes_no_place_and_its_successor_is_not_waited_for() -> None:
    document, owned, name = served()
    ending = pod(name, 0, deletionTimestamp=render.timestamp(NOW))

    done = step(document, replace(owned, pods=(ending, owned.pods[1], pod(name, 2))))

    assert counts(done) == {}, "two live ones are what is asked for"


@pytest.mark.parametrize(
    ("waiting", "is_failed"),
    [("InvalidImageName", True), ("ImagePullBackOff", True), ("ContainerCreating", False)],
)
def test_canary_that_cannot_start_is_rolled_back(waiting: str, is_failed: bool) -> None:
    document, owned, _ = served()
    document = document | {"spec": resource(runtime={"args": ["--new"]})["spec"]}
    done = step(document, owned)
    (new,) = done.revisions
    stuck = pod(new["metadata"]["labels"][names.REVISION_LABEL], 9, is_ready=False)
    state = {"restartCount": 0, "state": {"waiting": {"reason": waiting, "message": "m"}}}
    stuck["status"]["containerStatuses"] = [state]
    document, owned = after(document, owned, done)

    later = decide_later(document, replace(owned, pods=(*owned.pods, stuck)))

    assert (later.plan.rollout.stage is Stage.ROLLING_BACK) is is_failed
    assert not is_failed or waiting in later.plan.rollout.message


def decide_later(document: dict[str, Any], owned: Owned) -> Step:
    service = parse(document, WORKERS)
    assert not isinstance(service, str)
    return decide(service, document, owned, Heard(), WORKERS, NOW + 1)


def test_step_is_the_same_twice() -> None:
    document, owned, _ = served()
    changed = document | {"spec": resource(runtime={"args": ["--new"]})["spec"]}

    assert json.dumps(step(changed, owned).objects) == json.dumps(step(changed, owned).objects)


def test_arguments_are_no_references() -> None:
    service = parse(resource(runtime={"args": ["$(HOME)"], "maxModelLen": 64}), WORKERS)
    assert not isinstance(service, str)

    arguments = worker_arguments(PoolName.THROUGHPUT, revision_of(service))

    assert arguments[-3:] == ["--max-model-len", "64", "$$(HOME)"]


def test_resource_of_another_schema_is_said_and_not_raised() -> None:
    document = resource()
    document["spec"]["pools"] = {"throughput": {"replicas": "many"}}

    assert "spec.pools.throughput.replicas" in str(parse(document, WORKERS))


def test_template_is_merged_by_names() -> None:
    base = {"a": [{"name": "x", "v": 1}, {"name": "y"}], "b": {"c": 1, "d": 2}, "e": [1]}
    patch = {"a": [{"name": "x", "w": 2}, {"name": "z"}], "b": {"c": None}, "e": [2, 3]}

    assert merged_template(base, patch) == {
        "a": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}],
        "b": {"d": 2},
        "e": [2, 3],
    }

"""Rollouts on a real cluster, under traffic: the chart's operator and two gateways in pods.

Workers are fakes with vLLM's surface; the last test has the real one, with the built-in model.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ours, pods, release
from tests.cluster.cluster import Cluster
from tests.cluster.ours import owned, read, status
from tests.cluster.processes import wait_until
from tests.cluster.traffic import Traffic, traffic

VERB = "serving.isobatch.dev/rollout"
Figure = Callable[[str, object], None]


@pytest.fixture(scope="module")
def gateways(
    cluster: Cluster, helm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of the gateways of a release whose workers are fakes."""
    folder = tmp_path_factory.mktemp("release")
    with release.installed(cluster, helm, folder, [pods.PYTHON, release.FAKE]) as url:
        yield url
        log = cluster.kubectl("logs", f"-n{release.NAMESPACE}", "deployment/r-isobatch-operator")
        assert "Traceback" not in log, log


class Service:
    """One InferenceService under traffic."""

    def __init__(self, cluster: Cluster, name: str, **spec: Any) -> None:
        self.cluster = cluster
        self.name = name
        self._spec = spec

    def apply(self, *args: str, **spec: Any) -> None:
        """Ask for a revision whose workers are told `args`."""
        replicas = self._spec.get("replicas", {"strict": 1, "throughput": 2})
        pools = {
            pool: {"replicas": count, "runtime": {"args": list(args)}}
            for pool, count in replicas.items()
        }
        own = {key: value for key, value in self._spec.items() if key != "replicas"} | spec
        ours.apply(self.cluster, ours.service(self.name, pools=pools, **own))

    def rollout(self) -> dict[str, Any]:
        return dict(status(self.cluster, self.name).get("rollout") or {})

    def say(self, verb: str) -> float:
        """Ask for a verb; when that was."""
        self.cluster.kubectl("annotate", "ibs", self.name, f"{VERB}={verb}", "--overwrite")
        return time.time()

    def until_ready(self, seconds: float = 90) -> str:
        """Wait until all is as asked; the stable revision."""
        generation = read(self.cluster, "ibs", self.name)["metadata"]["generation"]

        def is_ready() -> bool:
            now = status(self.cluster, self.name)
            ready = [c for c in now.get("conditions", ()) if c["type"] == "Ready"]
            is_true = bool(ready) and ready[0]["status"] == "True"
            routing = now.get("routing", {})
            is_heard = routing.get("acknowledged") == routing.get("version")
            return is_true and is_heard and now.get("observedGeneration") == generation

        wait_until(is_ready, f"{self.name} is ready", seconds)
        return str(self.rollout()["stableRevision"])

    def until(self, seconds: float = 60, **wanted: Any) -> dict[str, Any]:
        """Wait until the rollout says so."""
        wait_until(
            lambda: all(self.rollout().get(key) == value for key, value in wanted.items()),
            f"{self.name}: {wanted}",
            seconds,
        )
        return self.rollout()

    def until_settled(self) -> None:
        """Wait until only the stable revision is left, and it alone has weight."""
        stable = self.rollout()["stableRevision"]
        kinds = ("deployment.apps", "service", "poddisruptionbudget.policy")

        def is_settled() -> bool:
            names = [n for n in owned(self.cluster, self.name) if n.partition("/")[0] in kinds]
            return bool(names) and all(name.endswith(stable) for name in names)

        wait_until(is_settled, f"only {stable} is left", 90)


@pytest.fixture
def make(
    cluster: Cluster, gateways: str, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Service]]:
    """Services that are gone after the test."""
    made: list[str] = []

    def make_one(name: str, **spec: Any) -> Service:
        made.append(name)
        return Service(cluster, name, **spec)

    yield make_one
    for name in made:
        cluster.kubectl("delete", "ibs", name, "--ignore-not-found")
        wait_until(lambda name=name: not owned(cluster, name), "all is gone", 60)  # type: ignore[misc]


@pytest.fixture
def ask(cluster: Cluster, gateways: str, tmp_path: Path) -> Callable[..., Any]:
    """Traffic to a service."""

    def start(name: str, tiers: tuple[str, ...] = ("strict", "standard")) -> Any:
        return traffic(cluster, gateways, name, tmp_path, tiers)

    return start


def flowing(asked: Traffic, count: int = 40) -> None:
    """Wait until so many more answers have come."""
    before = len(asked.answers())
    wait_until(lambda: len(asked.answers()) >= before + count, "answers come", 30)


def test_canary_goes_step_by_step_to_promotion_and_loses_nothing(
    make: Callable[..., Service], ask: Callable[..., Any], report_figure: Figure
) -> None:
    steps = [{"weight": 50, "pause": True}]
    service = make("canary", rollout={"steps": steps}, replicas={"strict": 2, "throughput": 2})
    service.apply()
    first = service.until_ready()

    with ask("canary") as asked:
        flowing(asked)
        service.apply("--note", "second")
        paused = service.until(phase="Paused", weight=50)
        second = paused["canaryRevision"]
        since = time.time()
        flowing(asked, 300)
        share = asked.share(second, since)
        service.say("resume")
        service.until(stableRevision=second, phase="Idle")
        done = time.time()
        flowing(asked, 60)
        service.until_settled()
        flowing(asked, 20)

    assert asked.problems() == []
    assert first != second
    assert paused["pausedBy"] == "PausedByStep"
    assert 35 <= share <= 65, "its weight is 50"
    assert asked.last_at(first) <= done
    report_figure("cluster: canary under traffic", f"{len(asked.answers())} asked, 0 failed")


def test_abort_ends_at_weight_zero_at_once(
    make: Callable[..., Service], ask: Callable[..., Any], report_figure: Figure
) -> None:
    service = make("aborted", rollout={"steps": [{"weight": 50, "pause": True}]})
    service.apply()
    first = service.until_ready()

    with ask("aborted") as asked:
        service.apply("--note", "second")
        # Of a strict pool of one, one ready canary carries all that the step asks for.
        second = service.until(phase="Paused", weight=50)["canaryRevision"]
        flowing(asked, 100)
        at = service.say("abort")
        service.until(phase="Failed")
        service.until_settled()
        flowing(asked, 40)

    assert asked.problems() == []
    rollout = service.rollout()
    assert (rollout["stableRevision"], rollout["failedRevision"]) == (first, second)
    assert rollout["reason"] == "Aborted"
    assert rollout["weight"] == 0
    late = asked.last_at(second) - at
    assert late <= 2.0
    report_figure("cluster: last request on an aborted canary", f"{late:.2f} s after the verb")


def test_canary_that_answers_errors_is_rolled_back_and_no_client_sees_one(
    make: Callable[..., Service], ask: Callable[..., Any]
) -> None:
    gates = [{"name": "errors", "metric": "errorRate", "max": "0.05"}]
    rollout = {"steps": [{"weight": 50, "hold": "60s"}], "gates": gates, "minRequests": 20}
    service = make("erring", rollout=rollout)
    service.apply()
    first = service.until_ready()

    with ask("erring") as asked:
        flowing(asked)
        service.apply("--fail")
        service.until(phase="Failed", seconds=90)
        flowing(asked)

    found = service.rollout()
    assert (found["stableRevision"], found["reason"]) == (first, "GateFailed")
    assert "errors" in found["message"]
    # A strict canary of one is half of its pool: what it failed was answered by the stable one.
    assert asked.problems() == []


def test_gate_without_samples_holds_and_never_promotes(make: Callable[..., Service]) -> None:
    gates = [{"name": "errors", "metric": "errorRate", "max": "0.05"}]
    rollout = {"steps": [{"weight": 50}], "gates": gates, "minRequests": 20}
    service = make("silent", rollout=rollout, replicas={"throughput": 2})
    service.apply()
    first = service.until_ready()

    service.apply("--note", "second")
    held = service.until(phase="Paused", pausedBy="Inconclusive")

    assert held["stableRevision"] == first
    assert held["gates"][0]["outcome"] == "Inconclusive"
    assert "of 20 requests" in held["message"]


def test_canary_that_crashes_is_rolled_back_and_was_never_asked(
    make: Callable[..., Service], ask: Callable[..., Any]
) -> None:
    service = make("crashing", rollout={"steps": [{"weight": 50}]})
    service.apply()
    first = service.until_ready()

    with ask("crashing") as asked:
        service.apply("--crash")
        service.until(phase="Failed", seconds=120)
        flowing(asked)

    found = service.rollout()
    assert (found["stableRevision"], found["reason"]) == (first, "CanaryFailed")
    assert "code 1" in found["message"]
    assert asked.problems() == []
    assert asked.last_at(found["failedRevision"]) == 0


def test_canary_that_never_gets_ready_ends_with_its_deadline(make: Callable[..., Service]) -> None:
    service = make("late", rollout={"deadline": "6s"}, replicas={"throughput": 1})
    service.apply()
    first = service.until_ready()

    service.apply("--never-ready", rollout={"deadline": "6s"})

    found = service.until(phase="Failed")
    assert (found["stableRevision"], found["reason"]) == (first, "DeadlineExceeded")


@pytest.mark.parametrize(
    ("name", "rollout"),
    [
        ("bluegreen", {"strategy": "BlueGreen"}),
        ("inplace", {"capacity": "InPlace", "steps": [{"weight": 50}]}),
    ],
)
def test_other_ways_to_take_over_lose_nothing(
    make: Callable[..., Service], ask: Callable[..., Any], name: str, rollout: dict[str, Any]
) -> None:
    service = make(name, rollout=rollout, replicas={"strict": 2, "throughput": 2})
    service.apply()
    first = service.until_ready()

    with ask(name) as asked:
        flowing(asked)
        service.apply("--note", "second")
        wait_until(lambda: service.rollout().get("stableRevision") != first, "promoted", 90)
        service.until_settled()
        flowing(asked)

    assert asked.problems() == []
    assert service.rollout()["phase"] == "Idle"


def test_recreate_refuses_inside_its_window_alone(
    make: Callable[..., Service], ask: Callable[..., Any]
) -> None:
    service = make("recreated", rollout={"strategy": "Recreate"})
    service.apply()
    first = service.until_ready()

    with ask("recreated") as asked:
        flowing(asked)
        service.apply("--note", "second")
        wait_until(lambda: service.rollout().get("stableRevision") != first, "promoted", 90)
        service.until_settled()
        done = time.time()
        flowing(asked)

    failed = [one for one in asked.answers() if one.problem]
    assert failed, "there is a window"
    assert {one.status for one in failed} == {503}
    assert not [one for one in failed if "without Retry-After" in one.problem]
    assert max(one.at for one in failed) <= done


def test_edit_and_revert_during_a_rollout_end_where_the_spec_is(
    make: Callable[..., Service], ask: Callable[..., Any]
) -> None:
    service = make("edited", rollout={"steps": [{"weight": 50, "pause": True}]})
    service.apply()
    first = service.until_ready()

    with ask("edited") as asked:
        service.apply("--note", "second")
        second = service.until(phase="Paused", weight=50)["canaryRevision"]
        service.apply("--note", "third")
        wait_until(
            lambda: service.rollout().get("canaryRevision") not in (None, second), "third", 90
        )
        service.until(phase="Paused", weight=50, seconds=90)
        service.apply()
        service.until(phase="Idle", stableRevision=first)
        service.until_settled()
        flowing(asked)

    assert asked.problems() == []
    assert "failedRevision" not in service.rollout()


@pytest.mark.parametrize("victim", ["operator", "gateway", "worker"])
def test_crash_in_the_middle_of_a_rollout_changes_nothing(
    cluster: Cluster, make: Callable[..., Service], ask: Callable[..., Any], victim: str
) -> None:
    steps = [{"weight": 25, "hold": "2s"}, {"weight": 50, "hold": "4s"}]
    service = make(
        f"hit-{victim}", rollout={"steps": steps}, replicas={"strict": 2, "throughput": 4}
    )
    service.apply()
    first = service.until_ready()

    with ask(service.name) as asked:
        service.apply("--note", "second")
        service.until(weight=25)
        where = {
            "operator": (f"-n{release.NAMESPACE}", "-lapp.kubernetes.io/component=operator"),
            "gateway": (f"-n{release.NAMESPACE}", "-lapp.kubernetes.io/component=gateway"),
            "worker": ("-ndefault", f"-lserving.isobatch.dev/service={service.name}"),
        }[victim]
        name = cluster.kubectl("get", "pods", *where, "--output=name").split()[0]
        hit = time.time()
        cluster.kubectl("delete", name, where[0], "--grace-period=0", "--force")
        wait_until(lambda: service.rollout().get("stableRevision") != first, "promoted", 120)
        service.until_settled()
        flowing(asked)

    # Who was talking to the pod that was killed is cut off; nobody after that.
    failed = [one for one in asked.answers() if one.problem and not hit - 2 <= one.at <= hit + 3]
    assert failed == []
    if victim == "operator":
        assert asked.problems() == []
    assert service.rollout()["phase"] == "Idle"
    deployed = [name for name in owned(cluster, service.name) if name.startswith("deployment")]
    assert len(deployed) == 2


ASK = """
import json, sys, urllib.request
url, tier = sys.argv[1:]
body = {"model": "real", "prompt": "The capital of France is", "max_tokens": 8, "logprobs": 1}
headers = {"Content-Type": "application/json", "X-Consistency-Tier": tier}
request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(json.dumps([dict(answer.headers.items()), json.load(answer)["choices"][0]]))
"""


@pytest.mark.full
@pytest.mark.model
def test_real_worker_answers_strict_and_standard_through_a_gateway_pod(
    cluster: Cluster, gateways: str, make: Callable[..., Service], report_figure: Figure
) -> None:
    service = make("real", replicas={"strict": 1, "throughput": 1})
    begun = time.monotonic()
    service.apply("--real", "--max-num-seqs", "4", "--max-model-len", "512")
    service.until_ready(seconds=420)
    report_figure("cluster: both real pools ready", f"{time.monotonic() - begun:.0f} s")

    def ask(tier: str) -> tuple[dict[str, str], dict[str, Any]]:
        headers, choice = json.loads(cluster.run(pods.PYTHON, "-c", ASK, gateways, tier))
        return {name.lower(): value for name, value in headers.items()}, choice

    (first_headers, first), (_, second) = ask("strict"), ask("strict")
    standard_headers, standard = ask("standard")

    assert first_headers["x-served-by"].startswith("strict/")
    (pool,) = [p for p in status(cluster, "real")["pools"] if p["name"] == "strict"]
    assert [first_headers["x-numerics-fingerprint"]] == pool["fingerprints"]
    assert first == second, "the same request has the same text and logprobs, bit for bit"
    assert first["text"]
    assert standard_headers["x-served-by"].startswith("throughput/")
    assert standard["text"]

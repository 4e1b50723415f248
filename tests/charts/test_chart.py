"""The chart: what it renders, what it refuses, and that a real API server takes it."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.charts.values import ChartValues, schema
from tests.cluster.cluster import Cluster

CHART = Path(__file__).parents[2] / "charts/isobatch"
CRD = CHART / "files/crd.yaml"
KUBERNETES = "1.35"
NO_CRD: tuple[str, ...] = () if CRD.exists() else ("--set=crds.install=false",)
MATRIX = {
    "defaults": (),
    "namespaced": ("--set=watchNamespaces={a,b}",),
    "worker namespaces": ("--set=networkPolicy.workerNamespaces={a,b}",),
    "open network": ("--set=networkPolicy.enabled=false",),
    "closed gateway": ('--set-json=networkPolicy.gatewayFrom=[{"podSelector":{}}]',),
    "autoscaled": ("--set=gateway.autoscaling.enabled=true",),
    "ingress": ("--set=gateway.ingress.enabled=true,gateway.ingress.host=a.example",),
    "secrets": (
        "--set=gateway.keysSecret.name=k,gateway.databaseSecret.name=d,gateway.secret.name=s",
    ),
    "digests": (f"--set=operator.image.digest=sha256:{'a' * 64}",),
    "pod template": ("--set=workers.podTemplate.spec.priorityClassName=high",),
    "pull secrets": ('--set-json=imagePullSecrets=[{"name":"registry"}]',),
    "tolerations": ('--set-json=gateway.tolerations=[{"operator":"Exists"}]',),
    "dashboards": ("--set=monitoring.dashboards.enabled=true",),
    "tests": ("--set=test.models={a,b},test.keySecret.name=k",),
}
BAD = [
    "gateway.replica=3",
    "gateway.replicas=-1",
    "gateway.replicas=two",
    "gateway.service.port=0",
    "gateway.service.port=70000",
    "gateway.service.type=Cluster",
    "gateway.drain.timeoutSeconds=0",
    "gateway.autoscaling.cpuPercent=101",
    "gateway.autoscaling.min=0",
    "gateway.image.pullPolicy=Sometimes",
    "gateway.image.repository=",
    "gateway.logLevel=loud",
    "gateway.ingress.host=A_B",
    "gateway.keysSecret=plain",
    "gateway.databaseSecret.url=postgres://u:p@h/d",
    "operator.image.digest=sha256:12",
    "operator.command=",
    "workers.image=worker:1",
    "watchNamespaces={Upper}",
    "networkPolicy.enabled=maybe",
    "monitoring.podMonitors.interval=15",
    "crds.keep=true",
    "unknown=1",
]
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def render(helm: Path, *options: str) -> list[dict[str, Any]]:
    command = [
        str(helm),
        "template",
        "release",
        str(CHART),
        "--namespace=system",
        *NO_CRD,
        *options,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [document for document in yaml.safe_load_all(ran.stdout) if document]


def pod_specs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    deployments = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment"]
    return deployments + [d["spec"] for d in documents if d["kind"] == "Pod"]


def test_schema_of_the_values_is_generated(check_golden: Callable[[Path, str], None]) -> None:
    check_golden(CHART / "values.schema.json", json.dumps(schema(), indent=2) + "\n")


def test_default_values_fit_their_model() -> None:
    ChartValues.model_validate(yaml.safe_load((CHART / "values.yaml").read_text()))


@pytest.mark.parametrize("options", MATRIX.values(), ids=MATRIX)
def test_what_is_rendered_is_valid(helm: Path, options: tuple[str, ...]) -> None:
    for document in render(helm, *options):
        if document["kind"] != "CustomResourceDefinition":  # the API server itself takes that one
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("value", BAD)
def test_bad_values_are_refused(helm: Path, value: str) -> None:
    command = [str(helm), "template", "release", str(CHART), *NO_CRD, "--set", value]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode != 0
    assert value.partition("=")[0].split(".")[0] in ran.stderr
    assert "schema" in ran.stderr


def test_pods_are_restricted(helm: Path) -> None:
    specs = pod_specs(render(helm))

    assert len(specs) == 3
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert [c["securityContext"] for c in spec["containers"]] == [RESTRICTED]


@pytest.mark.parametrize("options", [(), MATRIX["namespaced"]], ids=["cluster-wide", "namespaced"])
def test_no_role_reads_secrets(helm: Path, options: tuple[str, ...]) -> None:
    roles = [d for d in render(helm, *options) if d["kind"] in {"Role", "ClusterRole"}]
    named = {resource for role in roles for rule in role["rules"] for resource in rule["resources"]}

    assert "configmaps" in named
    assert named & {"secrets", "*"} == set()


def test_workers_answer_gateways_operator_and_prometheus_alone(helm: Path) -> None:
    policies = [d for d in render(helm) if d["kind"] == "NetworkPolicy"]
    [workers] = [p["spec"] for p in policies if p["metadata"]["name"].endswith("-workers")]

    [rule] = workers["ingress"]
    component = "app.kubernetes.io/component"
    names = [peer["podSelector"]["matchLabels"].get(component) for peer in rule["from"]]
    assert names == ["gateway", "operator", None]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]


def test_alerts_fire_as_meant(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    shutil.copy(CHART / "files/alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)

    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        ran = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_release_is_installed_upgraded_and_uninstalled(helm: Path, control_plane: Cluster) -> None:
    chart = [str(CHART), "--namespace=system"]
    control_plane.run(str(helm), "install", "r", *chart, "--create-namespace", *NO_CRD)
    secret = ("get", "secret", "r-isobatch-gateway", "-nsystem", "--output=jsonpath={.data.secret}")
    before = control_plane.kubectl(*secret)

    control_plane.run(str(helm), "upgrade", "r", *chart, *NO_CRD, "--set=gateway.replicas=3")

    shown = ("get", "deployment", "r-isobatch-gateway", "-nsystem")
    assert control_plane.kubectl(*shown, "--output=jsonpath={.spec.replicas}") == "3"
    assert control_plane.kubectl(*secret) == before, "gateways would draw other seeds"
    for account in ("operator", "gateway"):
        subject = f"--as=system:serviceaccount:system:r-isobatch-{account}"
        asked = ("auth", "can-i", "get", "secrets", "-nsystem", subject)
        assert control_plane.kubectl(*asked, check=False).startswith("no")
    control_plane.run(str(helm), "uninstall", "r", "--namespace=system", "--wait")
    kinds = "deployments,services,roles,rolebindings,networkpolicies,secrets"
    assert control_plane.kubectl("get", kinds, "-nsystem", "--output=name") == ""

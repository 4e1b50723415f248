"""Installs the chart on a cluster with a node: operator and gateways as pods of this checkout."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import images, pods
from tests.cluster.cluster import Cluster
from tests.cluster.ours import PROGRAM

CHART = Path(__file__).parents[2] / "charts/isobatch"
FAKE = str(Path(__file__).with_name("fake_worker.py"))
NAMESPACE = "isobatch"
_PATH = {"name": "PATH", "value": f"{Path(PROGRAM).parent}:/usr/bin:/bin"}


def values(worker_command: list[str]) -> dict[str, Any]:
    """The chart's values: every pod runs this checkout, every worker `worker_command`."""
    repository, _, tag = images.HOST.rpartition(":")
    image = {"repository": repository, "tag": tag}
    own = {
        "image": image | {"pullPolicy": "Never"},
        "env": [*pods.variables(), _PATH],
        "extraVolumes": [one for one in pods.volumes() if one["name"] != "tmp"],
        "extraVolumeMounts": [one for one in pods.mounts() if one["name"] not in ("tmp", "models")],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    fast = {"periodSeconds": 1, "timeoutSeconds": 5}
    worker = {
        "name": "worker",
        "command": worker_command,
        # The cache stays the operator's own: a model is locked and converted in it.
        "env": [*(v for v in pods.variables() if v["name"] != "ISOBATCH_CACHE_DIR"), _PATH],
        "imagePullPolicy": "Never",
        "startupProbe": fast,
        "readinessProbe": fast,
        "volumeMounts": [m for m in pods.mounts() if m["name"] not in ("tmp", "models")],
    }
    template = {
        "spec": {
            "terminationGracePeriodSeconds": 30,
            "containers": [worker],
            "volumes": [v for v in pods.volumes() if v["name"] not in ("tmp", "models")],
        }
    }
    return {
        "operator": own | {"command": [PROGRAM, "operator"], "replicas": 1},
        "gateway": own
        | {
            "command": [PROGRAM, "gateway"],
            "replicas": 2,
            "drain": {"delaySeconds": 2, "timeoutSeconds": 20},
        },
        "workers": {"image": image, "podTemplate": template},
        "networkPolicy": {"enabled": False},
    }


@contextmanager
def installed(cluster: Cluster, helm: Path, folder: Path, worker: list[str]) -> Iterator[str]:
    """The chart as a release, until the block ends; the address of its gateways."""
    file = folder / "values.json"
    file.write_text(json.dumps(values(worker)))
    command = [str(helm), "install", "r", str(CHART), f"--namespace={NAMESPACE}"]
    cluster.run(*command, "--create-namespace", f"--values={file}")
    try:
        deployment = "deployment/r-isobatch-operator"
        ready = ("rollout", "status", deployment, f"-n{NAMESPACE}", "--timeout=1s")
        cluster.wait_for("operator", *ready)
        shown = ("get", "service", "r-isobatch-gateway", f"-n{NAMESPACE}")
        address = cluster.kubectl(*shown, "--output=jsonpath={.spec.clusterIP}")
        yield f"http://{address}"
    finally:
        cluster.run(str(helm), "uninstall", "r", f"--namespace={NAMESPACE}", "--wait")

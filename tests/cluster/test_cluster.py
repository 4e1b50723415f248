"""The cluster itself: what it promises to the tests that run on it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster import images, isolation, pods
from tests.cluster.cluster import Cluster, remove_leftovers
from tests.cluster.processes import wait_until

NODE_READY_SECONDS = 10
FIRST_POD_SECONDS = 20
FAULTS = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
NODE_FAULTS = [*FAULTS, "kubelet", "kube-proxy", "containerd"]


def pod(name: str, *command: str) -> str:
    """A pod that runs the checkout's own environment under the restricted standard."""
    container = {
        "name": "main",
        "image": images.HOST,
        "command": list(command),
        "env": pods.variables(),
        "securityContext": pods.restricted(),
        "volumeMounts": pods.mounts(),
    }
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": pods.volumes()}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return json.dumps(manifest)


def traces() -> dict[str, set[str]]:
    """What a cluster could leave on the machine."""
    groups = isolation.CGROUPS.glob("*/isobatch-*")
    return {
        "namespaces": {path.name for path in Path("/run/netns").glob("isobatch-*")},
        "cgroups": {str(path) for path in groups},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "processes": {
            f"{process.pid} {process.name()}"
            for process in psutil.process_iter()
            if process.name() in {*NODE_FAULTS, "pause", "containerd-shim-runc-v2", "kubernetes"}
        },
        "sysctls": {Path("/proc/sys", name).read_text() for name in ("vm/overcommit_memory",)},
    }


def test_control_plane_serves_without_a_node(control_plane: Cluster) -> None:
    assert control_plane.kubectl("get", "--raw", "/readyz") == "ok"
    assert control_plane.kubectl("get", "nodes", "--output=name") == ""


@pytest.mark.parametrize("program", FAULTS)
def test_control_plane_comes_back_after_a_crash(control_plane: Cluster, program: str) -> None:
    name = f"kept-{program}"
    control_plane.kubectl("create", "configmap", name, "--from-literal=a=b")

    control_plane.kill(program)
    control_plane.restart(program)

    found = control_plane.kubectl("get", "configmap", name, "--output=jsonpath={.data.a}")
    assert found == "b"


def test_pod_runs_the_real_worker_of_this_checkout(cluster: Cluster) -> None:
    program = "import vllm, isobatch_worker, os; print(vllm.__version__, os.getuid())"
    cluster.kubectl("apply", "-f", "-", text=pod("worker", pods.PYTHON, "-c", program))

    done = ("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/worker", "--timeout=1s")
    cluster.wait_for("end of the pod", *done)

    assert cluster.kubectl("logs", "worker").split()[-2:] == ["0.26.0", str(images.USER_ID)]


@pytest.mark.parametrize("program", NODE_FAULTS)
def test_running_pod_outlives_a_crash(cluster: Cluster, program: str) -> None:
    name = f"lasting-{program}"
    cluster.kubectl("apply", "-f", "-", text=pod(name, "/usr/bin/sleep", "3600"))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")

    cluster.kill(program)
    cluster.restart(program)

    cluster.wait_for("node", "wait", "--for=condition=Ready", "node", "--all", "--timeout=1s")
    restarts = "jsonpath={.status.phase} {.status.containerStatuses[0].restartCount}"
    assert cluster.kubectl("get", "pod", name, f"--output={restarts}") == "Running 0"
    cluster.kubectl("delete", "pod", name, "--grace-period=1")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs/one"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def test_node_starts_in_time_and_leaves_nothing(cluster_programs: Path, folder: Path) -> None:
    if (reason := isolation.missing()) is not None:
        pytest.skip(reason)
    before = traces()

    begun = time.monotonic()
    own = Cluster.up(folder, cluster_programs, has_node=True)
    try:
        ready_seconds = time.monotonic() - begun
        own.kubectl("apply", "-f", "-", text=pod("first", "/usr/bin/sleep", "3600"))
        own.kubectl("wait", "--for=condition=Ready", "pod/first", "--timeout=60s")
        pod_seconds = time.monotonic() - begun
    finally:
        own.down()

    after = traces()
    assert {kind: after[kind] - before[kind] for kind in before} == {kind: set() for kind in before}
    print(f"node Ready in {ready_seconds:.1f} s, first pod in {pod_seconds:.1f} s")
    assert ready_seconds <= NODE_READY_SECONDS
    assert pod_seconds <= FIRST_POD_SECONDS


STARTER = """
import os, sys
from pathlib import Path
from tests.cluster.cluster import Cluster
from tests.cluster.processes import Running
folder, programs = map(Path, sys.argv[1:])
Cluster.up(folder, programs, has_node=True, owner=Running.of(os.getpid()))
"""


def test_cluster_whose_starter_was_killed_is_removed_by_the_next(
    cluster_programs: Path, folder: Path
) -> None:
    if (reason := isolation.missing()) is not None:
        pytest.skip(reason)
    before = traces()
    command = [sys.executable, "-c", STARTER, str(folder), str(cluster_programs)]
    starter = subprocess.Popen(command, cwd=pods.CHECKOUT, env=os.environ | {"PYTHONPATH": "."})
    wait_until((folder / "logs/kube-apiserver.log").exists, "the API server starts")
    starter.kill()  # in the middle of the start
    starter.wait()

    remove_leftovers(folder.parent, cluster_programs)

    after = traces()
    assert {kind: after[kind] - before[kind] for kind in before} == {kind: set() for kind in before}
    assert not folder.exists()

"""Starts this checkout's own programs beside a cluster, and reads what becomes of resources."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isobatch_operator import crd
from isobatch_operator.local.ports import free_port

from tests.cluster.cluster import Cluster

CHART = Path(__file__).parents[2] / "charts/isobatch/files/crd.yaml"
PROGRAM = str(Path(sys.prefix) / "bin/isobatch")
SERVING = "serving.isobatch.dev/v1alpha1"


def define(cluster: Cluster) -> None:
    """Install the definition, and wait until the API server serves it."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART))
    ready = ("wait", "--for=condition=Established", f"crd/{crd.NAME}", "--timeout=1s")
    cluster.wait_for("definition", *ready)
    cluster.wait_for("discovery of the new kind", "get", "ibs")


class Program:
    """One of our programs, with its log."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, port: int) -> None:
        self.process = process
        self.log = log
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return self.log.read_text()

    def metric(self, name: str) -> float | None:
        """A sample without labels of its `/metrics`; None while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        return next((float(one.split()[1]) for one in lines if one.startswith(f"{name} ")), None)

    def kill(self) -> None:
        """As a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """As a person does."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextmanager
def operator(
    cluster: Cluster, folder: Path, name: str = "operator-0", **environment: str
) -> Iterator[Program]:
    """An operator with the rights of an administrator, until the block ends."""
    log, port = folder / f"{name}.log", free_port("127.0.0.1")
    own = {"POD_NAME": name, "POD_NAMESPACE": "default", "PATH": os.environ["PATH"]}
    own |= {"KUBECONFIG": str(cluster.kubeconfig)} | environment
    command = [*cluster.enter, PROGRAM, "operator", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=own, stdout=out, stderr=out)
    program = Program(process, log, port)
    try:
        yield program
    finally:
        if process.poll() is None:
            program.end()


def service(
    name: str, *, strict: int | None = None, throughput: int | None = 1, **spec: Any
) -> dict[str, Any]:
    """A small InferenceService; `None` replicas: it lacks the pool."""
    counts = {"strict": strict, "throughput": throughput}
    pools = {pool: {"replicas": count} for pool, count in counts.items() if count is not None}
    return {
        "apiVersion": SERVING,
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "builtin://smollm2-135m", "name": name}, "pools": pools} | spec,
    }


def apply(cluster: Cluster, document: Mapping[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", text=json.dumps(document))


def read(cluster: Cluster, *what: str) -> dict[str, Any]:
    """One object, or `{}` if there is none."""
    text = cluster.kubectl("get", *what, "--output=json", "--ignore-not-found")
    return dict(json.loads(text)) if text.strip() else {}


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(read(cluster, "ibs", name).get("status") or {})


def condition(cluster: Cluster, name: str, kind: str) -> dict[str, Any]:
    """The condition of that type, `{}` before there is one."""
    found = status(cluster, name).get("conditions") or ()
    return dict(next((one for one in found if one["type"] == kind), {}))


def owned(cluster: Cluster, name: str) -> set[str]:
    """`kind/name` of everything that belongs to the service, pods aside."""
    kinds = "deployments,services,configmaps,poddisruptionbudgets,controllerrevisions"
    text = cluster.kubectl(
        "get", kinds, f"--selector=serving.isobatch.dev/service={name}", "--output=name"
    )
    return set(text.split())

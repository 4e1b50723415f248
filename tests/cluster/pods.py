"""Decides how a pod runs this checkout's own code: the machine's folders, read-only, over an image
of empty ones. So the real worker, vLLM included, runs without an image being built.
"""

import sys
from pathlib import Path

from isobatch_worker.cache import default_cache_dir

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = Path(sys.prefix)
PROGRAM = str(ENVIRONMENT / "bin/isobatch")
PYTHON = str(ENVIRONMENT / "bin/python")
CACHE = "/tmp/cache"  # writable: plans are kept there
# torch asks for the user's name, and Python would write its caches beside the sources.
VARIABLES = {
    "HOME": "/tmp",
    "USER": "nonroot",
    "PYTHONDONTWRITEBYTECODE": "1",
    "ISOBATCH_CACHE_DIR": CACHE,
}


def folders() -> dict[str, Path]:
    """The machine's folders that a pod needs, by volume name."""
    found = {"usr": Path("/usr"), "environment": ENVIRONMENT, "checkout": CHECKOUT}
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        found["python"] = base
    return found


def volumes() -> list[dict[str, object]]:
    """The pod's volumes."""
    mounted: list[dict[str, object]] = [
        {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}
        for name, path in folders().items()
    ]
    if models().is_dir():
        mounted.append({"name": "models", "hostPath": {"path": str(models())}})
    return [*mounted, {"name": "tmp", "emptyDir": {}}]


def models() -> Path:
    """Models that were converted already: half a minute less for each worker."""
    return default_cache_dir() / "models"


def mounts() -> list[dict[str, object]]:
    """The container's mounts of `volumes`; parents come before what lies in them."""
    paths = sorted(folders().items(), key=lambda item: len(item[1].parts))
    mounted: list[dict[str, object]] = [
        {"name": name, "mountPath": str(path), "readOnly": True} for name, path in paths
    ]
    mounted.append({"name": "tmp", "mountPath": "/tmp"})
    if models().is_dir():
        mounted.append({"name": "models", "mountPath": f"{CACHE}/models", "readOnly": True})
    return mounted


def variables() -> list[dict[str, str]]:
    """The container's environment."""
    return [{"name": name, "value": value} for name, value in VARIABLES.items()]


def restricted() -> dict[str, object]:
    """The container's security context under the "restricted" pod security standard."""
    return {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }

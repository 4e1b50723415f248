"""Decides what the operator is told by its environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEFAULT_IMAGE = "isobatch/worker"


class SettingsInvalid(ValueError):
    """A variable that cannot be meant; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one operator goes by. No namespaces: all of them."""

    namespaces: tuple[str, ...]
    own_namespace: str
    identity: str
    worker_image: str
    pod_patch: Mapping[str, Any]
    gateway_service: str | None
    port: int = 8081
    host: str = "0.0.0.0"  # noqa: S104  # a pod's own address: its probes come from outside
    sweep_seconds: float = 600.0


def read_settings(environment: Mapping[str, str], hostname: str) -> Settings:
    """The settings in `environment`. Raises SettingsInvalid."""
    namespaces = environment.get("ISOBATCH_WATCH_NAMESPACES", "")
    gateway = environment.get("ISOBATCH_GATEWAY_SERVICE") or None
    if gateway is not None and gateway.count(".") != 1:
        raise SettingsInvalid(
            f"ISOBATCH_GATEWAY_SERVICE is {gateway!r}; write the Service as NAME.NAMESPACE"
        )
    return Settings(
        namespaces=tuple(sorted({n.strip() for n in namespaces.split(",") if n.strip()})),
        own_namespace=environment.get("POD_NAMESPACE") or "default",
        identity=environment.get("POD_NAME") or hostname,
        worker_image=environment.get("ISOBATCH_WORKER_IMAGE") or DEFAULT_IMAGE,
        pod_patch=_patch(environment.get("ISOBATCH_POD_PATCH")),
        gateway_service=gateway,
    )


def _patch(path: str | None) -> Mapping[str, Any]:
    if not path:
        return {}
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise SettingsInvalid(f"ISOBATCH_POD_PATCH {path}: {exc}") from exc
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsInvalid(f"ISOBATCH_POD_PATCH {path}: expected a part of a pod's template")
    return found

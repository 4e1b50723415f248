"""Performs the watch: kopf's events name the services that are to be looked at, and no more.

No handler writes, so that kopf sets no finalizer and keeps nothing in annotations.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import kopf

from isobatch_operator.cluster.names import GROUP, SERVICE_LABEL, Key

_OWNED = (
    ("", "v1", "pods"),
    ("", "v1", "configmaps"),
    ("", "v1", "services"),
    ("apps", "v1", "deployments"),
    ("policy", "v1", "poddisruptionbudgets"),
)


def make_registry(
    changed: Callable[[Key], None], seen: Callable[[dict[str, Any]], None]
) -> kopf.OperatorRegistry:
    """Handlers that call `changed` with a service's name, and `seen` with each resource."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator]  # kopf's types are skipped
    def log_in(**details: Any) -> Any:
        inside = kopf.login_with_service_account(**details)
        if inside is None:
            return kopf.login_with_kubeconfig(**details)
        # As the official client finds it: by address, so that a cluster's DNS may be away.
        host, port = (os.environ[f"KUBERNETES_SERVICE_{what}"] for what in ("HOST", "PORT"))
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        return dataclasses.replace(inside, server=server)

    @kopf.on.event(GROUP, "v1alpha1", "inferenceservices", registry=registry)  # type: ignore[untyped-decorator]  # as above
    def on_service(body: kopf.Body, **_: Any) -> None:
        metadata = body["metadata"]
        seen(dict(body))
        changed(Key(metadata["namespace"], metadata["name"]))

    for group, version, plural in _OWNED:

        @kopf.on.event(  # type: ignore[untyped-decorator]  # as above
            group, version, plural, labels={SERVICE_LABEL: kopf.PRESENT}, registry=registry
        )
        def on_owned(body: kopf.Body, **_: Any) -> None:
            metadata = body["metadata"]
            changed(Key(metadata["namespace"], metadata["labels"][SERVICE_LABEL]))

    return registry


def make_settings() -> kopf.OperatorSettings:
    """Kopf without what it would write, and with only our own objects over the wire."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.queueing.idle_timeout = 1.0
    for _, _, plural in _OWNED:
        settings.watching.label_selectors[plural] = SERVICE_LABEL
    return settings

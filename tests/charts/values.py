"""Decides what the values of the chart may be; `values.schema.json` is generated from it.

What Kubernetes itself checks (tolerations, affinities, volumes) is passed through as it is.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Anything = dict[str, Any]
Strings = dict[str, str]
Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Name = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)?$")]
DigestOrNone = Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Interval = Annotated[str, StringConstraints(pattern=r"^([0-9]+(ms|s|m|h))+$")]
LogLevel = Literal["debug", "info", "warning", "error"]


class Values(BaseModel):
    """A group of values: an unknown one is a spelling mistake."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class WorkerImage(Values):
    """An image; a digest wins over a tag, an empty tag is the chart's own version."""

    repository: Annotated[str, StringConstraints(min_length=1)]
    tag: str
    digest: DigestOrNone


class Image(WorkerImage):
    """An image of the release itself."""

    pull_policy: Literal["Always", "IfNotPresent", "Never"]


class SecretKey(Values):
    """A key of a Secret."""

    name: Name
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$")]


class ServiceAccount(Values):
    """The service account of a component."""

    annotations: Strings


class Component(Values):
    """What operator and gateway have in common."""

    image: Image
    replicas: Annotated[int, Field(ge=0)]
    log_level: LogLevel
    resources: Anything
    command: Annotated[list[str], Field(min_length=1)]
    env: list[Anything]
    extra_volumes: list[Anything]
    extra_volume_mounts: list[Anything]
    node_selector: Strings
    tolerations: list[Anything]
    affinity: Anything
    topology_spread_constraints: list[Anything]
    priority_class_name: Name
    pod_annotations: Strings
    pod_labels: Strings
    service_account: ServiceAccount


class Autoscaling(Values):
    """Gateways by load."""

    enabled: bool
    min: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]
    cpu_percent: Annotated[int, Field(ge=1, le=100)]


class Drain(Values):
    """How a gateway ends."""

    delay_seconds: Annotated[int, Field(ge=0)]
    timeout_seconds: Annotated[int, Field(ge=1)]


class Service(Values):
    """The Service of the gateways."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: Annotated[int, Field(ge=1, le=65535)]
    annotations: Strings


class Ingress(Values):
    """The Ingress of the gateways."""

    enabled: bool
    class_name: Name
    annotations: Strings
    host: Name
    tls_secret: Name


class Gateway(Component):
    """The gateways."""

    autoscaling: Autoscaling
    drain: Drain
    keys_secret: SecretKey
    secret: SecretKey
    database_secret: SecretKey
    service: Service
    ingress: Ingress


class Workers(Values):
    """What the operator makes."""

    image: WorkerImage
    pod_template: Anything


class Prometheus(Values):
    """Which pods are Prometheus."""

    namespace_selector: Anything
    pod_selector: Anything


class NetworkPolicy(Values):
    """Who may reach whom."""

    enabled: bool
    worker_namespaces: list[Namespace]
    gateway_from: list[Anything]
    prometheus: Prometheus


class PodMonitors(Values):
    """PodMonitors of the Prometheus operator."""

    enabled: bool
    interval: Interval
    labels: Strings


class Rules(Values):
    """The PrometheusRule."""

    enabled: bool
    labels: Strings


class Dashboards(Values):
    """The ConfigMap of Grafana's dashboards."""

    enabled: bool
    labels: Strings
    annotations: Strings


class Monitoring(Values):
    """What Prometheus and Grafana find."""

    pod_monitors: PodMonitors
    rules: Rules
    dashboards: Dashboards


class Test(Values):
    """What `helm test` asks."""

    models: list[Annotated[str, StringConstraints(min_length=1)]]
    timeout_seconds: Annotated[int, Field(ge=1)]
    key_secret: SecretKey


class Crds(Values):
    """Who installs the CRD."""

    install: bool


class PullSecret(Values):
    """A Secret with which images are pulled."""

    name: Annotated[str, StringConstraints(min_length=1)]


class ChartValues(Values):
    """All values of the chart."""

    image_pull_secrets: list[PullSecret]
    name_override: Name
    fullname_override: Name
    watch_namespaces: list[Namespace]
    crds: Crds
    operator: Component
    gateway: Gateway
    workers: Workers
    network_policy: NetworkPolicy
    monitoring: Monitoring
    test: Test
    global_: Annotated[Anything | None, Field(alias="global")] = None  # Helm's own


def schema() -> dict[str, object]:
    """The JSON schema that helm checks values by, before it renders anything."""
    made = ChartValues.model_json_schema()
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}

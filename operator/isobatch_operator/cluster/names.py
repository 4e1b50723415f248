"""Decides what the objects of a service are called, and how they are found again."""

from dataclasses import dataclass

from isobatch_contracts.tiers import PoolName

GROUP = "serving.isobatch.dev"
MANAGER = "isobatch-operator"
SERVICE_LABEL = f"{GROUP}/service"
POOL_LABEL = f"{GROUP}/pool"
REVISION_LABEL = f"{GROUP}/revision"
MANAGED_BY = "app.kubernetes.io/managed-by"
VERB_ANNOTATION = f"{GROUP}/rollout"
STABLE_ANNOTATION = f"{GROUP}/stable-revision"
FAILED_ANNOTATION = f"{GROUP}/failed-revision"
PUBLISHED_ANNOTATION = f"{GROUP}/published-at"
TABLE_KEY = "table.json"
WORKER_PORT = 8000


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which InferenceService."""

    namespace: str
    name: str

    @property
    def label(self) -> str:
        """The selector of everything that is owned."""
        return f"{SERVICE_LABEL}={self.name}"


def pool_object(service: str, pool: PoolName, revision: str) -> str:
    """The name of a revision's Deployment, Service and PodDisruptionBudget in a pool."""
    return f"{service}-{pool.value}-{revision}"


def revision_object(service: str, revision: str) -> str:
    """The name of a revision's ControllerRevision."""
    return f"{service}-{revision}"


def table_object(service: str) -> str:
    """The name of the ConfigMap with the routing table."""
    return f"{service}-routing"


def labels(service: str) -> dict[str, str]:
    """The labels of everything that is owned."""
    return {SERVICE_LABEL: service, MANAGED_BY: MANAGER}


def pool_labels(service: str, pool: PoolName, revision: str) -> dict[str, str]:
    """The labels of what a revision has in a pool: its pods too, by which they are selected."""
    return labels(service) | {POOL_LABEL: pool.value, REVISION_LABEL: revision}

"""Decides what the objects of a service mean: as the planner's `Observed`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isobatch_contracts import routing_table
from isobatch_contracts.routing_table import RoutingTable, TableRejected
from isobatch_contracts.service_status import GateStatus
from isobatch_contracts.tiers import PoolName

from isobatch_operator.cluster import names
from isobatch_operator.cluster.memory import (
    Kept,
    annotations,
    kept_revisions,
    moment,
    rollout_status,
    state_of,
)
from isobatch_operator.cluster.render import seconds_of
from isobatch_operator.observed import (
    Failure,
    Observed,
    Ready,
    Refused,
    Replica,
    ReplicaState,
    Slot,
    Starting,
    Stopping,
    Unready,
)
from isobatch_operator.readiness import Answers, NotYet, Probe, Refuses
from isobatch_operator.rollout import Outcome, Verb

Object = Mapping[str, Any]
_STOPPING_ORDINAL = 1_000_000  # such a pod fills no slot that anybody wants
_STUCK_SECONDS = 60.0
_STUCK = ("ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "CreateContainerError")
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True, slots=True)
class Owned:
    """The objects of one service, as the API gives them."""

    pods: tuple[Object, ...] = ()
    deployments: tuple[Object, ...] = ()
    services: tuple[Object, ...] = ()
    budgets: tuple[Object, ...] = ()
    revisions: tuple[Object, ...] = ()
    config: Object | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """What gateways and workers say themselves: probes by pod uid, and the gates' outcome."""

    probes: Mapping[str, Probe] = field(default_factory=dict)
    acknowledged: int | None = None
    outcome: Outcome = Outcome.PASS
    outcome_message: str = ""
    gates: tuple[GateStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of ours."""

    pool: PoolName
    revision: str
    raw: Object

    @property
    def uid(self) -> str:
        """What no other pod has."""
        return str(self.raw["metadata"]["uid"])

    @property
    def address(self) -> str | None:
        """Where it listens, once it has an address."""
        address = self.raw.get("status", {}).get("podIP")
        if address is None:
            return None
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{names.WORKER_PORT}"

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end."""
        return "deletionTimestamp" in self.raw["metadata"]

    @property
    def created_at(self) -> float:
        """In seconds since the epoch."""
        return seconds_of(self.raw["metadata"]["creationTimestamp"]) or 0.0

    @property
    def ready_since(self) -> float | None:
        """Since when the kubelet finds it ready; None if it does not."""
        return self._transition("True")

    @property
    def unready_since(self) -> float | None:
        """Since when it is not."""
        return self._transition("False")

    @property
    def container(self) -> Object:
        """The status of the worker's container, as far as there is one."""
        for status in self.raw.get("status", {}).get("containerStatuses") or ():
            return status  # type: ignore[no-any-return]  # the API's JSON
        return {}

    def _transition(self, status: str) -> float | None:
        for condition in self.raw.get("status", {}).get("conditions") or ():
            if condition["type"] == "Ready" and condition["status"] == status:
                return seconds_of(condition.get("lastTransitionTime")) or self.created_at
        return None


def our_pods(raw: tuple[Object, ...]) -> tuple[Pod, ...]:
    """The pods with our labels that have not ended: those that ended are nobody's replica."""
    found = []
    for item in raw:
        labels = item["metadata"].get("labels") or {}
        phase = item.get("status", {}).get("phase")
        if phase in ("Succeeded", "Failed"):
            continue
        try:
            pool = PoolName(labels[names.POOL_LABEL])
            found.append(Pod(pool, labels[names.REVISION_LABEL], item))
        except (KeyError, ValueError):
            continue
    return tuple(found)


def published_table(config: Object | None) -> RoutingTable | None:
    """The table that gateways read now; one that cannot be read is published anew."""
    text = ((config or {}).get("data") or {}).get(names.TABLE_KEY)
    if text is None:
        return None
    try:
        return routing_table.load(text)
    except TableRejected:
        return None


def verb_of(resource: Object) -> Verb | None:
    """What a person asks for by the annotation; a word that is no verb is none."""
    word = annotations(resource).get(names.VERB_ANNOTATION)
    return Verb(word) if word in set(Verb) else None


def observe(
    resource: Object, owned: Owned, heard: Heard, now: float
) -> tuple[Observed, dict[str, Kept]]:
    """What is there of `resource`'s service, and its kept revisions."""
    table = published_table(owned.config)
    published_at = moment(owned.config, names.PUBLISHED_ANNOTATION) or 0.0
    kept = kept_revisions(owned.revisions)
    weighted = {(e.pool, e.name) for e in table.revisions if e.weight} if table else set()
    is_heard = table is None or heard.acknowledged is None or heard.acknowledged >= table.version
    published = {(e.pool, e.name): e.fingerprint for e in table.revisions} if table else {}
    replicas, failures = [], {}
    for slot, pod in slots(our_pods(owned.pods)).items():
        # Nobody is drained before the gateways have the table that leaves it out.
        unrouted = (pod.pool, pod.revision) not in weighted and is_heard
        replicas.append(
            Replica(
                slot=slot,
                url=pod.address or "",
                state=_state(
                    pod, heard.probes.get(pod.uid), published.get((pod.pool, pod.revision)), now
                ),
                unrouted_since=published_at if unrouted else None,
            )
        )
        failed = _failures(pod, now)
        if failed:
            failures[slot] = failed
    observed = Observed(
        replicas=tuple(replicas),
        failures=failures,
        rollout=state_of(rollout_status(resource), annotations(owned.config)),
        revisions={name: one.revision for name, one in kept.items()},
        table=table,
        published_at=published_at,
        acknowledged=heard.acknowledged,
        verb=verb_of(resource),
        outcome=heard.outcome,
        outcome_message=heard.outcome_message,
    )
    return observed, kept


def slots(pods: tuple[Pod, ...]) -> dict[Slot, Pod]:
    """A slot for each pod, in the order in which a Deployment keeps them: the ready, then the old.

    Those that were told to end have slots that nobody asks for.
    """
    ordered = sorted(pods, key=lambda p: (p.ready_since is None, p.created_at, p.uid))
    counts: dict[tuple[PoolName, str, bool], int] = {}
    found = {}
    for pod in ordered:
        group = (pod.pool, pod.revision, pod.is_stopping)
        ordinal = counts[group] = counts.get(group, -1) + 1
        offset = _STOPPING_ORDINAL if pod.is_stopping else 0
        found[Slot(pod.pool, pod.revision, ordinal + offset)] = pod
    return found


def _state(pod: Pod, probe: Probe | None, published: str | None, now: float) -> ReplicaState:
    """How `pod` does. One that its kubelet finds ready and we cannot ask has what is `published`.

    Gateways look for themselves at each connection, and our own network must not end a pool.
    """
    if pod.is_stopping:
        return Stopping(seconds_of(pod.raw["metadata"]["deletionTimestamp"]) or now)
    if isinstance(probe, Refuses):
        return Refused(pod.created_at, probe.reason)
    ready_since = pod.ready_since
    if ready_since is not None:
        match probe:
            case Answers(fingerprint, requests):
                return Ready(ready_since, fingerprint, requests)
            case _ if pod.pool is PoolName.STRICT and published is not None:
                return Ready(ready_since, published)
            case _ if pod.pool is PoolName.STRICT:
                return Starting(pod.created_at, "waits for its fingerprint")
            case _:
                return Ready(ready_since)
    if pod.container.get("started"):
        return Unready(pod.unready_since or now, "the readiness probe fails")
    waiting = (pod.container.get("state") or {}).get("waiting") or {}
    detail = waiting.get("reason", "")
    if not detail and isinstance(probe, NotYet):
        detail = probe.reason
    return Starting(pod.created_at, detail)


def _failures(pod: Pod, now: float) -> tuple[Failure, ...]:
    """The ends of the pod's container that nobody asked for, and what keeps it from starting."""
    status = pod.container
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason = waiting.get("reason", "")
    text = f"{reason}: {waiting.get('message', '')}"[:300]
    if reason in _HOPELESS:
        return (Failure(now, 0.0, text, is_permanent=True),)
    if reason in _STUCK and now - pod.created_at >= _STUCK_SECONDS:
        return (Failure(now, 0.0, text, is_permanent=True),)
    count = int(status.get("restartCount", 0))
    current, last = status.get("state") or {}, status.get("lastState") or {}
    ended = current.get("terminated") or last.get("terminated")
    if ended is None or pod.is_stopping:
        return ()
    if "terminated" in current:
        count += 1
    at = seconds_of(ended.get("finishedAt")) or now
    lived = at - (seconds_of(ended.get("startedAt")) or at)
    why = f"the container ended with code {ended.get('exitCode')} ({ended.get('reason', '')})"
    # The API keeps the last end alone; how many there were is in its count.
    return tuple(Failure(at, lived, why) for _ in range(min(count, 16)))

"""Performs the life of one InferenceService: reads all of it, decides, and carries that out.

Nothing is remembered from look to look but what saves work: fingerprints by pod, windows of gates.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog
from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName

from isobatch_operator import analysis
from isobatch_operator.cluster import names, render
from isobatch_operator.cluster.api import SERVING, Api
from isobatch_operator.cluster.conditions import Event, refused_document
from isobatch_operator.cluster.errors import ClusterError, Conflict, Refused
from isobatch_operator.cluster.events import Recorder
from isobatch_operator.cluster.gateways import Gateways, acknowledged
from isobatch_operator.cluster.memory import rollout_status, state_of
from isobatch_operator.cluster.names import Key
from isobatch_operator.cluster.observe import Heard, Owned, Pod, our_pods, published_table
from isobatch_operator.cluster.step import Step, Workers, decide, parse
from isobatch_operator.local.observe import probe_worker
from isobatch_operator.readiness import Answers, Probe
from isobatch_operator.rollout import Verb

Object = dict[str, Any]
_AFTER_TROUBLE_SECONDS = 1.0
_STALE_SECONDS = 0.4  # that one answer of the gateways serves several services


class NotLeading(Exception):
    """Another operator acts now: whatever was decided is not carried out."""


@dataclass(slots=True)
class _Remembered:
    """What saves work for one service. Mutable: it follows the looks."""

    certified: dict[str, Answers] = field(default_factory=dict)  # by container
    window: analysis.Window = field(default_factory=analysis.Window)


class Reconciler:
    """Reconciles services one by one; the caller sees that none is done twice at a time."""

    def __init__(
        self,
        api: Api,
        client: httpx.AsyncClient,
        gateways: Gateways,
        workers: Workers,
        may_act: Callable[[], bool],
    ) -> None:
        """`may_act` is asked before every change."""
        self._api = api
        self._client = client
        self._gateways = gateways
        self._workers = workers
        self._may_act = may_act
        self._recorder = Recorder(api)
        self._remembered: dict[Key, _Remembered] = {}
        self._log = structlog.get_logger("isobatch.operator")
        self.served_names: dict[Key, tuple[str, str, str]] = {}  # name, creation, uid
        self.phases: dict[Key, str] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Bring `key` a step further; seconds until it should be looked at again, if at all."""
        resource = await self._api.get(SERVING, "InferenceService", key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self.forget(key)
            return None
        service = parse(resource, self._workers)
        if isinstance(service, str):
            await self._refuse(resource, Event("Invalid", service, is_warning=True))
            return None
        conflict = self._conflict(key, service, resource)
        if conflict is not None:
            await self._refuse(resource, Event("NameConflict", conflict, is_warning=True))
            return 30.0
        owned = await self._owned(key)
        heard = await self._hear(key, service, resource, owned)
        step = decide(service, resource, owned, heard, self._workers, time.time())
        self.phases[key] = step.status["rollout"]["phase"]
        try:
            await self._carry_out(key, resource, step)
        except Conflict:
            return 0.0  # somebody was quicker: decide on what there is now
        except Refused as exc:
            # Said once more at each look; a person or a later spec has to mend it.
            await self._refuse(resource, Event("Rejected", str(exc)[:900], is_warning=True))
            return 30.0
        return step.look_again

    def forget(self, key: Key) -> None:
        """Nothing is left of `key`: what it owned goes by its owner references."""
        self._remembered.pop(key, None)
        self.served_names.pop(key, None)
        self.phases.pop(key, None)

    def claim(self, resource: Object) -> None:
        """Note which name `resource` wants to be served by."""
        metadata = resource["metadata"]
        model = (resource.get("spec") or {}).get("model")
        name = model.get("name") if isinstance(model, dict) else None
        self.served_names[Key(metadata["namespace"], metadata["name"])] = (
            str(name or metadata["name"]),
            str(metadata["creationTimestamp"]),
            str(metadata["uid"]),
        )

    def _conflict(self, key: Key, service: InferenceService, resource: Object) -> str | None:
        """Who has the served name already; the oldest keeps it."""
        self.claim(resource)
        mine = self.served_names[key]
        for other, theirs in self.served_names.items():
            if other != key and theirs[0] == mine[0] and theirs[1:] < mine[1:]:
                return (
                    f"the name {service.served_name!r} is served by {other.namespace}/{other.name},"
                    " which is older: set another spec.model.name"
                )
        return None

    async def _owned(self, key: Key) -> Owned:
        kinds = (
            ("v1", "Pod"),
            ("apps/v1", "Deployment"),
            ("v1", "Service"),
            ("policy/v1", "PodDisruptionBudget"),
            ("apps/v1", "ControllerRevision"),
        )
        found, config = await asyncio.gather(
            asyncio.gather(*(self._api.every(v, k, key.namespace, key.label) for v, k in kinds)),
            self._api.get("v1", "ConfigMap", Key(key.namespace, names.table_object(key.name))),
        )
        pods, deployments, services, budgets, revisions = found
        return Owned(pods, deployments, services, budgets, revisions, config)

    async def _hear(
        self, key: Key, service: InferenceService, resource: Object, owned: Owned
    ) -> Heard:
        """Ask workers and gateways."""
        kept = self._remembered.setdefault(key, _Remembered())
        pods = [pod for pod in our_pods(owned.pods) if not pod.is_stopping]
        table = published_table(owned.config)
        routed = {(e.pool, e.name) for e in table.revisions if e.weight} if table else set()
        asked = [
            p for p in pods if _is_to_be_asked(p, kept, is_routed=(p.pool, p.revision) in routed)
        ]
        now = asyncio.get_running_loop().time()
        probes, reports = await asyncio.gather(
            asyncio.gather(*(self._probe(pod, service) for pod in asked)),
            self._gateways.look(now - _STALE_SECONDS),
        )
        said = dict(zip([p.uid for p in asked], probes, strict=True))
        for pod in pods:
            answer = said.get(pod.uid)
            if isinstance(answer, Answers) and pod.pool is PoolName.STRICT:
                kept.certified[_container_id(pod)] = answer
            known = kept.certified.get(_container_id(pod))
            if answer is None and known is not None:
                said[pod.uid] = known
        alive = {_container_id(pod) for pod in pods}
        kept.certified = {one: a for one, a in kept.certified.items() if one in alive}
        model = table.model if table is not None else service.served_name
        state = state_of(rollout_status(resource), {})
        kept.window, verdict = analysis.judged(
            kept.window, service.spec.rollout, state, reports, model
        )
        return Heard(
            probes={uid: probe for uid, probe in said.items() if probe is not None},
            acknowledged=acknowledged(reports, model),
            outcome=verdict.outcome,
            outcome_message=verdict.message,
            gates=verdict.gates,
        )

    async def _probe(self, pod: Pod, service: InferenceService) -> Probe | None:
        if pod.address is None:
            return None
        # A pod of another revision may serve another name; only its own numerics and load matter.
        name = service.served_name
        return await probe_worker(self._client, pod.address, pod.pool, name, None)

    async def _carry_out(self, key: Key, resource: Object, step: Step) -> None:
        """In an order that a crash between any two leaves sound: the state before its effects."""
        for item in step.revisions:
            self._require_lead()
            try:
                await self._api.create(item)
            except Conflict:
                # Of that name there is one already: the next look sees it.
                self._log.info("revision is there", service=str(key))
        before = state_of(rollout_status(resource), {})
        if not render.contains(resource.get("status"), step.status) or _has_more(
            resource, step.status
        ):
            self._require_lead()
            resource = await self._say(resource, step.status)
        for item in step.objects:
            self._require_lead()
            await self._api.apply(item)
        for old in step.removals:
            self._require_lead()
            await self._api.delete(old)
        await self._take_verb(resource)
        if before.stable is not None or step.plan.rollout.stable is not None:
            for event in step.events:
                self._log.info(
                    event.reason, service=f"{key.namespace}/{key.name}", message=event.message[:500]
                )
                await self._recorder.record(resource, event)

    async def _say(self, resource: Object, status: Object) -> Object:
        """Write the status, unless the resource has changed since it was read."""
        metadata = resource["metadata"]
        return await self._api.apply(
            {
                "apiVersion": resource["apiVersion"],
                "kind": resource["kind"],
                "metadata": {
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "resourceVersion": metadata["resourceVersion"],
                },
                "status": status,
            },
            is_status=True,
        )

    async def _take_verb(self, resource: Object) -> None:
        """Remove the verb that was carried out, unless it is another one by now."""
        found = (resource["metadata"].get("annotations") or {}).get(names.VERB_ANNOTATION)
        if found is None:
            return
        self._require_lead()
        place = "/metadata/annotations/" + names.VERB_ANNOTATION.replace("/", "~1")
        try:
            await self._api.patch(
                resource,
                [
                    {"op": "test", "path": place, "value": found},
                    {"op": "remove", "path": place},
                ],
            )
        except (Conflict, Refused):
            return  # it has changed: the next look takes the new one
        if found not in set(Verb):
            known = ", ".join(Verb)
            text = f"there is no verb {found[:60]!r}: it is one of {known}"
            await self._recorder.record(resource, Event("UnknownVerb", text, is_warning=True))

    async def _refuse(self, resource: Object, event: Event) -> None:
        """Say why nothing is done for `resource`; what it has keeps running."""
        kept = (resource.get("status") or {}).get("rollout")
        status = refused_document(resource, event.reason, event.message, time.time(), kept)
        self._require_lead()
        try:
            if not render.contains(resource.get("status"), status):
                await self._say(resource, status)
                await self._recorder.record(resource, event)
        except ClusterError as exc:
            self._log.warning("status not written", problem=str(exc)[:500])

    def _require_lead(self) -> None:
        if not self._may_act():
            raise NotLeading


def _is_to_be_asked(pod: Pod, kept: _Remembered, *, is_routed: bool) -> bool:
    """Whether only the worker itself knows what we need: its fingerprint, or if it is idle."""
    if pod.address is None or "running" not in (pod.container.get("state") or {}):
        return False
    if pod.pool is PoolName.STRICT and _container_id(pod) not in kept.certified:
        return True
    return not is_routed and pod.ready_since is not None


def _container_id(pod: Pod) -> str:
    """What changes when another process may answer."""
    return f"{pod.uid}/{pod.container.get('restartCount', 0)}"


def _has_more(resource: Object, status: Object) -> bool:
    """Whether the status that is there says something that no longer holds."""
    there = resource.get("status") or {}
    rollout = there.get("rollout") or {}
    return bool(set(there) - set(status) - {"url"}) or bool(set(rollout) - set(status["rollout"]))

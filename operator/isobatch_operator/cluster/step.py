"""Decides what to do for one InferenceService from all that is seen of it: the plan, as objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName
from pydantic import ValidationError

from isobatch_operator.cluster import names, render
from isobatch_operator.cluster.conditions import Event, events, status_document
from isobatch_operator.cluster.memory import Kept
from isobatch_operator.cluster.names import Key
from isobatch_operator.cluster.observe import Heard, Owned, observe, our_pods
from isobatch_operator.cluster.pod_template import pod_template
from isobatch_operator.observed import Observed, Stopping
from isobatch_operator.plan import Plan, Policy, PublishTable, StartReplica, StopReplica, plan
from isobatch_operator.revision import Revision
from isobatch_operator.rollout import Stage

Object = dict[str, Any]
_FOREVER = float("inf")
_SOON_SECONDS, _LATER_SECONDS = 0.5, 5.0


@dataclass(frozen=True, slots=True)
class Workers:
    """What every worker's pod has, unless its service says otherwise."""

    image: str
    template: Mapping[str, Any] = field(default_factory=dict)
    revisions_kept: int = 10


@dataclass(frozen=True, slots=True)
class Step:
    """What to do, in this order: keep revisions, say the status, apply objects, remove objects.

    `look_again`: seconds until something may have changed that no event tells; None: never.
    """

    plan: Plan
    status: Object
    revisions: tuple[Object, ...]
    objects: tuple[Object, ...]
    removals: tuple[Mapping[str, Any], ...]
    events: tuple[Event, ...]
    look_again: float | None


def parse(resource: Mapping[str, Any], workers: Workers) -> InferenceService | str:
    """The service that `resource` asks for, each pool with its image; or what is wrong with it."""
    metadata = resource["metadata"]
    try:
        service = InferenceService.model_validate(
            {
                "apiVersion": resource.get("apiVersion"),
                "kind": resource.get("kind"),
                "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
                "spec": resource.get("spec"),
            }
        )
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return _with_image(service, workers.image)


def _with_image(service: InferenceService, image: str) -> InferenceService:
    """`service`, with the image that its pods get: another default image is another revision."""
    pools = service.spec.pools
    changed = {
        name: pool.model_copy(update={"runtime": pool.runtime.model_copy(update={"image": image})})
        for name, pool in (("strict", pools.strict), ("throughput", pools.throughput))
        if pool is not None and pool.runtime.image is None
    }
    spec = service.spec.model_copy(update={"pools": pools.model_copy(update=changed)})
    return service.model_copy(update={"spec": spec})


def decide(
    service: InferenceService,
    resource: Object,
    owned: Owned,
    heard: Heard,
    workers: Workers,
    now: float,
) -> Step:
    """The step from what is seen to what should be. The same twice is the same as once."""
    key = Key(resource["metadata"]["namespace"], resource["metadata"]["name"])
    observed, kept = observe(resource, owned, heard, now)
    policy = Policy(
        # A pod that fails is started again by its kubelet, and ended by its probes.
        start_deadline_seconds=_FOREVER,
        unready_deadline_seconds=_FOREVER,
        drain_deadline_seconds=10.0,  # the worker's own end waits for what it still answers
        service_name=partial(names.pool_object, key.name),
    )
    step = plan(service, observed, now, policy)
    owner = render.owner_reference(resource)
    new = _new_revisions(key, step, kept, workers, owner)
    templates = {name: one.templates for name, one in kept.items()} | {
        revision.name: made for revision, made, _ in new
    }
    return Step(
        plan=step,
        status=status_document(service, resource, step, heard, now),
        revisions=tuple(item for _, _, item in new),
        objects=(
            *_table(key, step, observed, owned, owner, now),
            *_pools(key, step, owned, templates, owner),
        ),
        removals=(
            *_surplus(key, step, owned),
            *_forgotten(step, observed, owned, kept, workers),
        ),
        events=events(observed.rollout, step.rollout),
        look_again=_look_again(step, observed, heard),
    )


def _look_again(step: Plan, observed: Observed, heard: Heard) -> float | None:
    is_moving = step.rollout.stage in (Stage.MOVING, Stage.ROLLING_BACK)
    is_heard = heard.acknowledged is None or heard.acknowledged >= step.table.version
    is_draining = any(
        replica.slot.ordinal >= step.wanted.get(replica.slot.pool, {}).get(replica.slot.revision, 0)
        and not isinstance(replica.state, Stopping)
        for replica in observed.replicas
    )
    if is_moving or is_draining or step.rollout != observed.rollout or not is_heard:
        return _SOON_SECONDS
    is_quiet = step.status.is_ready and not step.actions
    return None if is_quiet else _LATER_SECONDS


def _new_revisions(
    key: Key, step: Plan, kept: Mapping[str, Kept], workers: Workers, owner: Object
) -> tuple[tuple[Revision, dict[PoolName, Object], Object], ...]:
    number = max((one.number for one in kept.values()), default=0)
    found = []
    for name, revision in step.revisions.items():
        if name in kept:
            continue
        number += 1
        templates = {
            pool: pod_template(key.name, pool, revision, workers.image, workers.template)
            for pool in revision.pools
        }
        item = render.controller_revision(key, revision, templates, number, owner)
        found.append((revision, templates, item))
    return tuple(found)


def _table(
    key: Key, step: Plan, observed: Observed, owned: Owned, owner: Object, now: float
) -> tuple[Object, ...]:
    is_new = any(isinstance(action, PublishTable) for action in step.actions)
    remembered = {
        names.STABLE_ANNOTATION: step.rollout.stable,
        names.FAILED_ANNOTATION: step.rollout.failed,
    }
    at = now if is_new else observed.published_at
    config = render.table_config(key, step.table, at, remembered, owner)
    found = owned.config
    is_same = found is not None and render.contains(found, config)
    stale = found is not None and any(
        name in (found["metadata"].get("annotations") or {})
        for name, value in remembered.items()
        if value is None
    )
    return () if is_same and not stale else (config,)


def _pools(
    key: Key,
    step: Plan,
    owned: Owned,
    templates: Mapping[str, Mapping[PoolName, Object]],
    owner: Object,
) -> tuple[Object, ...]:
    """The objects of pools that differ from what is there."""
    there = {
        (item["kind"], item["metadata"]["name"]): item
        for item in (*owned.deployments, *owned.services, *owned.budgets)
    }
    found: list[Object] = []
    for (pool, revision), count in replica_counts(step, owned).items():
        template = templates.get(revision, {}).get(pool)
        if template is None:
            continue
        for item in render.pool_objects(key, pool, revision, template, count, owner):
            seen = there.get((item["kind"], item["metadata"]["name"]))
            if seen is None or not render.contains(seen, item):
                found.append(item)
    return tuple(found)


def replica_counts(step: Plan, owned: Owned) -> dict[tuple[PoolName, str], int]:
    """Replicas that each Deployment should have now.

    Within a revision that is wanted, fewer are had at once: their Service lets go of a pod that
    ends, and the pod waits for its answers. A revision that is left is ended as the plan drains it.
    """
    live: dict[tuple[PoolName, str], int] = {}
    for pod in our_pods(owned.pods):
        if not pod.is_stopping:
            live[pod.pool, pod.revision] = live.get((pod.pool, pod.revision), 0) + 1
    change: dict[tuple[PoolName, str], int] = {}
    for action in step.actions:
        match action:
            case StartReplica(slot):
                group, by = (slot.pool, slot.revision), 1
            case StopReplica(slot):
                group, by = (slot.pool, slot.revision), -1
            case PublishTable():
                continue
        change[group] = change.get(group, 0) + by
    wanted = {
        (pool, name): count
        for pool, counts in step.wanted.items()
        for name, count in counts.items()
        if pool in step.revisions[name].pools
    }
    counts = {}
    for group in {**wanted, **live, **dict.fromkeys(_deployed(owned), 0)}:
        have = live.get(group, 0)
        want = wanted.get(group, 0)
        if want == 0:
            counts[group] = max(0, have + change.get(group, 0))
        else:
            counts[group] = min(want, have + max(0, change.get(group, 0)))
    return counts


def _deployed(owned: Owned) -> list[tuple[PoolName, str]]:
    found = []
    for item in owned.deployments:
        labels = item["metadata"].get("labels") or {}
        if labels.get(names.POOL_LABEL) in set(PoolName) and names.REVISION_LABEL in labels:
            found.append((PoolName(labels[names.POOL_LABEL]), labels[names.REVISION_LABEL]))
    return found


def _surplus(key: Key, step: Plan, owned: Owned) -> tuple[Mapping[str, Any], ...]:
    """What belongs to revisions that are neither wanted nor have a pod left."""
    used = {(pod.pool, pod.revision) for pod in our_pods(owned.pods)}
    used |= {(pool, n) for pool, counts in step.wanted.items() for n, c in counts.items() if c}
    kept = {names.pool_object(key.name, pool, revision) for pool, revision in used}
    return tuple(
        item
        for item in (*owned.deployments, *owned.services, *owned.budgets)
        if item["metadata"]["name"] not in kept
        and names.REVISION_LABEL in (item["metadata"].get("labels") or {})
    )


def _forgotten(
    step: Plan, observed: Observed, owned: Owned, kept: Mapping[str, Kept], workers: Workers
) -> tuple[Mapping[str, Any], ...]:
    """The oldest revisions that nothing uses, beyond those that are kept to go back to."""
    used = {*step.revisions, step.rollout.failed, observed.rollout.canary}
    used |= {pod.revision for pod in our_pods(owned.pods)}
    old = sorted(
        (one for name, one in kept.items() if name not in used),
        key=lambda one: one.number,
        reverse=True,
    )
    surplus = {one.object_name for one in old[workers.revisions_kept :]}
    return tuple(item for item in owned.revisions if item["metadata"]["name"] in surplus)

"""Decides the status of an InferenceService, and which events a change of it is worth."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName

from isobatch_operator.cluster import names
from isobatch_operator.cluster.memory import status_of
from isobatch_operator.cluster.observe import Heard
from isobatch_operator.cluster.render import timestamp
from isobatch_operator.plan import Plan
from isobatch_operator.rollout import RolloutState, Stage

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """One condition before it is known since when it holds."""

    type: str
    is_true: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a service, for `kubectl describe`."""

    reason: str
    message: str
    is_warning: bool = False


def status_document(
    service: InferenceService,
    resource: Object,
    step: Plan,
    heard: Heard,
    now: float,
) -> dict[str, Any]:
    """The whole status, as it should be now."""
    revision = step.rollout.stable or step.status.revision
    throughput = next((p for p in step.status.pools if p.name is PoolName.THROUGHPUT), None)
    selector = {**names.labels(service.metadata.name), names.POOL_LABEL: "throughput"}
    generation = resource["metadata"].get("generation")
    routing = {
        "version": step.status.table_version,
        "checksum": step.status.table_checksum,
        "acknowledged": heard.acknowledged,
    }
    return {
        "observedGeneration": generation,
        "conditions": dated(_conditions(step, revision), resource, now),
        "pools": [
            {
                "name": pool.name.value,
                "desired": pool.desired,
                "ready": pool.ready,
                "certified": pool.certified,
                "fingerprints": list(pool.fingerprints),
            }
            for pool in step.status.pools
        ],
        "throughput": {
            "replicas": 0 if throughput is None else throughput.ready,
            "selector": ",".join(f"{key}={value}" for key, value in sorted(selector.items())),
        },
        "rollout": status_of(step.rollout, service.spec.rollout, heard.gates),
        "routing": {key: value for key, value in routing.items() if value is not None},
    }


def refused_document(
    resource: Object, reason: str, message: str, now: float, rollout: Object | None
) -> dict[str, Any]:
    """The status of a resource that is not acted upon; what was remembered stays."""
    said = (
        Said("Ready", is_true=False, reason=reason, message=message),
        Said("Degraded", is_true=True, reason=reason, message=message),
    )
    document: dict[str, Any] = {
        "observedGeneration": resource["metadata"].get("generation"),
        "conditions": dated(said, resource, now),
    }
    return document if rollout is None else document | {"rollout": dict(rollout)}


def dated(said: tuple[Said, ...], resource: Object, now: float) -> list[dict[str, Any]]:
    """The conditions with the time since which each holds."""
    known = {one["type"]: one for one in (resource.get("status") or {}).get("conditions") or ()}
    found = []
    for one in said:
        status = "True" if one.is_true else "False"
        before = known.get(one.type, {})
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        found.append(
            {
                "type": one.type,
                "status": status,
                "reason": one.reason,
                "message": one.message[:1000],
                "lastTransitionTime": since or timestamp(now),
                "observedGeneration": resource["metadata"].get("generation"),
            }
        )
    return found


def _conditions(step: Plan, revision: str) -> tuple[Said, ...]:
    status, state = step.status, step.rollout
    blocked = next(
        (
            f"{r.slot.name}: {r.health.blocked}"
            for p in status.pools
            for r in p.replicas
            if r.health.blocked
        ),
        None,
    )
    is_moving = state.stage in (Stage.MOVING, Stage.ROLLING_BACK)
    short = [
        f"{p.name.value}: {p.ready} of {p.desired} ready" for p in status.pools if not p.is_ready
    ]
    is_ready = not short and not is_moving and state.stage is not Stage.FAILED
    if state.stage is Stage.FAILED:
        ready = Said("Ready", is_ready, "RolloutFailed", state.message)
    elif is_moving:
        ready = Said("Ready", is_ready, "RollingOut", _where(state))
    elif short:
        ready = Said("Ready", is_ready, "PoolsNotReady", blocked or "; ".join(short))
    else:
        ready = Said("Ready", is_ready, "AsSpecified", f"revision {revision} is served")
    is_degraded = state.stage is Stage.FAILED or blocked is not None
    why = state.reason if state.stage is Stage.FAILED and state.reason else "ReplicasFail"
    conditions = [
        ready,
        Said("Servable", status.is_servable, "Routed" if status.is_servable else "NobodyReady"),
        Said(
            "Progressing",
            is_moving or bool(short),
            (state.reason or "RollingOut") if is_moving else "PoolsStart" if short else "Settled",
            _where(state) if is_moving else "",
        ),
        Said(
            "Degraded",
            is_degraded,
            why if is_degraded else "Healthy",
            (state.message or blocked or "") if is_degraded else "",
        ),
    ]
    strict = next((p for p in status.pools if p.name is PoolName.STRICT), None)
    if strict is not None:
        holds = strict.certified >= strict.desired
        text = "" if holds else f"{strict.certified} of {strict.desired} certified"
        conditions.append(
            Said("StrictCertified", holds, "Certified" if holds else "NotCertified", text)
        )
    return tuple(conditions)


def _where(state: RolloutState) -> str:
    text = f"{state.stable} to {state.canary}: step {state.step + 1}, weight {state.weight}"
    return f"{text}; {state.message}" if state.message else text


def events(before: RolloutState, after: RolloutState) -> tuple[Event, ...]:
    """What a person wants to read of the way from `before` to `after`."""
    found = []
    if after.stage is Stage.MOVING and before.canary != after.canary:
        found.append(Event("RolloutStarted", f"from {after.stable} to {after.canary}"))
    if after.stage is Stage.MOVING and after.weight != before.weight and after.weight:
        found.append(Event("WeightRaised", f"{after.canary} may have {after.weight} %"))
    if after.pause is not None and after.pause is not before.pause:
        found.append(Event("RolloutPaused", f"{after.pause.value}: {after.message}"))
    if after.stage is Stage.ROLLING_BACK and before.stage is not Stage.ROLLING_BACK:
        text = f"{before.canary or after.canary}: {after.reason}: {after.message}"
        found.append(Event("RollingBack", text, is_warning=True))
    if after.stable != before.stable and after.stable is not None:
        found.append(Event("Promoted", f"{after.stable} is stable"))
    return tuple(found)

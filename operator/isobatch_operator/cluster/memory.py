"""Decides how what a plan gives back is kept: its state in the status, its revisions as objects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isobatch_contracts.resource import Hardware, Model, Runtime
from isobatch_contracts.service_status import GateStatus, RolloutStatus
from isobatch_contracts.steering import Rollout
from isobatch_contracts.tiers import PoolName
from pydantic import ValidationError

from isobatch_operator.cluster.names import FAILED_ANNOTATION, REVISION_LABEL, STABLE_ANNOTATION
from isobatch_operator.cluster.render import seconds_of, timestamp
from isobatch_operator.revision import Revision, Template
from isobatch_operator.rollout import Pause, RolloutState, Stage, Verb

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """One revision as it is kept: its text, its pods' templates, and its place in the history."""

    revision: Revision
    templates: Mapping[PoolName, dict[str, Any]]
    number: int
    object_name: str


def kept_revisions(objects: Iterable[Object]) -> dict[str, Kept]:
    """The revisions in ControllerRevisions, by name. What is none of ours is none."""
    found = {}
    for item in objects:
        kept = _kept(item)
        if kept is not None:
            found[kept.revision.name] = kept
    return found


def _kept(item: Object) -> Kept | None:
    metadata, data = item["metadata"], item.get("data") or {}
    try:
        revision = Revision(
            name=metadata["labels"][REVISION_LABEL],
            served_name=data["servedName"],
            model=Model.model_validate(data["model"]),
            pools={
                PoolName(pool): Template(
                    Runtime.model_validate(one["runtime"]), Hardware.model_validate(one["hardware"])
                )
                for pool, one in data["pools"].items()
            },
        )
        templates = {PoolName(pool): one["template"] for pool, one in data["pools"].items()}
    except (KeyError, TypeError, AttributeError, ValidationError, ValueError):
        return None
    return Kept(revision, templates, int(item.get("revision", 0)), metadata["name"])


def state_of(status: RolloutStatus | None, table_annotations: Mapping[str, str]) -> RolloutState:
    """What is remembered; where the status was lost, what the published table says of it."""
    if status is None:
        stable = table_annotations.get(STABLE_ANNOTATION)
        failed = table_annotations.get(FAILED_ANNOTATION)
        if stable is None:
            return RolloutState()
        if failed is None:
            return RolloutState(stable=stable)
        return RolloutState(stage=Stage.FAILED, stable=stable, failed=failed, reason="Failed")
    return RolloutState(
        stage=Stage(status.stage),
        stable=status.stable_revision,
        canary=status.canary_revision,
        step=status.step,
        weight=status.weight,
        started_at=_seconds(status.started_at),
        since=_seconds(status.phase_started_at),
        reached_at=None if status.reached_at is None else status.reached_at.timestamp(),
        pause=None if status.paused_by is None else Pause(status.paused_by),
        paused_at=_seconds(status.paused_at),
        failed=status.failed_revision,
        fingerprint=status.stable_fingerprint,
        is_fingerprint_allowed=status.is_fingerprint_allowed,
        is_forced=status.is_forced,
        reason=status.reason or "",
        message=status.message or "",
        taken=None if status.taken_verb is None else Verb(status.taken_verb),
    )


def _seconds(moment: Any) -> float:
    return 0.0 if moment is None else float(moment.timestamp())


def status_of(
    state: RolloutState, rollout: Rollout, gates: tuple[GateStatus, ...]
) -> dict[str, Any]:
    """The status's part of `state`; absent is what says nothing."""
    document = {
        "phase": state.phase(rollout).value,
        "stage": state.stage.value,
        "stableRevision": state.stable,
        "canaryRevision": state.canary,
        "failedRevision": state.failed,
        "step": state.step,
        "weight": state.weight,
        "startedAt": timestamp(state.started_at) if state.started_at else None,
        "phaseStartedAt": timestamp(state.since) if state.since else None,
        "reachedAt": None if state.reached_at is None else timestamp(state.reached_at),
        "pausedBy": None if state.pause is None else state.pause.value,
        "pausedAt": timestamp(state.paused_at) if state.paused_at else None,
        "stableFingerprint": state.fingerprint,
        "isFingerprintAllowed": state.is_fingerprint_allowed,
        "isForced": state.is_forced,
        "takenVerb": None if state.taken is None else state.taken.value,
        "reason": state.reason or None,
        "message": state.message or None,
        "gates": [gate.model_dump(mode="json", exclude_none=True) for gate in gates],
    }
    return {name: value for name, value in document.items() if value is not None}


def rollout_status(resource: Object) -> RolloutStatus | None:
    """The rollout's part of the status; None where there is none that can be read."""
    found = (resource.get("status") or {}).get("rollout")
    if found is None:
        return None
    try:
        return RolloutStatus.model_validate(found)
    except ValidationError:
        return None  # of an older or newer operator: what is owned says enough


def annotations(item: Object | None) -> Mapping[str, str]:
    """The annotations of an object, if there is one."""
    return {} if item is None else item["metadata"].get("annotations") or {}


def moment(item: Object | None, annotation: str) -> float | None:
    """The time in an annotation."""
    try:
        return seconds_of(annotations(item).get(annotation))
    except ValueError:
        return None

"""Decides where a rollout stands: from what is seen now to its next state. Nothing else is kept.

A rollout raises the canary's weight level by level: the steps of the spec, then 100. A level is
*granted* once every pool can carry it, *reached* once the gateways say that they serve it, and left
after its hold when the gates pass. Failure, abort and deadline lead to a rollback from anywhere.
`advance` goes as far as one moment allows, so that the same moment twice is the same as once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from isobatch_contracts.fields import duration_seconds
from isobatch_contracts.steering import Rollout, Step

_MOST_MOVES = 16  # of one moment; a longer chain would be a loop


class Phase(StrEnum):
    """Where a rollout is, in the words of the resource's status."""

    IDLE = "Idle"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    FAILED = "Failed"


class Stage(StrEnum):
    """The phase without its pauses."""

    IDLE = "Idle"
    MOVING = "Moving"
    ROLLING_BACK = "RollingBack"
    FAILED = "Failed"


class Pause(StrEnum):
    """Who or what holds a rollout where it is."""

    PERSON = "PausedByPerson"
    STEP = "PausedByStep"
    FAILURE = "PausedByFailure"
    INCONCLUSIVE = "Inconclusive"
    FINGERPRINT = "FingerprintChanged"

    @property
    def is_wanted(self) -> bool:
        """Whether a person asked for it, now or in the spec: the deadline waits as long."""
        return self in (Pause.PERSON, Pause.STEP, Pause.FAILURE)


class Verb(StrEnum):
    """What a person may ask of a rollout."""

    PROMOTE = "promote"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"
    RETRY = "retry"


class Outcome(StrEnum):
    """What the gates say together."""

    PASS = "Pass"  # noqa: S105  # no password
    FAIL = "Fail"
    INCONCLUSIVE = "Inconclusive"


@dataclass(frozen=True, slots=True)
class RolloutState:
    """All that is remembered of a rollout. Times are seconds since the epoch.

    `step` counts levels, the last being 100; `weight` is the level granted; `since` is when it
    was; `reached_at`, when the gateways had it; `failed` is a revision that is not tried again by
    itself; `taken` is the verb that was carried out and may still be asked for.
    """

    stage: Stage = Stage.IDLE
    stable: str | None = None
    canary: str | None = None
    step: int = 0
    weight: int = 0
    started_at: float = 0.0
    since: float = 0.0
    reached_at: float | None = None
    pause: Pause | None = None
    paused_at: float = 0.0
    failed: str | None = None
    fingerprint: str | None = None
    is_fingerprint_allowed: bool = False
    is_forced: bool = False
    reason: str = ""
    message: str = ""
    taken: Verb | None = None

    @property
    def is_canary_routed(self) -> bool:
        """Whether the canary may have weight at all."""
        return self.stage is Stage.MOVING

    def phase(self, rollout: Rollout) -> Phase:
        """The phase, as the status says it."""
        match self.stage:
            case Stage.MOVING if self.pause is not None:
                return Phase.PAUSED
            case Stage.MOVING:
                is_last = self.step >= len(levels(rollout)) - 1
                return Phase.PROMOTING if is_last else Phase.PROGRESSING
            case _:
                return Phase(self.stage.value)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rollout depends on.

    `carries`: the level that every pool's ready canaries can carry now. `is_served`: the gateways
    serve the table that says the granted weight, and it is said. `is_complete`: the canary (or,
    without a stable revision, the target) is ready as the spec asks. `is_gone`: no canary replica
    is left and none is routed. `trouble`: why the canary cannot become ready by itself.
    """

    target: str
    carries: int = 0
    is_served: bool = False
    is_complete: bool = False
    is_gone: bool = True
    trouble: str | None = None
    outcome: Outcome = Outcome.PASS
    outcome_message: str = ""
    stable_fingerprint: str | None = None
    canary_fingerprint: str | None = None
    is_same_model: bool = True
    switches_at_once: bool = False  # another served name: a table has one


def shares_places(rollout: Rollout) -> bool:
    """Whether the new revision takes the old one's places instead of standing beside it."""
    return rollout.strategy == "Recreate" or rollout.capacity == "InPlace"


def levels(rollout: Rollout, *, at_once: bool = False) -> tuple[Step, ...]:
    """The weights to go through; the last is 100."""
    if rollout.strategy != "Canary" or at_once:
        return (Step(weight=100),)
    steps = rollout.steps
    if steps and steps[-1].weight == 100:
        return steps
    return (*steps, Step(weight=100))


def advance(
    state: RolloutState,
    rollout: Rollout,
    look: Callable[[RolloutState], Seen],
    now: float,
    verb: Verb | None = None,
) -> RolloutState:
    """The state after this moment; `look` says what is seen with the eyes of a state.

    `verb` is carried out once for as long as it is asked for.
    """
    if verb is None:
        state = replace(state, taken=None)
    elif verb is not state.taken:
        state = replace(_obey(state, rollout, look(state), verb, now), taken=verb)
    for _ in range(_MOST_MOVES):
        after = _move(state, rollout, look(state), now)
        if after == state:
            return state
        state = after
    raise AssertionError(f"a rollout that does not settle: {state}")


def _obey(
    state: RolloutState, rollout: Rollout, seen: Seen, verb: Verb, now: float
) -> RolloutState:
    """The state once `verb` is carried out; unchanged where it means nothing."""
    moving = state.stage is Stage.MOVING
    match verb:
        case Verb.PAUSE if moving:
            return _hold(state, Pause.PERSON, "a person paused the rollout", now)
        case Verb.RESUME if moving and state.pause is not None:
            return _resume(state, rollout, seen, now)
        case Verb.PROMOTE if moving:
            last = len(levels(rollout, at_once=seen.switches_at_once)) - 1
            allowed = state.is_fingerprint_allowed or state.pause is Pause.FINGERPRINT
            moved = replace(_continue(state, now), is_forced=True, is_fingerprint_allowed=allowed)
            return moved if state.step == last else _at_step(moved, last, now)
        case Verb.ABORT if moving:
            return _roll_back(state, "Aborted", "a person aborted the rollout", now)
        case Verb.RETRY if state.stage is Stage.FAILED:
            return replace(state, stage=Stage.IDLE, failed=None, reason="", message="")
        case _:
            return state


def _resume(state: RolloutState, rollout: Rollout, seen: Seen, now: float) -> RolloutState:
    last = len(levels(rollout, at_once=seen.switches_at_once)) - 1
    after = _continue(state, now)
    match state.pause:
        case Pause.FINGERPRINT:
            return replace(after, is_fingerprint_allowed=True)
        case Pause.STEP | Pause.INCONCLUSIVE if state.step < last:
            return _at_step(after, state.step + 1, now)
        case Pause.STEP | Pause.INCONCLUSIVE:
            return replace(after, is_forced=True)
        case _:
            return after


def _continue(state: RolloutState, now: float) -> RolloutState:
    """`state` without its pause; what a person took his time for is not counted as ours."""
    wanted = state.pause is not None and state.pause.is_wanted
    waited = now - state.paused_at if wanted else 0.0
    return replace(
        state, pause=None, started_at=state.started_at + waited, reason="", message="", since=now
    )


def _move(state: RolloutState, rollout: Rollout, seen: Seen, now: float) -> RolloutState:
    """The next state; the same one if there is nothing to move."""
    match state.stage:
        case Stage.IDLE:
            return _from_idle(state, seen, now)
        case Stage.FAILED:
            return _from_failed(state, seen)
        case Stage.ROLLING_BACK:
            return _from_rolling_back(state, seen, now)
        case Stage.MOVING:
            return _from_moving(state, rollout, seen, now)


def _from_idle(state: RolloutState, seen: Seen, now: float) -> RolloutState:
    if state.stable is None:
        # The first revision has nothing to be compared with: it is stable once it is complete.
        done = seen.is_complete
        return replace(state, stable=seen.target, since=now) if done else state
    if seen.target == state.stable:
        return state
    return replace(
        RolloutState(stable=state.stable, taken=state.taken),
        stage=Stage.MOVING,
        canary=seen.target,
        started_at=now,
        since=now,
        fingerprint=seen.stable_fingerprint,
    )


def _from_failed(state: RolloutState, seen: Seen) -> RolloutState:
    if seen.target == state.failed:
        return state
    return replace(state, stage=Stage.IDLE, failed=None, reason="", message="")


def _from_rolling_back(state: RolloutState, seen: Seen, now: float) -> RolloutState:
    if not seen.is_gone:
        return state
    stage = Stage.IDLE if state.failed is None else Stage.FAILED
    return replace(state, stage=stage, canary=None, step=0, since=now)


def _from_moving(state: RolloutState, rollout: Rollout, seen: Seen, now: float) -> RolloutState:
    if seen.target != state.canary:
        why = "Reverted" if seen.target == state.stable else "Superseded"
        gone = _roll_back(state, why, f"the spec asks for {seen.target} now", now)
        return replace(gone, failed=None)
    problem = _problem(state, rollout, seen, now)
    if problem is not None:
        return _fail(state, rollout, *problem, now)
    if state.pause in (Pause.PERSON, Pause.STEP, Pause.FAILURE):
        return state
    if _is_foreign(state, rollout, seen):
        text = (
            f"the same model has the fingerprint {seen.canary_fingerprint} in {state.canary} and "
            f"{state.fingerprint} in {state.stable}: strict answers would change. `rollout resume` "
            "accepts that, `rollout abort` goes back"
        )
        return _hold(state, Pause.FINGERPRINT, text, now)
    if state.pause is Pause.FINGERPRINT:
        state = replace(state, pause=None, reason="", message="")
    return _climb(state, rollout, seen, now)


def _problem(
    state: RolloutState, rollout: Rollout, seen: Seen, now: float
) -> tuple[str, str] | None:
    """Why the rollout has failed: a reason in a word, and a sentence."""
    if seen.trouble is not None:
        return "CanaryFailed", seen.trouble
    if seen.outcome is Outcome.FAIL and state.weight > 0:
        return "GateFailed", seen.outcome_message
    waits = state.pause is not None and state.pause.is_wanted
    limit = duration_seconds(rollout.deadline)
    if not waits and now - state.started_at >= limit:
        where = "" if state.pause is None else f" while {state.pause.value}: {state.message}"
        return "DeadlineExceeded", f"not done within {rollout.deadline}{where}"
    return None


def _fail(
    state: RolloutState, rollout: Rollout, reason: str, message: str, now: float
) -> RolloutState:
    if rollout.on_failure == "Rollback":
        return _roll_back(state, reason, message, now)
    if state.pause in (Pause.FAILURE, Pause.PERSON):
        return state
    return replace(_hold(state, Pause.FAILURE, message, now), reason=reason)


def _is_foreign(state: RolloutState, rollout: Rollout, seen: Seen) -> bool:
    """Whether the canary computes other bits for the same model, and nobody allowed it."""
    if rollout.on_fingerprint_change == "Allow" or state.is_fingerprint_allowed:
        return False
    known = state.fingerprint is not None and seen.canary_fingerprint is not None
    return known and seen.is_same_model and state.fingerprint != seen.canary_fingerprint


def _climb(state: RolloutState, rollout: Rollout, seen: Seen, now: float) -> RolloutState:
    """Grant the level, hold it, and leave it: upwards, or by being done."""
    steps = levels(rollout, at_once=seen.switches_at_once)
    step = steps[min(state.step, len(steps) - 1)]  # an edit may have taken steps away
    is_last = state.step >= len(steps) - 1
    if state.weight < step.weight and (seen.carries >= step.weight or shares_places(rollout)):
        return replace(state, weight=step.weight, since=now, reached_at=None)
    if state.reached_at is None:
        # A later moment than the grant's: what is seen now was not seen before the table was out.
        is_reached = seen.is_served and state.weight >= step.weight and now > state.since
        return replace(state, reached_at=now) if is_reached else state
    if is_last and not (seen.is_complete and seen.is_served):
        return state
    hold = 0.0 if step.hold is None else duration_seconds(step.hold)
    if now - state.reached_at < hold:
        return state
    if seen.outcome is not Outcome.PASS and not state.is_forced:
        return _inconclusive(state, rollout, seen, now)
    if state.pause is Pause.INCONCLUSIVE:
        return replace(state, pause=None, reason="", message="")
    if step.pause and not state.is_forced:
        return _hold(state, Pause.STEP, f"step {state.step + 1} asks for a person", now)
    return _promoted(state, now) if is_last else _at_step(state, state.step + 1, now)


def _inconclusive(state: RolloutState, rollout: Rollout, seen: Seen, now: float) -> RolloutState:
    """No answer is no: wait for one, until the deadline, or give up at once."""
    if rollout.on_inconclusive == "Rollback":
        return _roll_back(state, "Inconclusive", seen.outcome_message, now)
    return _hold(state, Pause.INCONCLUSIVE, seen.outcome_message, now)


def _hold(state: RolloutState, pause: Pause, message: str, now: float) -> RolloutState:
    if state.pause is pause:
        return replace(state, message=message)
    wanted = state.pause is not None and state.pause.is_wanted
    at = state.paused_at if wanted else now  # one wait, though a second reason came
    return replace(state, pause=pause, paused_at=at, reason=pause.value, message=message)


def _at_step(state: RolloutState, step: int, now: float) -> RolloutState:
    return replace(state, step=step, since=now, reached_at=None)


def _roll_back(state: RolloutState, reason: str, message: str, now: float) -> RolloutState:
    return replace(
        state,
        stage=Stage.ROLLING_BACK,
        failed=state.canary,
        weight=0,
        pause=None,
        since=now,
        reached_at=None,
        reason=reason,
        message=message,
    )


def _promoted(state: RolloutState, now: float) -> RolloutState:
    return RolloutState(
        stable=state.canary, since=now, reason="Promoted", message="", taken=state.taken
    )

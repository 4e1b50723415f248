"""Decides how many replicas each revision has in a pool, and which share of it each may carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isobatch_contracts.steering import Rollout

from isobatch_operator.rollout import (
    Pause,
    RolloutState,
    Stage,
    levels,
    shares_places,
)


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One pool: replicas asked for, and by revision those that could be routed.

    `has_stable`: the stable revision has this pool (an edit may have added it).
    """

    desired: int
    ready: Mapping[str, int] = field(default_factory=dict)
    has_stable: bool = True


def carried(pool: PoolSeen, state: RolloutState, rollout: Rollout) -> int:
    """The percent of the pool's traffic that its ready canaries can carry, rounded down.

    Where the canary takes the stable's places, the places that serve are what is required; else
    it is all that the spec asks for.
    """
    canary = pool.ready.get(state.canary or "", 0)
    stable = pool.ready.get(state.stable or "", 0)
    required = canary + stable if shares_places(rollout) and pool.has_stable else pool.desired
    return min(100, 100 * canary // required) if required else 100


def weights(pool: PoolSeen, state: RolloutState, rollout: Rollout) -> dict[str, int]:
    """The percent of each revision in the pool's traffic: 100 in all, or 0 where nobody is ready.

    Without a stable revision the only other is the first one, under the name of `state.canary`.
    """
    if state.stable is None:
        first = state.canary or ""
        return {first: 100 if pool.ready.get(first, 0) else 0}
    if not state.is_canary_routed or state.canary is None:
        return {state.stable: 100 if pool.ready.get(state.stable, 0) else 0}
    canary = _canary_weight(pool, state, rollout)
    if not pool.has_stable:
        return {state.canary: canary}
    is_anybody = canary > 0 or pool.ready.get(state.stable, 0) > 0
    return {state.stable: 100 - canary if is_anybody else 0, state.canary: canary}


def _canary_weight(pool: PoolSeen, state: RolloutState, rollout: Rollout) -> int:
    if state.pause is Pause.FINGERPRINT or not pool.ready.get(state.canary or "", 0):
        return 0
    cap = carried(pool, state, rollout)
    if not pool.has_stable:
        return (
            100 if min(state.weight, cap) == 100 else 0
        )  # it opens when the rollout is at its end
    if shares_places(rollout) and not pool.ready.get(state.stable or "", 0):
        return 100 if state.weight > 0 else 0  # its places are all that is left of the pool
    return min(state.weight, cap)


def wanted(
    pool: PoolSeen, state: RolloutState, rollout: Rollout, *, at_once: bool = False
) -> dict[str, int]:
    """Replicas that each revision should have in the pool."""
    if state.stable is None:
        return {state.canary or "": pool.desired}
    if state.stage is not Stage.MOVING or state.canary is None:
        return {state.stable: pool.desired}
    goal = _goal(pool.desired, state, rollout, at_once=at_once)
    if not shares_places(rollout) or not pool.has_stable:
        return {state.stable: pool.desired, state.canary: goal}
    if rollout.strategy == "Recreate":
        return {state.stable: 0, state.canary: pool.desired}
    # One place at a time changes hands: the next when the last one's new holder is ready.
    canary = min(goal, pool.ready.get(state.canary, 0) + 1)
    return {state.stable: pool.desired - canary, state.canary: canary}


def _goal(desired: int, state: RolloutState, rollout: Rollout, *, at_once: bool) -> int:
    """Canary replicas that can carry the level sought: rounded up, and one at least."""
    steps = levels(rollout, at_once=at_once)
    level = steps[min(state.step, len(steps) - 1)].weight
    return min(desired, max(1, -(-desired * level // 100)))

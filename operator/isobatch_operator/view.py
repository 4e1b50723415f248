"""Decides how a service looks to its rollout, and what the rollout's state asks of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName

from isobatch_operator import capacity
from isobatch_operator.observed import Failure, Observed, Refused
from isobatch_operator.revision import Revision, revision_of, service_pools
from isobatch_operator.rollout import RolloutState, Seen, Stage
from isobatch_operator.routing import Route, route
from isobatch_operator.status import FAILURES_WITHOUT_HOPE


@dataclass(frozen=True, slots=True)
class Layout:
    """What a rollout's state asks for: the served name, the routes' shares, and the replicas."""

    model: str
    shares: Mapping[PoolName, tuple[tuple[Route, int], ...]]
    wanted: Mapping[PoolName, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class View:
    """One service as it is observed at one moment."""

    service: InferenceService
    observed: Observed
    target: Revision
    revisions: Mapping[str, Revision]
    desired: Mapping[PoolName, int]
    state: RolloutState
    now: float

    @classmethod
    def of(cls, service: InferenceService, observed: Observed, now: float) -> "View":
        """The view of `service`. A state whose revisions are not known is no state."""
        target = revision_of(service)
        revisions = {**observed.revisions, target.name: target}
        state = observed.rollout
        if state.stable is not None and state.stable not in revisions:
            state = RolloutState()
        desired = {name: pool.desired_replicas for name, pool in service_pools(service).items()}
        return cls(service, observed, target, revisions, desired, state, now)

    def look(self, state: RolloutState) -> Seen:
        """What there is to be seen for a rollout in `state`."""
        canary = state.canary or self.target.name
        as_moving = replace(state, canary=canary)
        pools = [self._pool(pool, as_moving) for pool in self.desired]
        rollout = self.service.spec.rollout
        return Seen(
            target=self.target.name,
            carries=min((capacity.carried(pool, as_moving, rollout) for pool in pools), default=0),
            is_served=self._is_served(state),
            is_complete=all(pool.ready.get(canary, 0) == pool.desired for pool in pools),
            is_gone=self._is_gone(state),
            trouble=self._trouble(canary, state),
            outcome=self.observed.outcome,
            outcome_message=self.observed.outcome_message,
            stable_fingerprint=self._fingerprint(state.stable),
            canary_fingerprint=self._fingerprint(canary),
            is_same_model=self._is_same_model(state, canary),
            switches_at_once=self._switches_at_once(as_moving),
        )

    def layout(self, state: RolloutState) -> Layout:
        """What `state` asks for."""
        if state.stable is None:
            state = replace(state, canary=self.target.name)
        at_once = self._switches_at_once(state)
        rollout = self.service.spec.rollout
        wanted = {
            pool: capacity.wanted(self._pool(pool, state), state, rollout, at_once=at_once)
            for pool in self.desired
        }
        shares = {pool: self._shares(pool, state, counts) for pool, counts in wanted.items()}
        name = self._served_name(state, shares) if at_once else None
        if at_once and name == self._named(state.stable).served_name:
            still = replace(state, weight=0)
            shares = {pool: self._shares(pool, still, c) for pool, c in wanted.items()}
        return Layout(name or self._named(state.stable).served_name, shares, wanted)

    def _named(self, name: str | None) -> Revision:
        return self.target if name is None else self.revisions[name]

    def _served_name(
        self, state: RolloutState, shares: Mapping[PoolName, tuple[tuple[Route, int], ...]]
    ) -> str:
        """A table has one name: the new one's, from the moment when it serves every pool."""
        is_whole = all(
            weight == (100 if way.revision.name == state.canary else 0)
            for ways in shares.values()
            for way, weight in ways
        )
        return self._named(state.canary if is_whole else state.stable).served_name

    def _switches_at_once(self, state: RolloutState) -> bool:
        if state.stable is None or state.canary is None or state.stage is Stage.ROLLING_BACK:
            return False
        names = {self.revisions[n].served_name for n in (state.stable, state.canary)}
        return len(names) > 1

    def _shares(
        self, pool: PoolName, state: RolloutState, counts: Mapping[str, int]
    ) -> tuple[tuple[Route, int], ...]:
        """The routes of a pool. Without the fingerprint of one with weight, nobody has any."""
        seen = self._pool(pool, state, counts)
        shares = tuple(
            (route(pool, self.revisions[name], counts.get(name, 0), self.observed), weight)
            for name, weight in capacity.weights(seen, state, self.service.spec.rollout).items()
        )
        if pool is PoolName.STRICT and any(w and r.fingerprint is None for r, w in shares):
            return tuple((way, 0) for way, _ in shares)
        return shares

    def _pool(
        self, pool: PoolName, state: RolloutState, counts: Mapping[str, int] | None = None
    ) -> capacity.PoolSeen:
        """`pool`, with the replicas within `counts`, or within those that the spec asks for."""
        desired = self.desired[pool]
        names = [name for name in (state.stable, state.canary) if name is not None]
        limit = dict.fromkeys(names, desired) if counts is None else counts
        return capacity.PoolSeen(
            desired=desired,
            ready={
                name: len(
                    route(pool, self.revisions[name], limit.get(name, 0), self.observed).replicas
                )
                for name in names
            },
            has_stable=state.stable is None or pool in self.revisions[state.stable].pools,
        )

    def _is_served(self, state: RolloutState) -> bool:
        """Whether every gateway serves a table in which the canary has its granted weight."""
        table, heard = self.observed.table, self.observed.acknowledged
        if self.now <= self.observed.published_at:
            return False  # nobody can have read it in the moment in which it was written
        if table is None or (heard is not None and heard < table.version):
            return False
        found = {e.pool: e.weight for e in table.revisions if e.name == state.canary}
        return all(
            found.get(pool, 0) >= state.weight
            for pool, desired in self.desired.items()
            if desired > 0 and self._must_carry(pool, state)
        )

    def _must_carry(self, pool: PoolName, state: RolloutState) -> bool:
        """Whether the granted weight holds for `pool`: one that is new opens at the end alone."""
        is_new = state.stable is not None and pool not in self.revisions[state.stable].pools
        return not is_new or state.weight == 100

    def _is_gone(self, state: RolloutState) -> bool:
        alive = any(r.slot.revision == state.canary for r in self.observed.replicas)
        table = self.observed.table
        routed = table is not None and any(
            e.name == state.canary and e.weight for e in table.revisions
        )
        return not alive and not routed

    def _trouble(self, canary: str, state: RolloutState) -> str | None:
        """Why the canary cannot become ready by itself; what failed before this rollout is past."""
        for replica in self.observed.replicas:
            if replica.slot.revision == canary and isinstance(replica.state, Refused):
                return f"{replica.slot.name}: {replica.state.reason}"
        for slot, failures in self.observed.failures.items():
            if slot.revision == canary:
                fresh = tuple(f for f in failures if f.at > state.started_at)
                why = _why_hopeless(fresh)
                if why is not None:
                    return f"{slot.name}: {why}"
        return None

    def _fingerprint(self, revision: str | None) -> str | None:
        pool = PoolName.STRICT
        if revision is None or pool not in self.desired:
            return None
        return route(pool, self.revisions[revision], self.desired[pool], self.observed).fingerprint

    def _is_same_model(self, state: RolloutState, canary: str) -> bool:
        if state.stable is None:
            return False
        before, after = self.revisions[state.stable].model, self.revisions[canary].model
        return (before.uri, before.digest) == (after.uri, after.digest)


def _why_hopeless(failures: tuple[Failure, ...]) -> str | None:
    """Failures of a canary are counted over its whole rollout: it may live long between two."""
    is_hopeless = len(failures) >= FAILURES_WITHOUT_HOPE or any(f.is_permanent for f in failures)
    return failures[-1].reason if is_hopeless else None

"""What holds of every rollout, whatever happens: random edits, verbs, crashes, gates and time."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from isobatch_contracts.resource import InferenceService
from isobatch_contracts.tiers import PoolName
from isobatch_operator.observed import (
    Failure,
    Observed,
    Ready,
    Refused,
    Replica,
    Slot,
    Starting,
    Stopping,
)
from isobatch_operator.plan import Plan, PublishTable, StartReplica, StopReplica, plan
from isobatch_operator.rollout import Outcome, Phase, RolloutState, Stage, Verb, shares_places

PRINTS = ["sha256:" + letter * 64 for letter in "ab"]
STEPS: list[list[dict[str, Any]]] = [
    [],
    [{"weight": 5, "hold": "10s"}, {"weight": 50, "hold": "10s"}],
    [{"weight": 30, "pause": True}, {"weight": 60}],
]


def service_of(
    flag: str, replicas: tuple[int, int], steps: int, kind: str, reactions: tuple[str, str]
) -> InferenceService:
    strategy, capacity = kind.split("/")
    return InferenceService.model_validate(
        {
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"uri": "builtin://m"},
                "pools": {
                    "strict": {"replicas": replicas[0], "runtime": {"args": [flag]}},
                    "throughput": {"replicas": replicas[1]},
                },
                "rollout": {
                    "strategy": strategy,
                    "capacity": capacity,
                    "steps": STEPS[steps],
                    "onFailure": reactions[0],
                    "onInconclusive": reactions[1],
                    "deadline": "10m",
                },
            },
        }
    )


KINDS = ["Canary/Surge", "Canary/InPlace", "BlueGreen/Surge", "Recreate/Surge"]


class Rollouts(RuleBasedStateMachine):
    """A world in which actions are performed at once and everything else is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.service = service_of("--a", (1, 2), 1, "Canary/Surge", ("Rollback", "Pause"))
        self.seen = Observed()
        self.now = 1000.0
        self.done: Plan | None = None
        self.step()

    def step(self, verb: Verb | None = None) -> None:
        before = replace(self.seen, verb=verb)
        done = plan(self.service, before, self.now)
        assert plan(self.service, before, self.now) == done
        self.apply(done)
        again = plan(self.service, replace(self.seen, verb=verb), self.now)
        assert again.actions == ()
        assert again.rollout == done.rollout
        self.check_promotion(before, done, verb)
        self.check_weights(before, done)
        self.done = done

    def apply(self, done: Plan) -> None:
        replicas = {r.slot: r for r in self.seen.replicas}
        table, published_at = self.seen.table, self.seen.published_at
        for action in done.actions:
            match action:
                case PublishTable(new):
                    table, published_at = new, self.now
                    routed = {e.name for r in new.revisions for e in r.endpoints}
                    for slot, r in replicas.items():
                        since = self.now if r.unrouted_since is None else r.unrouted_since
                        kept = None if slot.name in routed else since
                        replicas[slot] = replace(r, unrouted_since=kept)
                case StartReplica(slot, _):
                    assert slot not in replicas
                    url = f"http://127.0.0.1:{9000 + len(replicas)}"
                    replicas[slot] = Replica(slot, url, Starting(self.now), self.now)
                case StopReplica(slot, _):
                    replicas[slot] = replace(replicas[slot], state=Stopping(self.now))
        self.seen = replace(
            self.seen,
            replicas=tuple(replicas.values()),
            table=table,
            published_at=published_at,
            rollout=done.rollout,
            revisions=done.revisions,
        )

    def check_promotion(self, before: Observed, done: Plan, verb: Verb | None) -> None:
        """Nobody is promoted without a pass of the gates, unless a person said so."""
        old, new = before.rollout, done.rollout
        if old.stable is None or new.stable == old.stable:
            return
        assert new.stable == old.canary
        said = verb in (Verb.PROMOTE, Verb.RESUME) or old.is_forced
        assert before.outcome is Outcome.PASS or (said and before.outcome is Outcome.INCONCLUSIVE)

    def check_weights(self, before: Observed, done: Plan) -> None:
        rollout, state = self.service.spec.rollout, done.rollout
        for pool, spec in (
            (PoolName.STRICT, self.service.spec.pools.strict),
            (PoolName.THROUGHPUT, self.service.spec.pools.throughput),
        ):
            assert spec is not None
            entries = [e for e in done.table.revisions if e.pool is pool]
            assert sum(e.weight for e in entries) in (0, 100)
            canary = sum(e.weight for e in entries if e.name == state.canary)
            ready = sum(
                isinstance(r.state, Ready)
                for r in before.replicas
                if r.slot.pool is pool and r.slot.revision == state.canary
            )
            if not shares_places(rollout):
                assert canary <= 100 * ready // max(1, spec.desired_replicas)
            assert canary == 0 or state.stage is Stage.MOVING
            assert canary <= 100 if ready else canary == 0

    @rule(
        flag=st.sampled_from(["--a", "--b", "--c"]),
        replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        steps=st.integers(0, 2),
        kind=st.sampled_from(
            ["Canary/Surge", "Canary/InPlace", "BlueGreen/Surge", "Recreate/Surge"]
        ),
        reactions=st.tuples(
            st.sampled_from(["Rollback", "Pause"]), st.sampled_from(["Rollback", "Pause"])
        ),
    )
    def edit(
        self,
        flag: str,
        replicas: tuple[int, int],
        steps: int,
        kind: str,
        reactions: tuple[str, str],
    ) -> None:
        self.service = service_of(flag, replicas, steps, kind, reactions)
        self.step()

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule(verb=st.sampled_from(list(Verb)))
    def ask(self, verb: Verb) -> None:
        self.now += 0.1
        self.step(verb)
        if verb is Verb.ABORT and self.seen.rollout.stage is not Stage.IDLE:
            assert self.seen.rollout.weight == 0 or self.seen.rollout.stage is Stage.MOVING

    @rule(outcome=st.sampled_from(list(Outcome)))
    def judge(self, outcome: Outcome) -> None:
        self.seen = replace(self.seen, outcome=outcome, outcome_message=outcome.value)
        self.now += 0.1
        self.step()

    @rule(which=st.integers(0, 20), what=st.sampled_from(["ready", "other", "crash", "refuse"]))
    def happen(self, which: int, what: str) -> None:
        if self.seen.replicas:
            self.change(sorted(self.seen.replicas, key=lambda r: r.slot), which, what)
        self.now += 0.1
        self.step()

    def change(self, replicas: list[Replica], which: int, what: str) -> None:
        replica = replicas.pop(which % len(replicas))
        failures = dict(self.seen.failures)
        if isinstance(replica.state, Stopping):
            pass  # it ends, as it was told to
        elif what == "crash":
            failure = Failure(self.now, 0.0, "boom")
            failures[replica.slot] = (*failures.get(replica.slot, ()), failure)
        elif what == "refuse":
            replicas.append(replace(replica, state=Refused(self.now, "no schedule")))
        else:
            replicas.append(replace(replica, state=self.ready(replica.slot, what == "other")))
        self.seen = replace(self.seen, replicas=tuple(replicas), failures=failures)

    def ready(self, slot: Slot, is_other: bool) -> Ready:
        is_strict = slot.pool is PoolName.STRICT
        return Ready(self.now, PRINTS[is_other] if is_strict else None, 0)

    @rule()
    def settle(self) -> None:
        """Everybody who can becomes ready; who was told to stop is gone."""
        self.now += 40
        self.seen = replace(
            self.seen,
            replicas=tuple(
                r
                if isinstance(r.state, (Ready, Refused))
                else replace(r, state=self.ready(r.slot, is_other=False))
                for r in self.seen.replicas
                if not isinstance(r.state, Stopping)
            ),
        )
        self.step()

    @invariant()
    def the_state_is_sound(self) -> None:
        state: RolloutState = self.seen.rollout
        assert (state.canary is not None) == (state.stage in (Stage.MOVING, Stage.ROLLING_BACK))
        assert 0 <= state.weight <= 100
        assert state.pause is None or state.phase(self.service.spec.rollout) is Phase.PAUSED

    def teardown(self) -> None:
        """It ends by itself, unless a person holds it, or asked that failures be held."""
        rollout = self.service.spec.rollout
        for _ in range(25):
            self.settle()
        state = self.seen.rollout
        is_held = state.pause is not None and state.pause.is_wanted
        assert is_held or state.stage in (Stage.IDLE, Stage.FAILED), (state, rollout)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Rollouts,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_sample_of_random_rollouts_keeps_its_promises() -> None:
    run(examples=20, steps=30)


@pytest.mark.full
def test_a_million_steps_of_random_rollouts_keep_their_promises() -> None:
    run(examples=20_000, steps=50)

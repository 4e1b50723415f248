"""Performs the plan's actions with worker processes, and observes what became of them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import httpx
import structlog
from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.steering import Rollout

from isobatch_operator.analysis import Verdict, Window, judged
from isobatch_operator.exposition import Report
from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.member import Member
from isobatch_operator.local.observe import probe_worker
from isobatch_operator.local.ports import base_url, free_port
from isobatch_operator.local.processes import Launch
from isobatch_operator.local.programs import WORKER_HOST, Programs, Timings, WorkerStart
from isobatch_operator.observed import (
    Failure,
    Observed,
    Ready,
    Refused,
    Replica,
    Slot,
    Starting,
    Stopping,
    Unready,
)
from isobatch_operator.plan import (
    Action,
    Plan,
    PublishTable,
    StartReplica,
    StopReason,
    StopReplica,
)
from isobatch_operator.readiness import Probe
from isobatch_operator.revision import Revision
from isobatch_operator.rollout import RolloutState, Verb

_FAILURES_KEPT = 16
_START_LINE = 120  # characters of the last log line that are shown while a worker starts


@dataclass(frozen=True, slots=True)
class Settings:
    """What one instance goes by."""

    instance: str
    directory: StateDirectory
    programs: Programs
    timings: Timings


@dataclass(slots=True)
class _Place:
    """A filled slot. Mutable: `unrouted_since` follows the tables that are published."""

    member: Member
    url: str
    unrouted_since: float | None


class Fleet:
    """The workers of one service."""

    def __init__(self, settings: Settings, client: httpx.AsyncClient) -> None:
        """No process yet; the last table of an earlier run keeps the version monotone."""
        self._settings = settings
        self._client = client
        self._places: dict[Slot, _Place] = {}
        self._failures: dict[Slot, tuple[Failure, ...]] = {}
        self._log = structlog.get_logger("isobatch.up")
        self._table: RoutingTable | None = settings.directory.read_table()
        self._published_at = 0.0
        self._rollout = RolloutState()
        self._revisions: Mapping[str, Revision] = {}
        self._window = Window()

    @property
    def members(self) -> dict[Slot, Member]:
        """The living workers by slot."""
        return {slot: place.member for slot, place in self._places.items()}

    def url(self, slot: Slot) -> str | None:
        """Where the worker of `slot` listens; None if the slot is empty."""
        place = self._places.get(slot)
        return place.url if place else None

    def log_file(self, slot: Slot) -> Path:
        """Where the worker of `slot` writes, whether or not it lives."""
        return self._settings.directory.log_file(slot.name)

    def remember(self, step: Plan) -> None:
        """Keep what the next plan is to be given back."""
        self._rollout, self._revisions = step.rollout, step.revisions

    def judge(self, rollout: Rollout, report: Report | None) -> Verdict:
        """What the gates say, by what the gateway says it counted."""
        model = "" if self._table is None else self._table.model
        reports = {"gateway": report}
        self._window, verdict = judged(self._window, rollout, self._rollout, reports, model)
        return verdict

    def observe(
        self,
        now: float,
        *,
        acknowledged: int | None = None,
        verb: Verb | None = None,
        verdict: Verdict | None = None,
    ) -> Observed:
        """What is there. Workers that ended leave their slot, and a failure if nobody asked.

        `acknowledged` and `verdict` come from the gateway, `verb` from a person.
        """
        verdict = verdict or Verdict()
        for slot, place in list(self._places.items()):
            failure = place.member.observe(now)
            if failure is not None:
                self._fail(slot, failure)
            if place.member.is_gone:
                del self._places[slot]
        return Observed(
            replicas=tuple(self._replica(slot, place) for slot, place in self._places.items()),
            failures=dict(self._failures),
            rollout=self._rollout,
            revisions=self._revisions,
            table=self._table,
            published_at=self._published_at,
            acknowledged=acknowledged,
            verb=verb,
            outcome=verdict.outcome,
            outcome_message=verdict.message,
        )

    def apply(self, action: Action, now: float) -> None:
        """Perform one action of the plan."""
        match action:
            case PublishTable(table):
                self._publish(table, now)
            case StartReplica(slot, revision):
                self._start(slot, revision, now)
            case StopReplica(slot, reason):
                self._stop(slot, reason, now)
            case _:
                assert_never(action)

    def _replica(self, slot: Slot, place: _Place) -> Replica:
        state = place.member.state
        if isinstance(state, Starting) and not state.detail:
            state = Starting(state.since, place.member.last_line()[:_START_LINE])
        return Replica(slot, place.url, state, place.unrouted_since)

    def _publish(self, table: RoutingTable, now: float) -> None:
        self._settings.directory.write_table(table)
        self._table = table
        self._published_at = now
        routed = {endpoint.name for entry in table.revisions for endpoint in entry.endpoints}
        for slot, place in self._places.items():
            if slot.name in routed:
                place.unrouted_since = None
            elif place.unrouted_since is None:
                place.unrouted_since = now
        self._log.info("table", version=table.version, routed=sorted(routed))

    def _start(self, slot: Slot, revision: Revision, now: float) -> None:
        port = free_port(WORKER_HOST)
        url = base_url(WORKER_HOST, port)
        runtime = revision.pools[slot.pool].runtime
        launch = Launch(
            name=slot.name,
            instance=self._settings.instance,
            argv=self._settings.programs.worker(WorkerStart(slot.pool, revision, port)),
            env={variable.name: variable.value for variable in runtime.env},
            log=self.log_file(slot),
        )
        try:
            ask = self._asker(slot, revision, url)
            member = Member(launch, ask, self._settings.timings.worker, now)
        except OSError as exc:
            self._fail(slot, Failure(now, 0.0, f"cannot be started: {exc}"))
            return
        self._places[slot] = _Place(member, url, now)
        self._log.info("start", replica=slot.name, pid=member.child.pid, port=port)

    def _asker(self, slot: Slot, revision: Revision, url: str) -> Callable[[], Awaitable[Probe]]:
        def ask() -> Awaitable[Probe]:
            return probe_worker(
                self._client, url, slot.pool, revision.served_name, revision.model.digest
            )

        return ask

    def _stop(self, slot: Slot, reason: StopReason, now: float) -> None:
        member = self._places[slot].member
        self._log.info("stop", replica=slot.name, reason=reason.value)
        match reason:
            case StopReason.UNWANTED:
                member.stop(now)
            case StopReason.UNHEALTHY:
                member.stop(now, failure=_why_lost(member))
            case _:
                assert_never(reason)

    def _fail(self, slot: Slot, failure: Failure) -> None:
        self._failures[slot] = (*self._failures.get(slot, ()), failure)[-_FAILURES_KEPT:]
        self._log.warning("failure", replica=slot.name, reason=failure.reason)


def _why_lost(member: Member) -> str:
    match member.state:
        case Unready(_, reason):
            return f"was stopped: {reason}"
        case Starting():
            return "was stopped: did not become ready in time"
        case Ready() | Refused() | Stopping():
            return "was stopped"
        case _:
            assert_never(member.state)

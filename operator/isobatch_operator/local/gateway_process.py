"""Performs the life of the gateway: one process that is always wanted."""

import httpx
import structlog

from isobatch_operator.backoff import restart_at
from isobatch_operator.exposition import Report
from isobatch_operator.local.fleet import Settings
from isobatch_operator.local.member import Member
from isobatch_operator.local.observe import probe_gateway
from isobatch_operator.local.ports import base_url
from isobatch_operator.local.processes import Launch
from isobatch_operator.local.programs import GatewayStart, Listening
from isobatch_operator.local.state import ReplicaView
from isobatch_operator.observed import Failure, Ready
from isobatch_operator.readiness import Probe
from isobatch_operator.status import describe_absent, describe_living

GATEWAY = "gateway"


class GatewayProcess:
    """Keeps the gateway running on the port that was asked for."""

    def __init__(self, settings: Settings, client: httpx.AsyncClient, at: Listening) -> None:
        """No process yet."""
        self.url = base_url(at.host, at.port)
        self.member: Member | None = None
        self.report: Report | None = None
        self._settings = settings
        self._client = client
        self._at = at
        self._backoff = settings.timings.policy.backoff
        self._failures: tuple[Failure, ...] = ()
        self._log = structlog.get_logger("isobatch.up")

    @property
    def acknowledged(self) -> int | None:
        """The version of the one table that it says it serves."""
        versions = {} if self.report is None else self.report.versions
        return max(versions.values(), default=None)

    @property
    def is_gone(self) -> bool:
        """Whether no gateway process is left."""
        return self.member is None or self.member.is_gone

    def is_ready_for(self, table_version: int) -> bool:
        """Whether it answers, and by that table if it says by which."""
        is_ready = self.member is not None and isinstance(self.member.state, Ready)
        return is_ready and (self.acknowledged is None or self.acknowledged >= table_version)

    def ensure(self, now: float) -> None:
        """Look at it; start it if it is not there and may be started."""
        if self.member is not None:
            self._observe(self.member, now)
        if self.member is None and now >= restart_at(self._failures, self._backoff):
            self._start(now)

    def stop(self, now: float) -> None:
        """Ask it to drain and end."""
        if self.member is not None:
            self.member.stop(now)

    def view(self) -> ReplicaView:
        """What `status` shows of it."""
        if self.member is None:
            health = describe_absent(self._failures, self._backoff)
        else:
            health = describe_living(self.member.state, self._failures, self._backoff)
        return ReplicaView(
            name=GATEWAY,
            phase=health.phase,
            detail=health.detail,
            since=health.since,
            failures=health.failures,
            restart_at=health.restart_at,
            blocked=health.blocked,
            url=self.url,
            pid=None if self.member is None else self.member.child.pid,
            log=str(self._settings.directory.log_file(GATEWAY)),
        )

    def _observe(self, member: Member, now: float) -> None:
        failure = member.observe(now)
        if failure is not None:
            self._fail(failure)
        if member.is_gone:
            self.member = None
            self.report = None

    def _start(self, now: float) -> None:
        directory = self._settings.directory
        start = GatewayStart(
            self._at, directory.tables, directory.secret_file(), directory.receipts
        )
        launch = Launch(
            name=GATEWAY,
            instance=self._settings.instance,
            argv=self._settings.programs.gateway(start),
            env={},
            log=directory.log_file(GATEWAY),
        )
        try:
            self.member = Member(launch, self._ask, self._settings.timings.gateway, now)
        except OSError as exc:
            self._fail(Failure(now, 0.0, f"cannot be started: {exc}"))
            return
        self._log.info("start", process=GATEWAY, pid=self.member.child.pid, port=self._at.port)

    async def _ask(self) -> Probe:
        probe, self.report = await probe_gateway(self._client, self.url)
        return probe

    def _fail(self, failure: Failure) -> None:
        self._failures = (*self._failures, failure)[-16:]
        self._log.warning("failure", process=GATEWAY, reason=failure.reason)

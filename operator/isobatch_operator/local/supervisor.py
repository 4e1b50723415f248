"""Performs `isobatch up`: observes, plans, applies until told to stop; then drains and ends all."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import structlog
from isobatch_contracts.resource import InferenceService, Metadata

from isobatch_operator.local.fleet import Fleet, Settings
from isobatch_operator.local.gateway_process import GatewayProcess
from isobatch_operator.local.manifest_file import load_manifest, watch_manifest
from isobatch_operator.local.member import Member
from isobatch_operator.local.processes import end, find_tagged
from isobatch_operator.local.programs import Listening
from isobatch_operator.local.report import next_phase, pool_views, rollout_view
from isobatch_operator.local.state import (
    InstancePhase,
    LocalState,
    ProcessRecord,
    Routing,
)
from isobatch_operator.manifest import InvalidManifest
from isobatch_operator.plan import Plan, plan
from isobatch_operator.rollout import Verb

Show = Callable[[LocalState], None]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Request:
    """What `up` was asked for."""

    manifest: Path | None
    gateway: Listening
    wrapper_pid: int | None = None  # ends with this process, if it is given and our parent


class Supervisor:
    """One instance. `run` it once, in the main thread: children end with the thread they are of."""

    def __init__(
        self, service: InferenceService, request: Request, settings: Settings, show: Show
    ) -> None:
        """Nothing is started yet. `show` is called with every new state."""
        self._service = service
        self._request = request
        self._settings = settings
        self._show = show
        self._phase = InstancePhase.STARTING
        self._problems: tuple[str, ...] = ()
        self._state: LocalState | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._log = structlog.get_logger("isobatch.up")

    async def run(self) -> bool:
        """Serve until a signal. True if everything was drained, False if a second cut it short."""
        timeout = self._settings.timings.probe_timeout_seconds
        # trust_env: a proxy of the environment must not see, or break, what stays on this machine.
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            fleet = Fleet(self._settings, client)
            gateway = GatewayProcess(self._settings, client, self._request.gateway)
            async with self._signals(), self._watch():
                try:
                    while not (self._stop.is_set() or self._is_orphaned()):
                        self._step(fleet, gateway)
                        await self._pause()
                finally:
                    await self._shut_down(fleet, gateway)
        return not self._at_once.is_set()

    def _step(self, fleet: Fleet, gateway: GatewayProcess) -> None:
        now = time.time()
        verdict = fleet.judge(self._service.spec.rollout, gateway.report)
        seen = fleet.observe(
            now, acknowledged=gateway.acknowledged, verb=self._verb(), verdict=verdict
        )
        step = plan(self._service, seen, now, self._settings.timings.policy)
        for action in step.actions:
            fleet.apply(action, now)
        fleet.remember(step)
        gateway.ensure(now)  # after the first table is published
        is_ready = step.status.is_ready and gateway.is_ready_for(step.table.version)
        self._phase = next_phase(self._phase, is_ready=is_ready)
        self._report(step, fleet, gateway)

    def _verb(self) -> Verb | None:
        """What `isobatch rollout VERB` asked for since the last look."""
        return self._settings.directory.take_verb()

    def _is_orphaned(self) -> bool:
        """Whether the `uv run` that we are to its user was killed: nobody else would tell us."""
        wrapper = self._request.wrapper_pid
        return wrapper is not None and os.getppid() != wrapper

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self._settings.timings.tick_seconds)
        self._wake.clear()

    def _report(self, step: Plan, fleet: Fleet, gateway: GatewayProcess) -> None:
        members = [*fleet.members.values(), *([gateway.member] if gateway.member else [])]
        self._write(
            self._blank_state(gateway.url).model_copy(
                update={
                    "revision": step.status.revision,
                    "model": step.table.model,
                    "pools": pool_views(step.status, fleet),
                    "gateway": gateway.view(),
                    "rollout": rollout_view(step.rollout, self._service),
                    "routing": Routing(
                        version=step.status.table_version,
                        checksum=step.status.table_checksum,
                        acknowledged=gateway.acknowledged,
                    ),
                    "processes": tuple(member.record() for member in members),
                }
            )
        )

    def _blank_state(self, url: str) -> LocalState:
        return LocalState(
            instance=self._settings.instance,
            name=self._service.metadata.name,
            phase=self._phase,
            model=self._service.served_name,
            url=url,
            host=self._request.gateway.host,
            port=self._request.gateway.port,
            manifest=str(self._request.manifest) if self._request.manifest else None,
            manifest_problems=self._problems,
            supervisor=ProcessRecord(
                name="up",
                pid=os.getpid(),
                created_at=psutil.Process().create_time(),
                log=str(self._settings.directory.log_file("up")),
            ),
        )

    def _write(self, state: LocalState) -> None:
        if state != self._state:
            self._settings.directory.write_state(state)
            if self._state is None or state.phase is not self._state.phase:
                self._log.info("phase", phase=state.phase.value)
            self._state = state
        self._show(state)

    def _set_phase(self, phase: InstancePhase) -> None:
        self._phase = phase
        if self._state is not None:
            self._write(self._state.model_copy(update={"phase": phase}))

    async def _shut_down(self, fleet: Fleet, gateway: GatewayProcess) -> None:
        """Gateway first: it finishes what it holds while the workers still answer."""
        self._set_phase(InstancePhase.STOPPING)
        gateway.stop(time.time())
        await self._until_gone([gateway.member] if gateway.member else [])
        workers = list(fleet.members.values())
        for worker in workers:
            worker.stop(time.time())
        await self._until_gone(workers)
        end(find_tagged(self._settings.instance), grace_seconds=0)
        if self._state is not None:
            self._state = self._state.model_copy(
                update={"processes": (), "pools": (), "gateway": None}
            )
        self._set_phase(InstancePhase.STOPPED)

    async def _until_gone(self, members: Iterable[Member]) -> None:
        """Wait for the end of `members`, each with its grace; a second signal ends them at once."""
        alive = list(members)
        while alive:
            if self._at_once.is_set():
                for member in alive:
                    member.kill()
            for member in alive:
                member.observe(time.time())
            alive = [member for member in alive if not member.is_gone]
            if alive:
                await self._pause()

    @asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._log.info("signal", signal=number.name)
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()
        self._wake.set()

    @asynccontextmanager
    async def _watch(self) -> AsyncIterator[None]:
        if self._request.manifest is None:
            yield
            return
        task = asyncio.create_task(watch_manifest(self._request.manifest, self._reload))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _reload(self) -> None:
        """Take the manifest as it is now, if it is sound and still of this instance."""
        assert self._request.manifest is not None
        before = self._service, self._problems
        name = self._service.metadata.name
        match load_manifest(self._request.manifest):
            case InvalidManifest(problems):
                self._problems = problems
            case InferenceService(metadata=Metadata(name=other)) if other != name:
                self._problems = (
                    f"metadata.name: is {other}, but {name} is running: "
                    f"`isobatch down {name}` first, then `isobatch up` again",
                )
            case service:
                self._service, self._problems = service, ()
        if (self._service, self._problems) != before:
            self._log.info("manifest", problems=self._problems)
            self._wake.set()

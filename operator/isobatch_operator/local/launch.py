"""Performs `up`: in the foreground, or in a background process that outlives the caller."""

import asyncio
import logging
import os
import select
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

import psutil
import structlog
from isobatch_contracts.resource import InferenceService

from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.errors import LocalError
from isobatch_operator.local.fleet import Settings
from isobatch_operator.local.log_files import last_lines_of_run, open_log, prune
from isobatch_operator.local.ownership import clear_leftovers, lock_or_owner
from isobatch_operator.local.ports import require_free
from isobatch_operator.local.snippets import usable_tiers, welcome
from isobatch_operator.local.state import InstancePhase, LocalState
from isobatch_operator.local.supervisor import Request, Show, Supervisor
from isobatch_operator.local.table_view import Progress

_LOG_LINES = 15
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Launcher:
    """One `up`: what is served, and where it is kept."""

    service: InferenceService
    request: Request
    settings: Settings

    @property
    def directory(self) -> StateDirectory:
        """The instance's folder."""
        return self.settings.directory


def prepare(launcher: Launcher) -> IO[str]:
    """The lock of the instance, with nothing left of an earlier one. Raises LocalError."""
    directory = launcher.directory
    try:
        lock = lock_or_owner(directory)
    except OSError as exc:
        raise LocalError(
            f"the state folder {directory.path} cannot be used ({exc.strerror}): "
            "set ISOBATCH_STATE_DIR to another"
        ) from exc
    if isinstance(lock, psutil.Process):
        raise LocalError(already_running(directory))
    clear_leftovers(directory)
    prune(directory.logs)
    require_free(launcher.request.gateway.host, launcher.request.gateway.port)
    return lock


def already_running(directory: StateDirectory) -> str:
    """What to say to a second `up` of the same name."""
    state, name = directory.read_state(), directory.path.name
    assert state is not None, "its writer was found by it"
    pools = ", ".join(f"{p.name.value} {p.ready}/{p.desired}" for p in state.pools) or "no pool yet"
    return (
        f"{name} is already running: pid {state.supervisor.pid}, {state.url} "
        f"({state.phase.value}: {pools})\n"
        f"`isobatch status {name}` shows it, `isobatch down {name}` stops it"
    )


def run_foreground(launcher: Launcher, out: TextIO) -> bool:
    """Serve until Ctrl-C. True if everything was drained."""
    with prepare(launcher), Progress(out) as progress:
        is_welcomed = False

        def show(state: LocalState) -> None:
            nonlocal is_welcomed
            progress.show(state)
            if state.phase is InstancePhase.READY and not is_welcomed:
                is_welcomed = True
                progress.stop()
                out.write(_welcome(launcher, state) + "\n# Ctrl-C drains and stops everything\n")
                out.flush()

        return supervise(launcher, show)


def run_detached(launcher: Launcher, out: TextIO) -> None:
    """Serve in the background; return once all is ready. Raises LocalError if it cannot be."""
    lock = prepare(launcher)
    out.flush()
    alive, ours = os.pipe()
    if os.fork() == 0:
        os.close(alive)
        _become_background(launcher)
    os.close(ours)
    lock.close()  # the background process holds it now
    with Progress(out) as progress, os.fdopen(alive, "rb") as pipe:
        try:
            state = _follow(launcher, pipe, progress.show)
        except KeyboardInterrupt:
            name = launcher.service.metadata.name
            out.write(f"\n{name} goes on in the background: `isobatch down {name}` stops it\n")
            raise
    out.write(_welcome(launcher, state))
    out.write(f"\n# it runs in the background; `isobatch down {state.name}` stops it\n")


def supervise(launcher: Launcher, show: Show) -> bool:
    """Run the supervisor in this thread, with its log in `up.log`."""
    with open_log(launcher.directory.log_file("up"), "up") as log:
        _log_to(log.fileno())

        async def run() -> bool:
            supervisor = Supervisor(launcher.service, launcher.request, launcher.settings, show)
            return await supervisor.run()

        return asyncio.run(run())


def _become_background(launcher: Launcher) -> None:
    """In the forked child: leave the terminal and the caller behind, serve, and exit."""
    code = 1
    try:
        os.setsid()
        if os.fork() > 0:  # not a session leader: no terminal can become ours
            os._exit(0)
        with open_log(launcher.directory.log_file("up"), "background") as log:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        supervise(launcher, lambda _: None)
        code = 0
    except BaseException:  # noqa: BLE001  # the last frame of a process: nobody else would see it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _follow(launcher: Launcher, pipe: IO[bytes], show: Show) -> LocalState:
    """Show states until one is ready. `pipe` ends with the background process."""
    while True:
        has_ended = bool(select.select([pipe], [], [], _POLL_SECONDS)[0])
        state = launcher.directory.read_state()
        if state is not None and state.instance == launcher.settings.instance:
            show(state)
            if state.phase is InstancePhase.READY:
                return state
            if state.blocked:
                raise LocalError(_why_blocked(state))
        if has_ended:
            log = launcher.directory.log_file("up")
            raise LocalError(
                "\n".join(["`up` ended:", *last_lines_of_run(log, _LOG_LINES), f"log: {log}"])
            )


def _why_blocked(state: LocalState) -> str:
    parts = []
    for view in state.blocked:
        parts.append(f"{view.name} cannot become ready: {view.blocked}")
        parts += [f"  | {line}" for line in last_lines_of_run(Path(view.log), _LOG_LINES)]
        parts.append(f"log: {view.log}")
    parts.append(
        f"what is ready keeps serving, the rest is tried again; `isobatch status {state.name}` "
        f"shows it, `isobatch down {state.name}` stops it"
    )
    return "\n".join(parts)


def _welcome(launcher: Launcher, state: LocalState) -> str:
    has_keys = launcher.request.gateway.keys is not None
    tiers = usable_tiers(launcher.service.spec)
    return welcome(state.url, state.model, tiers, has_keys=has_keys)


def _log_to(descriptor: int) -> None:
    """JSON lines to `descriptor`, from structlog and from the libraries that warn."""
    stream = os.fdopen(os.dup(descriptor), "w", buffering=1)
    logging.basicConfig(stream=stream, level=logging.WARNING)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(stream),
    )

"""Performs the start and end of child processes, each with everything it ever forks.

Every child leads its own session and process group, ends with us (`isobatch_cli.lifetime`), and
carries tags in its environment by which it and its offspring are found again later.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from isobatch_cli.lifetime import DIE_WITH_PARENT

from isobatch_operator.local.log_files import open_log

INSTANCE_TAG = "ISOBATCH_INSTANCE"
PROCESS_TAG = "ISOBATCH_PROCESS"
_KILLED_SECONDS = 5.0  # the kernel ends a killed process soon, not at once
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start. `env` is added to our own environment."""

    name: str
    instance: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path


class Child:
    """A process that we started. Call from one thread only."""

    def __init__(self, launch: Launch) -> None:
        """Start it. Raises OSError if the program cannot be run."""
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",  # into a file
            **launch.env,
            INSTANCE_TAG: launch.instance,
            PROCESS_TAG: launch.name,
            DIE_WITH_PARENT: str(os.getpid()),
        }
        with open_log(launch.log, " ".join(launch.argv)) as log:
            self._popen = subprocess.Popen(  # noqa: S603  # our own command line, no shell
                launch.argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launch = launch
        self.started_at = time.time()
        self.created_at = _created_at(self._popen.pid)

    @property
    def pid(self) -> int:
        """The process, which is also its group and session."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None while it lives; afterwards its code, and nothing that it forked lives either."""
        if self._popen.returncode is None and _is_gone(self.pid):
            # The zombie keeps the pid, and with it the group's number, ours until it is reaped.
            self._kill_offspring()
            self._popen.wait()
        return self._popen.returncode

    def terminate(self) -> None:
        """Ask it to end, in its own time; its offspring is its own business until it has."""
        if self._popen.returncode is None:
            self._popen.terminate()

    def kill(self) -> None:
        """End it and its offspring now."""
        if self._popen.returncode is None:
            self._kill_offspring()
            self._popen.wait()

    def _kill_offspring(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, zombies only
            os.killpg(self.pid, signal.SIGKILL)
        tagged = find_tagged(self.launch.instance, self.launch.name)
        end([process for process in tagged if process.pid != self.pid], grace_seconds=0)


def _created_at(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return time.time()


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def find_tagged(instance_prefix: str, name: str | None = None) -> list[psutil.Process]:
    """Living processes of an instance, by the tags in their environment; never we ourselves."""
    ourselves = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in ourselves:
            continue
        try:
            environment = process.environ()
            is_dead = process.status() == psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's
        if is_dead or not environment.get(INSTANCE_TAG, "").startswith(instance_prefix):
            continue
        if name is None or environment.get(PROCESS_TAG) == name:
            found.append(process)
    return found


def find_recorded(pid: int, created_at: float) -> psutil.Process | None:
    """The process `pid` if it is still the one that was created then."""
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - created_at) < 1.0
        return process if is_same and is_alive(process) else None
    except psutil.Error:
        return None


def end(processes: Iterable[psutil.Process], grace_seconds: float) -> None:
    """Ask `processes` to end, wait up to `grace_seconds`, then kill; returns when they are gone."""
    alive = list(processes)
    if grace_seconds > 0:
        for process in alive:
            with suppress(psutil.Error):
                process.terminate()
        alive = wait_for_end(alive, grace_seconds)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    wait_for_end(alive, _KILLED_SECONDS)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs. A zombie does not, though in a container nobody may ever reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_for_end(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of `processes` that are still alive after `seconds`; returns early when none is."""
    deadline = time.monotonic() + seconds
    while alive := [process for process in processes if is_alive(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_SECONDS)
    return alive

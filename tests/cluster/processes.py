"""Performs the start and end of the cluster's processes, known by pid and time of start."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.errors import ClusterError

POLL_SECONDS = 0.05


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 60) -> float:
    """Poll until `holds`; the seconds that it took. Raises ClusterError past `seconds`."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() > begun + seconds:
            raise ClusterError(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - begun


@dataclass(frozen=True, slots=True)
class Running:
    """A process; its time of start tells it from a later one with the same pid."""

    pid: int
    started: float  # seconds since the epoch, as psutil says it

    @classmethod
    def of(cls, pid: int) -> "Running":
        """The process that has `pid` now."""
        return cls(pid, psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        """Whether it runs: a zombie does not."""
        try:
            return self._is_same() and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def is_gone(self) -> bool:
        """Whether nothing of it is left, not even a zombie; takes its exit code if it is ours."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return not self._is_same()

    def kill(self, what: str) -> None:
        """End it by SIGKILL, and wait until its ports and files are free again.

        A zombie is no sign of that: the first thread is one while others still end and hold them.
        """
        if self.is_alive():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).kill()
        wait_until(self.is_gone, f"{what} (pid {self.pid}) does not end")

    def _is_same(self) -> bool:
        try:
            # A correction of the machine's clock moves what psutil says by up to a second.
            return abs(psutil.Process(self.pid).create_time() - self.started) < 2
        except psutil.NoSuchProcess:
            return False

    def end(self, what: str, seconds: float = 10) -> None:
        """End it by SIGTERM, and by SIGKILL where it has not ended in `seconds`."""
        if not self.is_alive():
            return
        psutil.Process(self.pid).terminate()
        try:
            wait_until(self.is_gone, what, seconds)
        except ClusterError:
            self.kill(what)


def start(command: Sequence[str], log: Path, *, enters: bool) -> Running:
    """Start `command`, its output in `log`.

    With `enters` the command begins with a program (nsenter, unshare) that forks what it runs; the
    process returned is that child.
    """
    with log.open("ab") as output:
        outer = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    if not enters:
        return Running.of(outer.pid)
    found: list[psutil.Process] = []

    def has_child() -> bool:
        if outer.poll() is not None:
            raise ClusterError(
                f"{' '.join(command[:6])} … ended at once: {log.read_text()[-2000:]}"
            )
        found[:] = psutil.Process(outer.pid).children()
        return bool(found)

    wait_until(has_child, f"{command[0]} starts nothing")
    return Running(found[0].pid, found[0].create_time())


def run(command: Sequence[str], text: str | None = None) -> str:
    """Run `command` to its end and return what it said; raises ClusterError where it failed."""
    ran = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` ended with {ran.returncode}: {ran.stderr}")
    return ran.stdout

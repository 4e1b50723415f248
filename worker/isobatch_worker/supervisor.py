"""Performs the life of one vLLM: starts it, passes signals on, and leaves no process behind.

vLLM is a tree (API server, engine, workers). When the API server is killed its engine lives on;
this process adopts such orphans (PR_SET_CHILD_SUBREAPER) and ends them.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import IO

import psutil
from isobatch_cli.lifetime import DIE_WITH_PARENT

from isobatch_worker.compose import Launch

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 8.0


def supervise(launch: Launch) -> int:
    """Run `launch` until it ends or this process is told to; returns its exit code.

    SIGTERM and SIGINT are passed on to vLLM, which drains; what is left after a grace is killed.
    """
    child = start(launch, None)
    deadline: list[threading.Timer] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        if not deadline:
            timer = threading.Timer(_GRACE_SECONDS, kill_descendants)
            timer.daemon = True
            timer.start()
            deadline.append(timer)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    code = child.wait()
    kill_descendants()
    return code if code >= 0 else 128 - code


def start(launch: Launch, output: IO[str] | None) -> subprocess.Popen[bytes]:
    """Start `launch`, its orphans to be adopted by this process; it prints to `output`, or here."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    environment = {**os.environ, **launch.environment}
    environment.pop(DIE_WITH_PARENT, None)
    return subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
        (sys.executable, *launch.arguments), env=environment, stdout=output, stderr=output
    )


def kill_descendants() -> None:
    """Kill every process below this one, adopted orphans too, and reap them."""
    while children := psutil.Process().children(recursive=True):
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(children, timeout=1.0)

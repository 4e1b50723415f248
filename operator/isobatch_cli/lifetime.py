"""Performs one thing: ties the life of this process to its parent's.

A supervisor sets `ISOBATCH_DIE_WITH_PARENT=<its pid>` for a child; the dispatcher honours it before
it loads any command, so that even kill -9 of the supervisor leaves nothing behind.
"""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

DIE_WITH_PARENT = "ISOBATCH_DIE_WITH_PARENT"
"""Environment variable: the pid of the parent with which a program must end."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends; at once if it has.

    Linux only, elsewhere nothing happens. The setting outlives exec and is not inherited by
    children. The kernel watches the *thread* of the parent that started us: start such children
    from a thread that lives as long as the process.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    # The parent may have died between the fork and the call above; then nobody would tell us.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def honour_environment(environ: MutableMapping[str, str]) -> None:
    """Obey `ISOBATCH_DIE_WITH_PARENT` and remove it: our own children have another parent.

    Raises ValueError if the variable is not a pid.
    """
    text = environ.pop(DIE_WITH_PARENT, None)
    if text is None:
        return
    if not text.isdecimal():
        raise ValueError(f"{DIE_WITH_PARENT} must be the parent's pid, not {text!r}")
    die_with_parent(int(text))

"""Performs the look for who runs an instance, and the end of what one that was killed has left."""

import time
from typing import IO

import psutil

from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.errors import LocalError
from isobatch_operator.local.processes import end, find_recorded, find_tagged
from isobatch_operator.local.state import InstancePhase, LocalState

_GRACE_SECONDS = 2.0  # leftovers have had a signal already, when their supervisor died
_UNCLEAR_SECONDS = 5.0  # a supervisor takes the lock, then writes who it is; it dies in parts, too
_LOOK_SECONDS = 0.05


def lock_or_owner(directory: StateDirectory) -> IO[str] | psutil.Process:
    """The lock of the instance, or else the process that holds it."""
    deadline = time.monotonic() + _UNCLEAR_SECONDS
    while time.monotonic() < deadline:
        lock = directory.try_lock()
        if lock is not None:
            return lock
        state = directory.read_state()
        owner = supervisor_of(state) if state is not None else None
        if owner is not None:
            return owner
        time.sleep(_LOOK_SECONDS)
    raise LocalError(f"{directory.path.name} is just being started or stopped: try again")


def supervisor_of(state: LocalState) -> psutil.Process | None:
    """The supervisor that wrote `state`, if it lives."""
    return find_recorded(state.supervisor.pid, state.supervisor.created_at)


def current_state(directory: StateDirectory) -> LocalState | None:
    """The last state, with the phase `killed` if its supervisor is gone without a word."""
    state = directory.read_state()
    if state is None or state.phase is InstancePhase.STOPPED or supervisor_of(state) is not None:
        return state
    return state.model_copy(update={"phase": InstancePhase.KILLED})


def clear_leftovers(directory: StateDirectory) -> int:
    """End every process of the instance; how many that were. Call only with its lock."""
    state = directory.read_state()
    recorded = [find_recorded(r.pid, r.created_at) for r in state.processes] if state else []
    tagged = find_tagged(directory.instance_prefix)
    found = {process.pid: process for process in [*recorded, *tagged] if process is not None}
    end(found.values(), _GRACE_SECONDS)
    return len(found)

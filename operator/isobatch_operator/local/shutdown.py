"""Performs `down`: ends an instance, and whatever is left of it."""

import sys
import time
from contextlib import suppress

import psutil

from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.ownership import clear_leftovers, lock_or_owner
from isobatch_operator.local.processes import end, wait_for_end
from isobatch_operator.local.state import InstancePhase

_DRAIN_SECONDS = 90.0  # above the graces of gateway and workers together
_KILL_SECONDS = 20.0
_SIGNALS_APART_SECONDS = 0.5  # two signals that are pending together count as one


def stop_instance(directory: StateDirectory, *, at_once: bool) -> str:
    """End an instance; what there is to say. Raises LocalError."""
    name = directory.path.name
    owner = lock_or_owner(directory)
    if not isinstance(owner, psutil.Process):
        with owner:
            return _clear(directory, name)
    if sys.stderr.isatty():
        sys.stderr.write(f"stopping {name}; open requests may finish (--now does not wait)\n")
    _terminate(owner, twice=at_once)
    wait_for_end([owner], _KILL_SECONDS if at_once else _DRAIN_SECONDS)
    end([owner], grace_seconds=0)
    killed = clear_leftovers(directory)
    return f"{name} is stopped" + (f"; {killed} processes had to be killed" if killed else "")


def _clear(directory: StateDirectory, name: str) -> str:
    """End what nobody supervises any more."""
    ended = clear_leftovers(directory)
    state = directory.read_state()
    if state is not None and state.phase is not InstancePhase.STOPPED:
        update = {"phase": InstancePhase.STOPPED, "processes": (), "pools": (), "gateway": None}
        directory.write_state(state.model_copy(update=update))
    return f"{name} is not running" + (f"; ended {ended} processes it had left" if ended else "")


def _terminate(process: psutil.Process, *, twice: bool) -> None:
    with suppress(psutil.NoSuchProcess):
        process.terminate()
        if twice:
            time.sleep(_SIGNALS_APART_SECONDS)
            process.terminate()

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Poll until `condition` holds; returns the seconds it took."""
    started = time.monotonic()
    tick = threading.Event()
    while not condition():
        if time.monotonic() - started > seconds:
            pytest.fail(f"not within {seconds} s: {what}")
        tick.wait(0.1)
    return time.monotonic() - started


def processes_of(service: Any, pool: str, title: str) -> list[Any]:
    """Processes of a pool: those whose title holds `title`, or its worker's leader itself."""
    leaders = [p for p in service.processes(f"--pool {pool}") if "worker" in p.cmdline()]
    if title.startswith("--pool"):
        return leaders
    family = [child for leader in leaders for child in leader.children(recursive=True)]
    return [p for p in family if title in " ".join(p.cmdline())]

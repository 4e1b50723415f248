import threading
import time
from collections.abc import Callable

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

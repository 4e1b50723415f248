"""A child that is told to die with its parent does, however the parent dies."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from isobatch_cli.lifetime import DIE_WITH_PARENT, honour_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

CHILD = (
    "import os, signal; from isobatch_cli.lifetime import honour_environment;"
    "honour_environment(os.environ); print('tied', flush=True); signal.pause()"
)
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {CHILD!r}], env={{**os.environ, "{DIE_WITH_PARENT}": str(os.getpid())}},
    stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_kill_9_of_the_parent_ends_the_child() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()

    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    environ = {**os.environ, DIE_WITH_PARENT: "1" if os.getpid() != 1 else "2"}

    done = subprocess.run(
        [sys.executable, "-c", CHILD], check=False, env=environ, capture_output=True, timeout=30
    )

    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b""


def test_the_variable_is_not_handed_on_to_grandchildren() -> None:
    script = (
        "import os; from isobatch_cli.lifetime import *; honour_environment(os.environ);"
        "print(DIE_WITH_PARENT in os.environ)"
    )
    environ = {**os.environ, DIE_WITH_PARENT: str(os.getpid())}

    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environ, capture_output=True, text=True
    )

    assert done.stdout == "False\n"


def test_a_variable_that_is_no_pid_is_refused() -> None:
    with pytest.raises(ValueError, match="must be the parent's pid, not 'x'"):
        honour_environment({DIE_WITH_PARENT: "x"})

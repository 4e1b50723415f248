"""A child process is started, ended and found again with everything it forked."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from isobatch_operator.local.log_files import (
    last_lines,
    last_lines_of_run,
    open_log,
    prune,
    rotate_grown,
)
from isobatch_operator.local.processes import (
    Child,
    Launch,
    end,
    find_recorded,
    find_tagged,
    is_alive,
    wait_for_end,
)

Eventually = Callable[[Callable[[], bool]], None]
INSTANCE = f"test-{os.getpid()}"
LOOP = "import signal; print('up', flush=True); signal.pause()"
IGNORE = f"import signal; signal.signal(15, signal.SIG_IGN); {LOOP}"
FAMILY = f"""
import subprocess, sys
for away in (False, True):
    subprocess.Popen([sys.executable, "-c", {IGNORE!r}], start_new_session=away, stdout=-3)
{LOOP}
"""


@pytest.fixture
def start(tmp_path: Path, eventually: Eventually) -> Iterator[Callable[..., Child]]:
    """A child that has come as far as printing `up`."""

    def start_one(script: str, name: str = "one") -> Child:
        log = tmp_path / f"{name}.log"
        child = Child(Launch(name, INSTANCE, (sys.executable, "-c", script), {"X": "1"}, log))
        eventually(lambda: last_lines(log, 1) == ["up"] or child.exit_code() is not None)
        return child

    yield start_one
    end(find_tagged(INSTANCE), grace_seconds=0)


def test_a_child_leads_a_session_of_its_own_and_logs_to_its_file(
    start: Callable[..., Child],
) -> None:
    child = start(LOOP)

    assert os.getsid(child.pid) == child.pid
    assert child.exit_code() is None
    assert "one.log" in str(child.launch.log)
    assert psutil.Process(child.pid).environ()["X"] == "1"


def test_terminate_lets_it_end_and_the_code_says_how(
    start: Callable[..., Child], eventually: Eventually
) -> None:
    child = start(LOOP)

    child.terminate()

    eventually(lambda: child.exit_code() is not None)
    assert child.exit_code() == -signal.SIGTERM


def test_one_that_ignores_sigterm_is_killed(start: Callable[..., Child]) -> None:
    child = start(IGNORE)
    child.terminate()
    assert child.exit_code() is None

    child.kill()

    assert child.exit_code() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["killed by us", "killed by another"])
def test_its_offspring_ends_with_it_even_in_another_session(
    start: Callable[..., Child], eventually: Eventually, how: str
) -> None:
    child = start(FAMILY)
    family = psutil.Process(child.pid).children(recursive=True)
    assert len(family) == 2

    if how == "killed by us":
        child.kill()
    else:
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: child.exit_code() is not None)

    assert wait_for_end(family, 10) == []


def test_another_childs_processes_are_left_alone(start: Callable[..., Child]) -> None:
    one, two = start(FAMILY, "one"), start(FAMILY, "two")

    one.kill()

    assert two.exit_code() is None
    assert len(psutil.Process(two.pid).children()) == 2


def test_tagged_processes_are_found_by_instance_and_by_name(start: Callable[..., Child]) -> None:
    one, two = start(FAMILY, "one"), start(LOOP, "two")

    assert len(find_tagged(INSTANCE)) == 4
    assert [p.pid for p in find_tagged(INSTANCE, "two")] == [two.pid]
    assert one.pid in [p.pid for p in find_tagged(INSTANCE[:-1])]
    assert find_tagged(INSTANCE + "x") == []


def test_a_recorded_process_is_found_only_if_it_is_the_same(start: Callable[..., Child]) -> None:
    child = start(LOOP)

    assert find_recorded(child.pid, child.created_at) is not None
    assert find_recorded(child.pid, child.created_at - 60) is None
    child.kill()
    assert find_recorded(child.pid, child.created_at) is None


def test_a_zombie_counts_as_gone(eventually: Eventually) -> None:
    popen = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(popen.pid)

    eventually(lambda: process.status() == psutil.STATUS_ZOMBIE)

    assert not is_alive(process)
    popen.wait()


def test_a_program_that_does_not_exist_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Child(Launch("x", INSTANCE, ("/nowhere/program",), {}, tmp_path / "x.log"))


def test_a_grown_log_is_cut_while_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with open_log(path, "title") as file:
        file.write(b"x" * 100 + b"\nold\n")

        rotate_grown(path, limit_bytes=50)
        file.write(b"new\n")

    assert path.read_bytes() == b"new\n"
    assert last_lines(tmp_path / "a.log.1", 1) == ["old"]


def test_last_lines_skips_blank_ones_and_survives_bad_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n\n  \ntwo\xff\n\n")

    assert last_lines(path, 5) == ["one", "two\ufffd"]
    assert last_lines(path, 1) == ["two\ufffd"]
    assert last_lines(tmp_path / "none.log", 5) == []


def test_the_lines_of_a_run_are_those_since_its_start_without_colours(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with open_log(path, "first") as file:
        file.write(b"old\n")
    with open_log(path, "second") as file:
        file.write(b"\x1b[31mred\x1b[0m\nnew\n")

    assert last_lines_of_run(path, 5) == ["red", "new"]
    assert last_lines_of_run(path, 1) == ["new"]


def test_old_logs_are_pruned(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / f"strict-0-{number:02}.log"
        path.touch()
        os.utime(path, (number, number))

    prune(tmp_path)

    assert sorted(p.name for p in tmp_path.iterdir())[0] == "strict-0-08.log"

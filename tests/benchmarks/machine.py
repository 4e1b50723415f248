"""Performs: pins processes to cores and reads what they cost; says what machine this is."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
LOAD_CORE = 0
TARGET_CORE = 1
_PIN = (
    "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def start(
    command: Sequence[str],
    core: int,
    log: IO[str],
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start `command`, pinned to `core` where there are two. Its errors go to `log`."""
    cores = sorted(os.sched_getaffinity(0))
    pin = [sys.executable, "-c", _PIN, str(cores[core])] if len(cores) > 1 else []
    return subprocess.Popen(
        [*pin, *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=log,
        env=env,
        text=True,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """End `process` and what it started; kill what does not end in ten seconds."""
    family = tree(process.pid)
    for member in family:
        _signal(member)
    _, alive = psutil.wait_procs([psutil.Process(p) for p in family if psutil.pid_exists(p)], 10)
    for survivor in alive:
        survivor.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _signal(pid: int) -> None:
    try:
        psutil.Process(pid).terminate()
    except psutil.NoSuchProcess:
        return


def tree(pid: int) -> tuple[int, ...]:
    """`pid` and all its descendants."""
    try:
        return (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far, and resident megabytes now, of some processes together."""

    cpu_seconds: float
    memory_mb: float


def usage(pids: Iterable[int]) -> Usage:
    """Read /proc: user and system time of all threads, and the resident set, of `pids`."""
    ticks = pages = 0
    for pid in pids:
        # The command in parentheses may hold spaces: fields are counted after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
        pages += int(fields[21])
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return Usage(ticks / tick, pages * page / 1e6)


def pace_ms() -> float:
    """Median milliseconds of a fixed piece of Python on one core: how fast the machine is now.

    A figure of another machine, or of this one beside a busy neighbour, is compared by it.
    """
    document = {str(n): [n, n / 7, "x" * (n % 40)] for n in range(600)}
    times = []
    for _ in range(25):
        started = time.perf_counter()
        for _ in range(4):
            json.loads(json.dumps(document))
        times.append((time.perf_counter() - started) * 1000)
    return round(statistics.median(times), 3)


def slowness() -> float:
    """How much slower than at the kept run a fixed piece of Python is here and now; at least 1."""
    kept = json.loads((RESULTS / "gateway.json").read_text())["machine"]["pace_ms"]
    return max(1.0, pace_ms() / float(kept.split()[0]))


def stolen_ticks() -> tuple[int, int]:
    """(ticks that the hypervisor gave to others, all ticks) so far, over all cores."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[7], sum(fields)


def describe() -> dict[str, str]:
    """What machine and versions a figure belongs to."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in info if "model name" in line), "?")
    cores = sorted(os.sched_getaffinity(0))
    pinned = "target alone on one core, client and stub on another"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": model,
        "cores": str(len(cores)),
        "pinned": pinned if len(cores) > 1 else "no: one core",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        ran = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return ran.stdout.strip()

    dirty = " and uncommitted changes" if git("status", "--porcelain") else ""
    return git("rev-parse", "--short", "HEAD") + dirty

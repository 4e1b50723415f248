"""Performs what every program for the card needs: a deadline, the facts of the machine, and medians
of CUDA graph replays with the rivals interleaved."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

Call = Callable[[], object]
ROUNDS = 15


class Deadline:
    """Seconds of a budget that are left, by a monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def passed(self) -> bool:
        return self.left() <= 0


def say(text: str) -> None:
    """A line of progress, at once: the end of a killed program's output must not be lost."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def facts() -> dict[str, str]:
    """Card, driver and versions."""
    found = {
        "card": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "multiprocessors": str(torch.cuda.get_device_properties(0).multi_processor_count),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": _driver(),
    }
    for name in ("triton", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"unknown: {exc}"


def save(folder: Path, name: str, report: Mapping[str, object]) -> None:
    """Write `report` whole, so that a program cut short leaves what it had."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of `calls` in order, each run once before: what compiles must not be captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def medians(
    contenders: Mapping[str, Sequence[Call]], failures: dict[str, str], rounds: int = ROUNDS
) -> dict[str, float]:
    """Median microseconds a call of each contender, replayed in turn, `rounds` times.

    A contender is its calls, one for each set of inputs, so that inputs do not stay in the cache.
    One that cannot run is left out and its reason put into `failures`.
    """
    graphs = {}
    for name, calls in contenders.items():
        try:
            graphs[name] = capture(calls)
        except Exception as exc:  # noqa: BLE001  # one failure must not cost the other figures
            failures[name] = f"{type(exc).__name__}: {exc}"[:500]
            say(f"  FAILED {name}: {failures[name][:200]}")
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / len(contenders[name]))
    return {name: statistics.median(found[2:]) for name, found in times.items()}

"""What the GPU programs share: the card, a budget, and JSON that is whole after each step."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from tests.gpu.shapes import ExpertShape, Shape

Measured = TypeVar("Measured", Shape, ExpertShape)


def environment() -> dict[str, str]:
    """Card, driver and versions, as a result must name them."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as exc:
        driver = f"unknown: {exc}"
    capability = torch.cuda.get_device_capability()
    return {
        "card": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, capability)),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


class Budget:
    """Seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self._started = time.monotonic()
        self._seconds = seconds

    def spent(self) -> float:
        return time.monotonic() - self._started

    def is_spent(self) -> bool:
        return self.spent() >= self._seconds


@dataclass(frozen=True, slots=True)
class Record:
    """A growing result; `save` after each step, so that an interrupted run leaves what it had."""

    path: Path
    data: dict[str, Any]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def attempted(step: Callable[[], Any]) -> Any:
    """What `step` returns, or what it raised, in words: a failure is a result and ends nothing."""
    try:
        return step()
    except Exception as exc:  # noqa: BLE001  # whatever it was, the rest of the run is worth having
        return f"{type(exc).__name__}: {exc}"


def say(budget: Budget, text: str) -> None:
    """A progress line, flushed: the reader may have only the end of the output."""
    print(f"[{budget.spent():6.1f} s] {text}", flush=True)


def measure_each(
    shapes: Sequence[Measured],
    measure: Callable[[Measured, Budget], dict[str, Any]],
    budget: Budget,
    record: Record,
) -> list[dict[str, Any]]:
    """What `measure` finds of each shape, or why it found nothing, kept in `record` as it comes."""
    results: list[dict[str, Any]] = []
    record.data["shapes"] = results
    for shape in shapes:
        if budget.is_spent():
            results.append({**asdict(shape), "error": "not run: the budget was spent"})
            continue
        found = attempted(partial(measure, shape, budget))
        results.append(found if isinstance(found, dict) else {**asdict(shape), "error": found})
        record.save()
        torch.cuda.empty_cache()
        say(budget, f"{shape.model} {shape.layer}: {results[-1].get('error', 'done')}")
    record.data["seconds"] = budget.spent()
    record.save()
    return results

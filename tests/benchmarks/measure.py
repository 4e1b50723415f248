"""Performs the scenarios against a target: each load by a client process of its own."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import TypeAdapter

from tests.benchmarks.client import GRACE_SECONDS, Order
from tests.benchmarks.load import Load, Outcome
from tests.benchmarks.machine import LOAD_CORE, start, stop
from tests.benchmarks.scenarios import Pair, Scenario
from tests.benchmarks.targets import Target

WARM_UP = Load(rate=50, requests=100, chunks=5, interval_ms=5, window_start=0, window_end=1)


def measure(
    target: Target,
    stub: Target,
    scenarios: Mapping[str, Scenario],
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, list[Pair]]:
    """What came of each scenario, round by round. A target that failed the warm-up raises."""
    warm = send(WARM_UP, target, folder)
    if warm.ok != WARM_UP.requests:
        raise RuntimeError(f"{target.name} failed the warm-up: {warm}")
    found: dict[str, list[Pair]] = {}
    for name, scenario in scenarios.items():
        rounds = []
        for number in range(scenario.rounds):
            say(f"{target.name}: {name}, round {number + 1} of {scenario.rounds}")
            is_beside = scenario.is_beside_direct and target != stub
            direct = send(scenario.load, stub, folder) if is_beside else None
            rounds.append(Pair(send(scenario.load, target, folder), direct))
        found[name] = rounds
    return found


def send(load: Load, target: Target, folder: Path) -> Outcome:
    """Send `load` to `target` from another process."""
    order = Order(load, target.port, target.headers, target.pids)
    with (folder / "client.log").open("a+") as log:
        client = start([sys.executable, "-m", "tests.benchmarks.client"], LOAD_CORE, log)
        try:
            # Holding a thousand streams takes seconds, and so do percentiles of a million values.
            limit = load.duration + GRACE_SECONDS + 60
            text, _ = client.communicate(json.dumps(dataclasses.asdict(order)), timeout=limit)
        finally:
            stop(client)
        if client.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"the client failed:\n{log.read()[-2000:]}")
    return TypeAdapter(Outcome).validate_json(text)

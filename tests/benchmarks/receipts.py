"""Performs the cost of receipts: `uv run python -m tests.benchmarks.receipts [--quick]`.

The same strict load goes through a gateway without receipts and one with, in turn, round by round;
beside it the device's own fsync. What is kept is in results/receipts.json.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tests.benchmarks.load import Outcome, Percentiles, percentiles
from tests.benchmarks.machine import RESULTS, describe
from tests.benchmarks.measure import WARM_UP, send
from tests.benchmarks.scenarios import Times, first_byte, middle
from tests.benchmarks.stub import raise_file_limit
from tests.benchmarks.targets import Target, isobatch, stub_worker
from tests.gateway.receipts.postgres import postgres

Value = TypeVar("Value")
WITHOUT, SQLITE, POSTGRESQL = "without", "sqlite", "postgresql"


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """What a ledger adds, in ms: to the first byte, and to the whole answer."""

    first_byte: Times
    answer: Times


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What was measured. `fsync_ms` is of the disk that the ledgers are on."""

    fsync_ms: Times
    added: dict[str, Added]
    cpu_ms_per_request: dict[str, float]


def measure_cost(rounds: int, seconds: int, folder: Path) -> Cost:
    """The same load through three gateways in turn, `rounds` times `seconds` each."""
    load = first_byte(seconds)
    with ExitStack() as stack:
        stub = stack.enter_context(stub_worker(folder))
        server = stack.enter_context(postgres())
        keys = ("--receipt-keys", str(folder / "keys"))
        options = {
            WITHOUT: ("--no-receipts",),
            SQLITE: ("--receipts", str(folder / "receipts.db"), *keys),
            POSTGRESQL: ("--receipts", server.url, *keys),
        }
        targets: dict[str, Target] = {}
        for name, chosen in options.items():
            (folder / name).mkdir()
            targets[name] = stack.enter_context(
                isobatch(stub, folder / name, *chosen, tier="strict")
            )
            send(WARM_UP, targets[name], folder)
        found: dict[str, list[Outcome]] = {name: [] for name in targets}
        fsyncs = []
        for number in range(rounds):
            for name, target in targets.items():
                print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr)
                outcome = send(load, target, folder)
                assert (outcome.errored, outcome.lost) == (0, 0), outcome
                found[name].append(outcome)
            fsyncs.append(fsync_ms(folder))
    return _cost(found, fsyncs)


def _cost(found: dict[str, list[Outcome]], fsyncs: Sequence[Percentiles]) -> Cost:
    def added(name: str, figure: str) -> Times:
        pairs = zip(found[name], found[WITHOUT], strict=True)
        rounds = [_less(getattr(a, figure), getattr(b, figure)) for a, b in pairs]
        return _sure(middle(rounds))

    return Cost(
        fsync_ms=_sure(middle(fsyncs)),
        added={
            name: Added(added(name, "first_byte_ms"), added(name, "answer_ms"))
            for name in (SQLITE, POSTGRESQL)
        },
        cpu_ms_per_request={
            name: round(sorted(o.cpu_ms_per_request or 0 for o in each)[len(each) // 2], 3)
            for name, each in found.items()
        },
    )


def fsync_ms(folder: Path, count: int = 400) -> Percentiles:
    """How long the disk under `folder` takes to have 4 KiB more of a file for good."""
    spent = []
    with (folder / "fsync").open("ab", buffering=0) as file:
        for _ in range(count):
            begun = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            spent.append((time.perf_counter() - begun) * 1000)
    return _sure(percentiles(spent))


def _less(a: Percentiles, b: Percentiles) -> Times:
    return Times(a.p50 - b.p50, a.p95 - b.p95, a.p99 - b.p99)


def _sure(value: Value | None) -> Value:
    assert value is not None
    return value


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample, printed and not kept")
    options = parser.parse_args()
    raise_file_limit()
    with tempfile.TemporaryDirectory() as base:
        cost = measure_cost(2 if options.quick else 7, 4 if options.quick else 6, Path(base))
    text = json.dumps({"machine": describe(), **dataclasses.asdict(cost)}, indent=1)
    print(text)
    if not options.quick:
        (RESULTS / "receipts.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

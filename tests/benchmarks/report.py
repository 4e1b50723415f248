"""Decides how the figures of one run are written: JSON with all of them, Markdown to read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from tests.benchmarks.scenarios import (
    Pair,
    Times,
    added_first_byte_ms,
    first_byte_ms,
    middle,
)
from tests.benchmarks.targets import Target

Results = Mapping[str, Mapping[str, Sequence[Pair]]]
"""Target -> scenario -> its rounds."""


def as_json(machine: Mapping[str, str], targets: Sequence[Target], results: Results) -> str:
    """Everything measured, with machine and versions."""
    document = {
        "machine": dict(machine),
        "versions": {target.name: target.version for target in targets},
        "results": {
            name: {
                scenario: [dataclasses.asdict(pair) for pair in pairs]
                for scenario, pairs in scenarios.items()
            }
            for name, scenarios in results.items()
        },
    }
    return json.dumps(document, indent=1) + "\n"


def as_markdown(machine: Mapping[str, str], targets: Sequence[Target], results: Results) -> str:
    """A table for each scenario, the targets side by side."""
    lines = ["# Gateway benchmark", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [f"- {target.name}: {target.version}" for target in targets]
    scenarios = dict.fromkeys(name for found in results.values() for name in found)
    for scenario in scenarios:
        lines += ["", f"## {scenario}", "", *_table(scenario, results)]
    return "\n".join(lines) + "\n"


def _table(scenario: str, results: Results) -> list[str]:
    head = "target | first byte ms p50/p95/p99 | added ms p50/p95/p99 | chunk delay ms p50/p95/p99"
    head += " | CPU us a chunk | CPU ms a request | MB start, end | ok, errored, lost, late"
    rows = [f"| {head} |", "|" + " --- |" * (head.count("|") + 1)]
    for name, found in results.items():
        if scenario in found:
            rows.append(f"| {name} | {' | '.join(_cells(found[scenario]))} |")
    return rows


def _cells(pairs: Sequence[Pair]) -> list[str]:
    through = [pair.through for pair in pairs]
    last = through[-1]
    counts = [sum(getattr(o, n) for o in through) for n in ("ok", "errored", "lost", "late")]
    memory = (last.memory_start_mb, last.memory_end_mb)
    return [
        _times(first_byte_ms(through)),
        _times(added_first_byte_ms(pairs)),
        _times(middle([o.chunk_delay_ms for o in through if o.chunk_delay_ms is not None])),
        _number(last.cpu_us_per_chunk),
        _number(last.cpu_ms_per_request),
        ", ".join(_number(m) for m in memory),
        ", ".join(str(c) for c in counts),
    ]


def _times(times: Times | None) -> str:
    return "-" if times is None else f"{times.p50:.2f} / {times.p95:.2f} / {times.p99:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

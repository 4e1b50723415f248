"""Performs the gateway benchmark: `uv run python -m tests.benchmarks.run [--quick] [TARGET ...]`.

Direct, isobatch and its rivals answer the same loads in one run; results/ holds the last full one.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.machine import RESULTS, describe, pace_ms, stolen_ticks
from tests.benchmarks.measure import measure
from tests.benchmarks.report import as_json, as_markdown
from tests.benchmarks.scenarios import FULL, QUICK, Pair, Scenario
from tests.benchmarks.stub import raise_file_limit
from tests.benchmarks.targets import TARGETS, Target, stub_worker


def run(
    names: Sequence[str], scenarios: dict[str, Scenario]
) -> tuple[list[Target], dict[str, dict[str, list[Pair]]]]:
    """Measure the targets one after the other, in front of one stub."""
    targets, results = [], {}
    with tempfile.TemporaryDirectory() as base, stub_worker(Path(base)) as stub:
        direct = Target("direct", "-", stub, "", ())
        for name in names:
            folder = Path(base) / name
            folder.mkdir()
            with TARGETS[name](stub, folder) as target:
                targets.append(target)
                results[target.name] = measure(target, direct, scenarios, folder, _say)
    return targets, results


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and write or print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample, printed and not kept")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; default: all")
    options = parser.parse_args()
    raise_file_limit()
    machine = describe()
    before, stolen = pace_ms(), stolen_ticks()
    names = options.targets or list(TARGETS)
    targets, results = run(names, QUICK if options.quick else FULL)
    share = [after - first for after, first in zip(stolen_ticks(), stolen, strict=True)]
    machine["pace_ms"] = f"{before} before, {pace_ms()} after (a fixed piece of Python)"
    machine["stolen by the host"] = f"{100 * share[0] / share[1]:.1f} % of the time"
    text = as_markdown(machine, targets, results)
    print(text)
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "gateway.json").write_text(as_json(machine, targets, results))
        (RESULTS / "gateway.md").write_text(text)


if __name__ == "__main__":
    main()

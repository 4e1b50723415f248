"""`isobatch up` with fake programs and short waits: `fake_up.py [--patient] UP-ARGV`.

Patient: it waits for ever for processes that do not end when asked.
"""

import sys
from dataclasses import replace
from pathlib import Path

from isobatch_cli.main import run_quietly
from isobatch_operator.backoff import Backoff
from isobatch_operator.local.programs import (
    GatewayStart,
    Pace,
    Programs,
    Timings,
    WorkerStart,
)
from isobatch_operator.local.up_command import run_up
from isobatch_operator.plan import Policy

FAKES = Path(__file__).parent
FAST = Timings(
    tick_seconds=0.05,
    probe_timeout_seconds=5.0,
    worker=Pace(grace_seconds=1.0, every_starting_seconds=0.05, every_ready_seconds=0.1),
    gateway=Pace(grace_seconds=5.0, every_starting_seconds=0.05, every_ready_seconds=0.1),
    policy=Policy(backoff=Backoff(first_seconds=0.5), drain_settle_seconds=0.2),
)


def fake_worker(start: WorkerStart) -> tuple[str, ...]:
    return (
        *(sys.executable, str(FAKES / "fake_worker.py")),
        *("--pool", start.pool.value, "--port", str(start.port)),
        *("--served-model-name", start.revision.served_name),
        *start.revision.pools[start.pool].runtime.args,
    )


def fake_gateway(start: GatewayStart) -> tuple[str, ...]:
    return (
        *(sys.executable, str(FAKES / "fake_gateway.py"), "--tables", str(start.tables)),
        *("--host", start.at.host, "--port", str(start.at.port), "--secret", str(start.secret)),
    )


if __name__ == "__main__":
    argv = sys.argv[1:]
    timings = FAST
    if argv[:1] == ["--patient"]:
        del argv[0]
        timings = replace(FAST, worker=replace(FAST.worker, grace_seconds=3600.0))
    sys.exit(run_quietly(lambda: run_up(argv, Programs(fake_worker, fake_gateway), timings)))

"""Decides the command lines of the processes that local mode starts."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from isobatch_contracts.tiers import PoolName

from isobatch_operator.plan import Policy
from isobatch_operator.revision import Revision

_PROGRAM = (sys.executable, "-m", "isobatch_cli")
WORKER_HOST = "127.0.0.1"
"""Workers are reached through the gateway only."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker's command line depends on."""

    pool: PoolName
    revision: Revision
    port: int


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the gateway listens, and the file of the keys that it asks for, if any."""

    host: str
    port: int
    keys: Path | None


@dataclass(frozen=True, slots=True)
class GatewayStart:
    """What the gateway's command line depends on."""

    at: Listening
    tables: Path
    secret: Path
    receipts: Path


def worker_command(start: WorkerStart) -> tuple[str, ...]:
    """`isobatch worker …` for one replica."""
    model = start.revision.model
    runtime = start.revision.pools[start.pool].runtime
    length = () if runtime.max_model_len is None else ("--max-model-len", runtime.max_model_len)
    return (
        *_PROGRAM,
        *("worker", "--pool", start.pool.value, "--model", model.uri),
        *(() if model.digest is None else ("--digest", model.digest)),
        *("--served-model-name", start.revision.served_name),
        *("--host", WORKER_HOST, "--port", str(start.port), "--"),
        *map(str, length),
        *runtime.args,
    )


def gateway_command(start: GatewayStart) -> tuple[str, ...]:
    """`isobatch gateway …` over the tables of this service."""
    return (
        *_PROGRAM,
        *("gateway", "--tables", str(start.tables)),
        *("--host", start.at.host, "--port", str(start.at.port), "--secret", str(start.secret)),
        *("--receipts", str(start.receipts), "--receipt-chain", "gateway"),
        *(() if start.at.keys is None else ("--keys", str(start.at.keys))),
    )


@dataclass(frozen=True, slots=True)
class Programs:
    """Which programs are started; tests put small ones in their place."""

    worker: Callable[[WorkerStart], tuple[str, ...]] = worker_command
    gateway: Callable[[GatewayStart], tuple[str, ...]] = gateway_command


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a process is probed, and how long it may take to end when asked."""

    grace_seconds: float
    every_starting_seconds: float = 0.5
    every_ready_seconds: float = 2.0


_WORKER_PACE = Pace(grace_seconds=10.0)
_GATEWAY_PACE = Pace(grace_seconds=40.0)  # its own drain has a deadline; this is past it


@dataclass(frozen=True, slots=True)
class Timings:
    """How often local mode looks, and how long it waits."""

    tick_seconds: float = 0.25
    probe_timeout_seconds: float = 10.0
    worker: Pace = _WORKER_PACE
    gateway: Pace = _GATEWAY_PACE
    policy: Policy = field(default_factory=Policy)

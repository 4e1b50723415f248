"""Decides the gateway's limits and timeouts; one frozen record, built at start."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All in seconds."""

    connect: float = 2.0
    first_byte: float = 600.0  # an unstreamed answer has its first byte when it is complete
    idle: float = 120.0  # between two reads of an answer
    total: float = 3600.0
    write: float = 30.0  # a client that does not read
    head: float = 15.0  # request line and headers
    body: float = 30.0  # between two reads of a request's body
    keep_alive: float = 75.0
    drain: float = 30.0
    check: float = 5.0  # readiness, load figures
    probe: float = 30.0  # the one-token probe: a busy CPU worker may take long
    suspect: float = 30.0  # a replica that owes an answer and says nothing for so long is probed

    def __post_init__(self) -> None:
        """Refuse values that would switch a bound off."""
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"timeout {name} must be above 0; got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sizes that a client may not exceed."""

    body_bytes: int = 16 * 1024 * 1024
    url_bytes: int = 8 * 1024
    header_bytes: int = 64 * 1024
    headers: int = 128


@dataclass(frozen=True, slots=True)
class Breaking:
    """When a replica is taken out, and how soon it is tried again (seconds)."""

    failures: int = 5  # in a row; a refused connection counts as all of them
    first_pause: float = 0.5
    longest_pause: float = 1.0  # probes are cheap: recovery matters more than a probe a second


@dataclass(frozen=True, slots=True)
class ReceiptSettings:
    """Where receipts are kept. `ledger`: SQLite's file, or the URL of a PostgreSQL database.

    `keys` is a folder with what signs, encrypts and makes digests; `chain` this gateway's own name.
    """

    ledger: str
    keys: Path
    chain: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the gateway is told at start. Without `tables` it watches the cluster."""

    tables: Path | None = None
    namespaces: tuple[str, ...] = ()  # that are watched; none: all
    keys: Path | None = None
    secret: Path | None = None
    receipts: ReceiptSettings | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    drain_delay: float = 0.0  # seconds that `readyz` fails before the listener closes
    check_interval: float = 1.0
    table_interval: float = 0.2
    log_level: str = "info"
    access_log: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)
    bounds: Bounds = field(default_factory=Bounds)
    breaking: Breaking = field(default_factory=Breaking)

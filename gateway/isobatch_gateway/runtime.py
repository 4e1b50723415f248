"""Performs: everything that lives as long as the gateway, and the tasks that keep it current."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import structlog
from isobatch_contracts.fields import duration_seconds
from isobatch_contracts.tiers import Tier

from isobatch_gateway import identity, keys
from isobatch_gateway.errors import DrainDeadline, SettingsInvalid
from isobatch_gateway.fleet import Fleet, Replica, ReplicaId
from isobatch_gateway.health import Watcher
from isobatch_gateway.idempotency import IdempotencyKeys
from isobatch_gateway.interrupt import Interruptible
from isobatch_gateway.limits import Gate
from isobatch_gateway.metrics import Metrics
from isobatch_gateway.orders import Principal
from isobatch_gateway.receipts.keeper import Keeper
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.settings import Settings
from isobatch_gateway.table_source import Source, TableSource
from isobatch_gateway.upstream.control import PoolTransport
from isobatch_gateway.upstream.pool import Pools

if TYPE_CHECKING:
    from isobatch_gateway.cluster_source import ClusterSource

_LEAST_SECRET = 16  # bytes
_MOST_RECENT = 10_000


class Runtime:
    """Built once at start and passed to whoever needs it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.secret = read_secret(settings.secret)
        self.keys = None if settings.keys is None else _KeyFile(settings.keys)
        self._wake = asyncio.Event()
        self._cluster = _cluster_source(settings, self._wake) if settings.tables is None else None
        self.source: Source = self._cluster or TableSource(settings.tables or Path())
        self.fleet = Fleet(settings.breaking)
        self.metrics = Metrics()
        self.pools = Pools(settings.timeouts.connect)
        self.idempotency = IdempotencyKeys()
        self.key_gates: dict[tuple[str, Tier], Gate] = {}
        self.open: set[Interruptible] = set()
        self.is_draining = False
        self.receipts = None if settings.receipts is None else Keeper(settings.receipts, self.pools)
        self._salts: dict[str, str] = {}
        self._watchers: dict[ReplicaId, asyncio.Task[None]] = {}
        self._client = httpx.AsyncClient(transport=PoolTransport(self.pools), trust_env=False)

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here at all."""
        return bool(self.fleet.services) and not self.is_draining

    async def connect(self) -> None:
        """Learn where the cluster is, if we watch one. Raises SettingsInvalid."""
        if self._cluster is not None:
            await self._cluster.connect()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep tables, keys and replicas current until the block ends."""
        if self.settings.secret is None:
            structlog.get_logger().warning(
                "no --secret file: salts and seeds of idempotency keys end with this process"
            )
        if self.receipts is not None:
            self.receipts.start()
        self.refresh()
        jobs = [asyncio.create_task(self._keep_fresh())]
        if self._cluster is not None:
            jobs.append(asyncio.create_task(self._cluster.run()))
        try:
            yield
        finally:
            tasks = [*jobs, *self._watchers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.receipts is not None:
                await self.receipts.stop()
            await self._client.aclose()
            self.pools.close()

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, while there is one that can be written."""
        return None if self.receipts is None else self.receipts.ledger

    def salt(self, tenant: str) -> str:
        """The tenant's cache salt; tenants are those of the keys file, so that they are few."""
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = identity.cache_salt(self.secret, tenant)
        return salt

    def refresh(self) -> None:
        """Take in what changed on disk."""
        if self.keys is not None:
            self.keys.refresh()
        if not self.source.poll(asyncio.get_running_loop().time()):
            return
        if self.receipts is not None:
            kept = [duration_seconds(t.receipts.retention) for t in self.source.tables()]
            self.receipts.retention = max(kept, default=float("inf"))
        came, went = self.fleet.apply(self.source.tables(), time.time())
        for replica in went:
            self._forget(replica)
        for replica in came:
            watcher = Watcher(replica, self._client, self.settings)
            self._watchers[replica.id] = asyncio.create_task(watcher.run())

    def end_all(self) -> None:
        """The drain deadline: what is still open gets its error and ends."""
        for work in list(self.open):
            work.end(DrainDeadline("the gateway is stopping"))

    def _forget(self, replica: Replica) -> None:
        self._watchers.pop(replica.id).cancel()
        # Its open answers go on; a replica of another table may share the address.
        if all(other.id.url != replica.id.url for other in self.fleet.replicas()):
            self.pools.drop(replica.id.url)

    async def _keep_fresh(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.table_interval):
                    await self._wake.wait()
            self._wake.clear()
            try:
                self.refresh()
            except Exception:  # noqa: BLE001  # a bad moment must not end the watch for good
                structlog.get_logger().exception("refresh failed")
            for replica in self.fleet.replicas():
                self.pools.at(replica.id.url).prune()


def _cluster_source(settings: Settings, wake: asyncio.Event) -> "ClusterSource":
    # Not imported before it is asked for: the client library takes a second and 40 MB.
    from isobatch_gateway.cluster_source import ClusterSource

    return ClusterSource(settings.namespaces, wake)


class _KeyFile:
    """The keys file, read again when it changes; a broken one leaves the last good keys."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self.ring = keys.KeyRing(())
        self._principals: dict[str, Principal] = {}
        self._recent: dict[str, Principal] = {}
        try:
            self._read()
        except OSError as exc:
            raise SettingsInvalid(f"keys file {path}: {exc.strerror}") from exc

    def principal(self, authorization: str | None) -> Principal | None:
        """Who asks; None if the key is missing or unknown.

        Headers that were good are remembered until the file changes: a look instead of a hash.
        """
        found = self._recent.get(authorization or "")
        if found is not None:
            return found
        key = self.ring.holder(keys.bearer(authorization))
        if key is None or authorization is None:
            return None
        if len(self._recent) >= _MOST_RECENT:  # one key may come with any number of spaces
            self._recent.clear()
        found = self._recent[authorization] = self._principals[key.id]
        return found

    def refresh(self) -> None:
        """Read the file if it changed."""
        try:
            if _stamp(self._path) != self._stamp:
                self._read()
        except (OSError, SettingsInvalid) as exc:
            structlog.get_logger().warning("keys file not read", error=str(exc))

    def _read(self) -> None:
        self._stamp = _stamp(self._path)
        known = keys.parse(self._path.read_bytes()).keys
        self.ring = keys.KeyRing(known)
        self._principals = {key.id: Principal.of(key) for key in known}
        self._recent = {}


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_secret(path: Path | None) -> bytes:
    """The gateway's secret; a file that does not exist is made, readable by its owner alone.

    Gateways of one service share the file: salts and keyed seeds are derived from it. Without a
    file the secret lives as long as the process.
    """
    if path is None:
        return secrets.token_bytes(32)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = path.read_bytes().strip()
        if len(secret) < _LEAST_SECRET:
            raise SettingsInvalid(
                f"secret file {path} holds {len(secret)} bytes; at least {_LEAST_SECRET} are needed"
            ) from None
        return secret
    except OSError as exc:
        raise SettingsInvalid(f"secret file {path}: {exc.strerror}") from exc
    with os.fdopen(handle, "wb") as file:
        secret = secrets.token_hex(32).encode()
        file.write(secret + b"\n")
    return secret

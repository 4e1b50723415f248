"""Performs: what of receipts lives as long as the gateway: the ledger, keys, late records."""

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
from isobatch_contracts.receipt import AnswerDigests

from isobatch_gateway.errors import LedgerUnavailable, SettingsInvalid
from isobatch_gateway.files import create_private
from isobatch_gateway.fleet import Replica
from isobatch_gateway.receipts.chain import Draft, Sealed
from isobatch_gateway.receipts.content import FileKeys, encrypt, tenant_key
from isobatch_gateway.receipts.facts import Asking
from isobatch_gateway.receipts.ledger import Ledger
from isobatch_gateway.receipts.request import RequestReceipt
from isobatch_gateway.receipts.side_channel import digests_of
from isobatch_gateway.receipts.signing import Signer, public_file, read_signers
from isobatch_gateway.receipts.store import Store, StoreFailed
from isobatch_gateway.settings import ReceiptSettings
from isobatch_gateway.upstream.pool import Pools

_RETRY = 1.0  # seconds between two tries to open a ledger that cannot be opened
_SWEEP = 3600.0  # seconds between two looks for records past their retention
_SECRET = 32
PUBLIC_KEYS = "public-keys.json"


class Keeper:
    """The receipts of one gateway. It keeps on trying while the database is away."""

    def __init__(self, settings: ReceiptSettings, pools: Pools) -> None:
        """Read the keys; those that do not exist are made. Raises `SettingsInvalid`."""
        folder = settings.keys
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as exc:
            raise SettingsInvalid(f"receipt keys {folder}: {exc.strerror}") from exc
        self.signers = read_signers(folder / "signing.keys")
        self.contents = FileKeys(folder / "content.key")
        self._secret = _read_secret(folder / "digest.key")
        _publish(folder / PUBLIC_KEYS, self.signers)
        self._settings = settings
        self._pools = pools
        self._tenants: dict[str, bytes] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._runs: asyncio.Task[None] | None = None
        self._why = "the ledger was not opened yet"
        self.ledger: Ledger | None = None
        self.retention = float("inf")  # seconds

    @property
    def public_keys(self) -> bytes:
        """The public key file."""
        return public_file({signer.id: signer.public for signer in self.signers})

    def start(self) -> None:
        """Open the ledger, or go on trying to."""
        self._open()
        self._runs = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write what is still to be written, and close the ledger."""
        if self._late:
            await asyncio.wait(self._late, timeout=10)
        if self._runs is not None:
            self._runs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runs
        if self.ledger is not None:
            self.ledger.close()

    def take(self, asking: Asking) -> RequestReceipt:
        """Begin a receipt."""
        return RequestReceipt(new_id(), asking, self)

    @property
    def is_failing(self) -> bool:
        """Whether the last record could not be written."""
        return self.ledger is None or self.ledger.is_failing

    # Office

    def begin(
        self, draft: Draft, tenant: str | None, content: bytes | None = None
    ) -> asyncio.Future[Sealed]:
        """As `Office` says."""
        if self.ledger is not None:
            return self.ledger.begin(draft, tenant, content)
        failed: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
        failed.set_exception(LedgerUnavailable(self._why))
        failed.exception()  # looked at: a receipt may end before anybody waits for it
        return failed

    def key(self, tenant: str) -> bytes:
        """As `Office` says."""
        key = self._tenants.get(tenant)
        if key is None:
            key = self._tenants[tenant] = tenant_key(self._secret, tenant)
        return key

    async def digests(
        self, replica: Replica, worker_id: str, *, with_ids: bool
    ) -> AnswerDigests | str:
        """As `Office` says."""
        return await digests_of(self._pools.at(replica.id.url), worker_id, with_ids=with_ids)

    def seal(self, receipt: str, content: bytes) -> bytes:
        """As `Office` says."""
        return encrypt(self.contents, receipt, content)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """As `Office` says."""
        task = asyncio.get_running_loop().create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _run(self) -> None:
        swept = time.monotonic()
        while True:
            await asyncio.sleep(_RETRY)
            if self.ledger is None:
                self._open()
            elif time.monotonic() - swept > _SWEEP and self.retention != float("inf"):
                swept = time.monotonic()
                self.ledger.expire(time.time_ns() // 1_000_000 - int(self.retention * 1000))

    def _open(self) -> None:
        log = structlog.get_logger()
        try:
            ledger = Ledger(Store(self._settings.ledger), self._settings.chain, self.signers)
            closed = ledger.start()
        except StoreFailed as exc:
            if str(exc) != self._why:
                log.error("receipt ledger cannot be opened: strict is refused", reason=str(exc))
            self._why = str(exc)
            return
        self.ledger = ledger
        log.info("receipt ledger open", chain=self._settings.chain, interrupted=closed)


def keys_beside(ledger: Path) -> Path:
    """Where the keys of a ledger in a file are, unless they are told to be elsewhere."""
    return ledger.with_name(ledger.name + ".keys")


def new_id() -> str:
    """A receipt's id; who has it still needs the tenant's key."""
    return f"rcpt-{random.SystemRandom().getrandbits(128):032x}"


def _read_secret(path: Path) -> bytes:
    """What tenants' digest keys are made of; whoever loses it can check no request any more."""
    try:
        create_private(path, random.SystemRandom().randbytes(_SECRET).hex().encode() + b"\n")
        secret = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as exc:
        raise SettingsInvalid(f"digest key {path}: {exc}") from exc
    if len(secret) != _SECRET:
        raise SettingsInvalid(f"digest key {path}: {2 * _SECRET} hex digits are needed")
    return secret


def _publish(path: Path, signers: tuple[Signer, ...]) -> None:
    """Write the public keys beside the private ones, for whoever audits.

    A folder that cannot be written to (a mounted secret) has them already, or the API gives them.
    """
    with contextlib.suppress(OSError):
        path.write_bytes(public_file({signer.id: signer.public for signer in signers}))

"""Decides and performs who acts of several operators: the holder of a Lease.

The client library's own election ends with the first connection that fails, so it is not used. A
holder that could not renew in time stops by its own monotonic clock, before others may take over;
writes of the status carry the version they were decided on, so that a late one is refused.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from isobatch_operator.cluster.api import Api
from isobatch_operator.cluster.errors import ClusterError, Conflict
from isobatch_operator.cluster.names import Key
from isobatch_operator.cluster.render import timestamp

LEASE = "isobatch-operator"
_VERSION = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Terms:
    """All in seconds. `duration`: others wait so long for a sign of the holder."""

    duration: int = 15
    renewal: float = 2.0
    deadline: float = 10.0  # the holder's own: it stops well before others begin


@dataclass(frozen=True, slots=True)
class Sight:
    """A lease as it was first seen in this form, by the watcher's own monotonic clock."""

    version: str
    at: float


def may_take(lease: dict[str, Any], me: str, sight: Sight, now: float) -> bool:
    """Whether the lease is ours, nobody's, or of one who gave no sign for its whole duration."""
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    if not holder or holder == me:
        return True
    return now - sight.at > float(spec.get("leaseDurationSeconds") or 0)


class Election:
    """One candidate. `is_leader` is to be asked before every act."""

    def __init__(
        self, api: Api, namespace: str, me: str, terms: Terms, clock: Callable[[], float]
    ) -> None:
        """`clock` is seconds since the epoch, for what is written alone."""
        self._api = api
        self._key = Key(namespace, LEASE)
        self._me = me
        self._terms = terms
        self._clock = clock
        self._held_until = 0.0
        self._sight: Sight | None = None
        self._log = structlog.get_logger("isobatch.operator")
        self.elected = asyncio.Event()
        self.deposed = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Whether we may act now."""
        return asyncio.get_running_loop().time() < self._held_until

    async def run(self) -> None:
        """Stand for election until cancelled."""
        while True:
            try:
                await self._stand()
            except ClusterError as exc:
                self._log.info("lease", problem=str(exc)[:300])
            self._tell()
            await asyncio.sleep(self._terms.renewal)

    def _tell(self) -> None:
        """Let those know who wait for it. A lease may also have ended while we were stopped."""
        if self.is_leader == self.elected.is_set():
            return
        self._log.info("leader" if self.is_leader else "not leader", me=self._me)
        gained, lost = (self.elected, self.deposed)
        if not self.is_leader:
            gained, lost = lost, gained
        gained.set()
        lost.clear()

    async def resign(self) -> None:
        """Let another one begin at once."""
        if not self.is_leader:
            return
        self._held_until = 0.0
        lease = await self._api.get(_VERSION, "Lease", self._key)
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._me:
            lease["spec"]["holderIdentity"] = ""
            await self._api.replace(lease)

    async def _stand(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        lease = await self._api.get(_VERSION, "Lease", self._key)
        if lease is None:
            body = {
                "apiVersion": _VERSION,
                "kind": "Lease",
                "metadata": {"name": LEASE, "namespace": self._key.namespace},
                "spec": self._spec({}),
            }
            await self._api.create(body)
        else:
            version = lease["metadata"]["resourceVersion"]
            if self._sight is None or self._sight.version != version:
                self._sight = Sight(version, loop.time())
            if not may_take(lease, self._me, self._sight, loop.time()):
                return
            lease["spec"] = self._spec(lease.get("spec") or {})
            try:
                await self._api.replace(lease)
            except Conflict:
                self._held_until = 0.0
                return
        if not self.is_leader:
            self.elected.clear()  # it lapsed meanwhile, unseen: begin again, with a look at all
            self.deposed.set()
        # From before the request: it may have taken long.
        self._held_until = begun + self._terms.deadline

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = timestamp(self._clock())
        is_ours = before.get("holderIdentity") == self._me
        changes = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._me,
            "leaseDurationSeconds": self._terms.duration,
            "renewTime": now,
            "acquireTime": before.get("acquireTime", now) if is_ours else now,
            "leaseTransitions": changes if is_ours else changes + 1,
        }

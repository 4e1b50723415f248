"""Performs the telling of events: one object for what is said again and again."""

import hashlib
import time
from typing import Any

from isobatch_operator.cluster.api import Api
from isobatch_operator.cluster.conditions import Event
from isobatch_operator.cluster.errors import ClusterError, Conflict
from isobatch_operator.cluster.names import MANAGER
from isobatch_operator.cluster.render import timestamp

_MOST_REMEMBERED = 4096


class Recorder:
    """Writes events. An event that cannot be written is lost: the status says the same."""

    def __init__(self, api: Api) -> None:
        """Nothing was told yet."""
        self._api = api
        self._counts: dict[str, int] = {}

    async def record(self, resource: dict[str, Any], event: Event) -> None:
        """Tell `event` of `resource`."""
        metadata = resource["metadata"]
        text = f"{metadata['uid']} {event.reason} {event.message}"
        name = f"{metadata['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if len(self._counts) >= _MOST_REMEMBERED:
            self._counts.clear()
        count = self._counts[name] = self._counts.get(name, 0) + 1
        now = timestamp(time.time())[:19] + "Z"
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": resource["apiVersion"],
                "kind": resource["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if event.is_warning else "Normal",
            "reason": event.reason,
            "message": event.message[:1000],
            "source": {"component": MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": count,
        }
        try:
            await self._api.create(body)
        except Conflict:
            await self._again(body, {"count": count, "lastTimestamp": now})
        except ClusterError:
            return

    async def _again(self, body: dict[str, Any], change: dict[str, Any]) -> None:
        try:
            await self._api.merge(body, change)
        except ClusterError:
            return

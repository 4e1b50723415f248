"""Decides whether an idempotency key is used for the request it was first used for."""

from collections import OrderedDict
from dataclasses import dataclass, field

_MOST = 100_000  # keys remembered; about 25 MB
_SECONDS = 24 * 3600.0


@dataclass(slots=True)
class IdempotencyKeys:
    """The digest that each (tenant, key) was first seen with; the oldest are forgotten."""

    most: int = _MOST
    seconds: float = _SECONDS
    _seen: OrderedDict[tuple[str, str], tuple[float, bytes]] = field(default_factory=OrderedDict)

    def is_reused(self, tenant: str, key: str, digest: bytes, now: float) -> bool:
        """Whether `key` was used for another request; remembers it if it is new."""
        while self._seen:
            oldest = next(iter(self._seen))
            if len(self._seen) <= self.most and now - self._seen[oldest][0] < self.seconds:
                break
            del self._seen[oldest]
        known = self._seen.get((tenant, key))
        if known is not None:
            return known[1] != digest
        self._seen[(tenant, key)] = (now, digest)
        return False

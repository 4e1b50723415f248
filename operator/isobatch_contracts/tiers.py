"""Decides nothing: names the consistency tiers and the pools that serve them."""

from enum import StrEnum


class Tier(StrEnum):
    """The consistency that a request declares and is given."""

    STRICT = "strict"
    VERIFIED = "verified"
    STANDARD = "standard"

    @property
    def is_bitwise(self) -> bool:
        """Whether the tier promises bits, so that it is served by the strict pool or refused."""
        return self is not Tier.STANDARD


class PoolName(StrEnum):
    """The two pools of a service."""

    STRICT = "strict"
    THROUGHPUT = "throughput"

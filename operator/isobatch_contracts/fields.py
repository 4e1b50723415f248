"""Decides how single values of a resource are written: names, times, amounts."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from isobatch_contracts.base import cel
from isobatch_contracts.tiers import Tier

Duration = Annotated[str, StringConstraints(pattern=r"^([0-9]+(ms|s|m|h|d))+$", max_length=32)]
"""A length of time as Kubernetes and Prometheus write it: `500ms`, `30s`, `10m`, `1h30m`, `90d`."""
Decimal = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?$", max_length=32)]
"""A non-negative decimal number as a string: `"0.01"`."""
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Percent = Annotated[int, Field(ge=0, le=100)]
DnsLabel = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", max_length=63)
]

ResourceName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$", max_length=40)
]
"""A DNS label that leaves room for pool and revision in the names made of it."""
ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)
]
Word = Annotated[str, StringConstraints(max_length=317)]
"""A label's or resource's key or value: a DNS name, a slash, and 63 characters."""
Argument = Annotated[str, StringConstraints(max_length=4096)]


def _above_zero(text: str) -> str:
    if not re.search(r"[1-9]", text):
        raise ValueError(f"must be longer than zero, found {text!r}")
    return text


Positive = Annotated[
    Duration,
    AfterValidator(_above_zero),
    Field(json_schema_extra=cel("self.matches('[1-9]')", "must be longer than zero")),
]
"""A length of time above zero."""


def _as_text(value: object) -> object:
    """A whole number as the text that it is short for."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    StringConstraints(
        pattern=r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[mkMGTPE]|[eE][-+]?[0-9]+)?$",
        max_length=32,
    ),
    BeforeValidator(_as_text),
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
"""An amount as Kubernetes writes it: `"500m"`, `"2Gi"`, `1`."""


def _without_tier_suffix(name: str) -> str:
    """`name`, unless its end reads as a tier: clients could not ask for it as it is."""
    suffix = name.rpartition(":")[2]
    if suffix != name and suffix in set(Tier):
        raise ValueError(f"the name ends in the tier suffix ':{suffix}': choose another ending")
    return name


ModelName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,252}$"),
    AfterValidator(_without_tier_suffix),
    Field(
        max_length=253,
        json_schema_extra=cel(
            "!self.matches(':(strict|verified|standard)$')",
            "model.name ends in a tier suffix: choose another ending",
        ),
    ),
]
ModelUri = Annotated[
    str, StringConstraints(pattern=r"^(hf|file|pvc|builtin)://.+$", max_length=2048)
]

_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_seconds(text: Duration) -> float:
    """The length of `text` in seconds: `"1h30m"` -> 5400.0."""
    parts = re.findall(r"([0-9]+)(ms|[smhd])", text)
    return sum(int(number) * _MILLISECONDS[unit] for number, unit in parts) / 1000

"""Decides what a gateway's `/metrics` say: the version of each table, and figures by revision."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_WANTED = (
    "isobatch_gateway_table_version",
    "isobatch_requests_total",
    "isobatch_upstream_failures_total",
    "isobatch_time_to_first_token_seconds_bucket",
)
_LINE = re.compile(rf"^({'|'.join(_WANTED)})\{{([^}}]*)\}} ([^ \n]+)$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened at one revision of one model.

    `answered` requests, `failed` attempts, and the answers whose first byte came within so many
    seconds, by that bound.
    """

    answered: float = 0.0
    failed: float = 0.0
    first_byte_within: Mapping[float, float] = field(default_factory=dict)

    @property
    def attempts(self) -> float:
        """Everything that was sent there."""
        return self.answered + self.failed

    def __add__(self, other: "Counts") -> "Counts":
        return _combined(self, other, 1.0)

    def __sub__(self, other: "Counts") -> "Counts":
        return _combined(self, other, -1.0)


def _combined(one: Counts, other: Counts, sign: float) -> Counts:
    bounds = {**one.first_byte_within, **other.first_byte_within}
    return Counts(
        one.answered + sign * other.answered,
        one.failed + sign * other.failed,
        {
            bound: one.first_byte_within.get(bound, 0.0)
            + sign * other.first_byte_within.get(bound, 0.0)
            for bound in bounds
        },
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What one gateway says: table versions by model, counts by model and revision."""

    versions: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[tuple[str, str], Counts] = field(default_factory=dict)


def read_report(text: str) -> Report:
    """The report in the exposition `text`. Lines that cannot be read are left out."""
    versions: dict[str, int] = {}
    counts: dict[tuple[str, str], Counts] = {}
    for name, inside, number in _LINE.findall(text):
        labels = dict(_LABEL.findall(inside))
        try:
            value = float(number)
        except ValueError:
            continue
        model = labels.get("model", "")
        if name == "isobatch_gateway_table_version":
            versions[model] = int(value)
        elif labels.get("revision"):
            group = (model, labels["revision"])
            counts[group] = counts.get(group, Counts()) + _count(name, labels, value)
    return Report(versions, counts)


def _count(name: str, labels: Mapping[str, str], value: float) -> Counts:
    match name:
        case "isobatch_requests_total" if labels.get("code", "").startswith("5"):
            return Counts(failed=value)
        case "isobatch_requests_total":
            return Counts(answered=value)
        case "isobatch_upstream_failures_total":
            return Counts(failed=value)
        case _:
            return Counts(first_byte_within={float(labels["le"]): value})

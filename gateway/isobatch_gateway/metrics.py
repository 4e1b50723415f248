"""Performs: counts and times; the names are those of the API reference, the labels bounded."""

from dataclasses import dataclass, field
from typing import NamedTuple

from isobatch_contracts.tiers import PoolName
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from isobatch_gateway.fleet import Fleet, Replica
from isobatch_gateway.table_source import Source

_DURATIONS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OVERHEADS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)


class Labels(NamedTuple):
    """The labels of one request; empty where it was refused before it was known.

    A tuple because it is hashed several times a request.
    """

    model: str = ""
    tier: str = ""
    pool: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class _Series:
    """The time series of one set of labels."""

    duration: Histogram
    first: Histogram
    overhead: Histogram
    by_status: dict[int, Counter] = field(default_factory=dict)


class Metrics:
    """The gateway's own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._make(
            Counter,
            "isobatch_requests_total",
            "Requests by HTTP status (499: client left).",
            "code",
        )
        self._duration = self._timed(
            "isobatch_request_duration_seconds", "From the request to the end of the answer."
        )
        self._first = self._timed(
            "isobatch_time_to_first_token_seconds", "From the request to the first byte sent."
        )
        self._overhead = Histogram(
            "isobatch_gateway_overhead_seconds",
            "Time to the first byte that the gateway itself took, waiting in a queue excepted.",
            ("model", "tier"),
            buckets=_OVERHEADS,
            registry=self.registry,
        )
        self._upstream_failures = Counter(
            "isobatch_upstream_failures_total",
            "Attempts that a replica failed, though another may have answered the request.",
            ("model", "pool", "revision"),
            registry=self.registry,
        )
        self._inflight = Gauge(
            "isobatch_inflight",
            "Requests under way.",
            ("model", "tier", "pool"),
            registry=self.registry,
        )
        self._weight = self._gauge(
            "isobatch_routing_weight", "Percent of the pool's traffic.", "model", "pool", "revision"
        )
        self._age = self._gauge(
            "isobatch_gateway_table_age_seconds",
            "Since the table was last seen at its source to be the one that is served.",
            "model",
        )
        self._version = self._gauge(
            "isobatch_gateway_table_version", "Version of the table that is served.", "model"
        )
        self._rejected = Counter(
            "isobatch_gateway_table_rejected_total",
            "Documents that were no acceptable table.",
            registry=self.registry,
        )
        self._rejected_counted = 0
        self._series: dict[Labels, _Series] = {}
        self._inflight_by: dict[tuple[str, str, PoolName], Gauge] = {}

    def finished(self, labels: Labels, status: int, seconds: float) -> None:
        """A request is over, one way or another."""
        series = self._series_of(labels)
        counter = series.by_status.get(status)
        if counter is None:
            counter = self._requests.labels(*labels, str(status))
            series.by_status[status] = counter
        counter.inc()
        series.duration.observe(seconds)

    def began(self, labels: Labels, first_byte: float, overhead: float) -> None:
        """The first byte of an answer went out."""
        series = self._series_of(labels)
        series.first.observe(first_byte)
        series.overhead.observe(overhead)

    def upstream_failed(self, replica: Replica) -> None:
        """A replica failed an attempt: it did not answer, with an error, or not to the end."""
        identity = replica.id
        self._upstream_failures.labels(replica.model, identity.pool.value, identity.revision).inc()

    def under_way(self, labels: Labels, pool: PoolName) -> Gauge:
        """The gauge of what `pool` works on for requests of `labels`."""
        key = (labels.model, labels.tier, pool)
        gauge = self._inflight_by.get(key)
        if gauge is None:
            gauge = self._inflight.labels(labels.model, labels.tier, pool.value)
            self._inflight_by[key] = gauge
        return gauge

    def text(self, fleet: Fleet, source: Source, now: float) -> bytes:
        """The exposition, with what is known of the tables now."""
        for gauge in (self._weight, self._age, self._version):
            gauge.clear()
        for model, service in fleet.services.items():
            self._version.labels(model).set(service.table.version)
            for revision in service.table.revisions:
                self._weight.labels(model, revision.pool.value, revision.name).set(revision.weight)
        for model, age in source.ages(now).items():
            self._age.labels(model).set(age)
        self._rejected.inc(source.rejected - self._rejected_counted)
        self._rejected_counted = source.rejected
        return generate_latest(self.registry)

    def _series_of(self, labels: Labels) -> "_Series":
        # `labels()` validates and locks at every call; a request would pay it six times.
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(
                self._duration.labels(*labels),
                self._first.labels(*labels),
                self._overhead.labels(labels.model, labels.tier),
            )
        return series

    def _make(self, kind: type[Counter], name: str, text: str, *more: str) -> Counter:
        labels = ("model", "tier", "pool", "revision", *more)
        return kind(name, text, labels, registry=self.registry)

    def _timed(self, name: str, text: str) -> Histogram:
        labels = ("model", "tier", "pool", "revision")
        return Histogram(name, text, labels, buckets=_DURATIONS, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

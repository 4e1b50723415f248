"""Performs the operator's own HTTP: whether it lives, and its metrics."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from isobatch_operator.cluster.names import Key


class Metrics:
    """The operator's figures."""

    def __init__(self) -> None:
        """All at nothing."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.seconds = Histogram(
            "isobatch_operator_reconcile_seconds", "One look at a service.", registry=self.registry
        )
        self.failures = Counter(
            "isobatch_operator_reconcile_failures_total",
            "Looks that ended in an error.",
            registry=self.registry,
        )
        self._leader = Gauge(
            "isobatch_operator_leader", "1 for the one that acts.", registry=self.registry
        )
        self._rollouts = Gauge(
            "isobatch_rollout_info",
            "1 for the phase that the rollout is in.",
            ("namespace", "name", "phase"),
            registry=self.registry,
        )

    def text(self, phases: Mapping[Key, str], *, is_leader: bool) -> bytes:
        """The exposition."""
        self._leader.set(int(is_leader))
        self._rollouts.clear()
        for key, phase in phases.items() if is_leader else ():
            self._rollouts.labels(key.namespace, key.name, phase).set(1)
        return generate_latest(self.registry)


@contextlib.asynccontextmanager
async def served(
    host: str, port: int, is_alive: Callable[[], bool], metrics: Callable[[], bytes]
) -> AsyncIterator[None]:
    """Answer `/healthz` and `/metrics` until the block ends. Raises OSError for a taken port."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=200 if is_alive() else 503, text="ok" if is_alive() else "stuck")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.add_routes([web.get("/healthz", health), web.get("/metrics", exposition)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()

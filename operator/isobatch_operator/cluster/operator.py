"""Performs `isobatch operator`: watches, and lets the reconciler look at what has changed."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
import kopf
import structlog

from isobatch_operator import crd
from isobatch_operator.cluster.api import SERVING, Api, connect
from isobatch_operator.cluster.errors import ClusterError, Unreachable
from isobatch_operator.cluster.gateways import Gateways
from isobatch_operator.cluster.handlers import make_registry, make_settings
from isobatch_operator.cluster.lease import Election, Terms
from isobatch_operator.cluster.names import Key
from isobatch_operator.cluster.queue import Queue
from isobatch_operator.cluster.reconciler import NotLeading, Reconciler
from isobatch_operator.cluster.serving import Metrics, served
from isobatch_operator.cluster.settings import Settings
from isobatch_operator.cluster.step import Workers

_LOOKERS = 4
_PROBE_SECONDS = 2.0
_STUCK_SECONDS = 120.0  # of one look; every request in it has its own limit
_TRIES_SECONDS = 60.0  # for the API server and the definition to come up beside us


class Operator:
    """One operator; `run` it once."""

    def __init__(self, settings: Settings, api: Api, client: httpx.AsyncClient) -> None:
        """Nothing runs yet."""
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._api = api
        self._metrics = Metrics()
        self._queue = Queue(loop.time)
        self._election = Election(
            api, settings.own_namespace, settings.identity, Terms(), time.time
        )
        self._reconciler = Reconciler(
            api,
            client,
            Gateways(api, client, settings.gateway_service),
            Workers(settings.worker_image, settings.pod_patch),
            lambda: self._election.is_leader,
        )
        self._looking_since: dict[int, float] = {}
        self._stop = asyncio.Event()
        self._log = structlog.get_logger("isobatch.operator")

    async def run(self) -> None:
        """Serve until a signal; then let another one begin."""
        await self._require_definition()
        with self._signals():
            async with (
                served(self._settings.host, self._settings.port, self._is_alive, self._exposition),
                _running(
                    self._watch(),
                    self._election.run(),
                    self._sweep(),
                    *(self._look(number) for number in range(_LOOKERS)),
                ) as tasks,
            ):
                stopped = asyncio.create_task(self._stop.wait())
                done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                for task in done - {stopped}:
                    task.result()  # none ends by itself: raise what ended it
            with contextlib.suppress(ClusterError):
                await self._election.resign()

    async def _require_definition(self) -> None:
        """Raise ClusterError unless the installed definition has every field that we know."""
        deadline = asyncio.get_running_loop().time() + _TRIES_SECONDS
        while True:
            try:
                found = await self._api.definition(crd.NAME)
            except Unreachable:
                found = None
                if asyncio.get_running_loop().time() > deadline:
                    raise
            if found is not None:
                break
            if asyncio.get_running_loop().time() > deadline:
                raise ClusterError(f"there is no definition {crd.NAME}: install the chart's")
            await asyncio.sleep(1.0)
        absent = crd.missing(found)
        if absent:
            shown = ", ".join(absent[:5]) + (" …" if len(absent) > 5 else "")
            raise ClusterError(
                f"the installed definition {crd.NAME} lacks {shown}, and would drop them without a "
                "word: apply the one of this release"
            )

    async def _watch(self) -> None:
        """kopf, from which we take names alone."""
        names = self._settings.namespaces
        await kopf.operator(
            registry=make_registry(self._queue.add, self._reconciler.claim),
            settings=make_settings(),
            standalone=True,
            clusterwide=not names,
            namespaces=list(names),
            stop_flag=self._stop,
        )

    async def _sweep(self) -> None:
        """Look at everything when we begin to act, and slowly ever after."""
        while True:
            await self._election.elected.wait()
            try:
                for namespace in self._settings.namespaces or (None,):
                    for resource in await self._api.every(SERVING, "InferenceService", namespace):
                        metadata = resource["metadata"]
                        self._reconciler.claim(resource)
                        self._queue.add(Key(metadata["namespace"], metadata["name"]))
                wait = self._settings.sweep_seconds
            except ClusterError as exc:
                self._log.warning("sweep", problem=str(exc)[:500])
                wait = 5.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._election.deposed.wait()

    async def _look(self, number: int) -> None:
        """Take names from the queue for ever."""
        loop = asyncio.get_running_loop()
        while True:
            key = await self._queue.get()
            again: float | None = 1.0
            self._looking_since[number] = loop.time()
            try:
                if self._election.is_leader:
                    with self._metrics.seconds.time():
                        again = await self._reconciler.reconcile(key)
                else:
                    again = None  # who is elected looks at everything
            except NotLeading:
                again = None
            except ClusterError as exc:
                self._metrics.failures.inc()
                self._log.warning("look", service=str(key), problem=str(exc)[:500])
            except Exception:  # noqa: BLE001  # one service must not end the others' care
                self._metrics.failures.inc()
                again = 30.0
                self._log.exception("look failed", service=str(key))
            finally:
                del self._looking_since[number]
                self._queue.done(key)
            if again is not None:
                self._queue.add(key, again)

    def _is_alive(self) -> bool:
        now = asyncio.get_running_loop().time()
        return all(now - since < _STUCK_SECONDS for since in self._looking_since.values())

    def _exposition(self) -> bytes:
        return self._metrics.text(self._reconciler.phases, is_leader=self._election.is_leader)

    @contextlib.contextmanager
    def _signals(self) -> Any:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _running(*jobs: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(settings: Settings) -> None:
    """Run one operator until a signal. Raises ClusterError, OSError."""
    api = await connect()
    # trust_env: what is asked of pods goes to them, and by no proxy.
    async with httpx.AsyncClient(timeout=_PROBE_SECONDS, trust_env=False) as client:
        try:
            await Operator(settings, api, client).run()
        finally:
            await api.close()

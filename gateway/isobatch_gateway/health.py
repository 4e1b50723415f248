"""Performs: keeps watch over one replica: readiness, load figures, and probes where there is doubt.

What really happens to requests comes first: a replica that answers them is not checked.
"""

import asyncio
import re

import httpx
import orjson
import structlog
from isobatch_contracts.numerics import NUMERICS_PATH, Certified
from isobatch_contracts.tiers import PoolName
from pydantic import ValidationError

from isobatch_gateway import breaker
from isobatch_gateway.breaker import Event
from isobatch_gateway.fleet import Figures, Replica
from isobatch_gateway.settings import Settings

_LINE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|prompt_tokens_total"
    rb"|generation_tokens_total)(?:\{[^}]*\})? ([0-9.eE+]+)",
    re.MULTILINE,
)
_UNANSWERED = 2  # readiness checks without an answer before a silent replica is taken out


def read_figures(metrics: bytes) -> Figures:
    """The figures out of vLLM's `/metrics` text; engines of one server are summed."""
    sums = dict.fromkeys(
        (
            b"num_requests_running",
            b"num_requests_waiting",
            b"prompt_tokens_total",
            b"generation_tokens_total",
        ),
        0.0,
    )
    for name, value in _LINE.findall(metrics):
        sums[name] += float(value)
    return Figures(
        running=int(sums[b"num_requests_running"]),
        waiting=int(sums[b"num_requests_waiting"]),
        progress=sums[b"prompt_tokens_total"] + sums[b"generation_tokens_total"],
    )


def is_suspect(oldest_wait: float | None, last_heard: float, now: float, limit: float) -> bool:
    """Whether a replica owes an answer and has given no sign of life for `limit` seconds."""
    return oldest_wait is not None and now - max(oldest_wait, last_heard) > limit


def admitted(body: bytes, fingerprint: str | None) -> Certified | None:
    """A worker's numerics if they are what the table admits; anything else fails closed."""
    try:
        certified = Certified.model_validate_json(body)
    except ValidationError:
        return None
    return certified if certified.fingerprint == fingerprint else None


class Watcher:
    """Watches one replica until it is cancelled."""

    def __init__(self, replica: Replica, client: httpx.AsyncClient, settings: Settings) -> None:
        self._replica = replica
        self._client = client
        self._settings = settings
        self._log = structlog.get_logger().bind(replica=replica.served_by, model=replica.model)

    async def run(self) -> None:
        """Check, wait a little, check again."""
        replica = self._replica
        while True:
            is_doubted = replica.doubt.is_set()
            replica.doubt.clear()
            was = replica.is_eligible
            try:
                await self._check(is_doubted=is_doubted)
            except Exception:  # noqa: BLE001  # a bad moment must not end the watch for good
                self._log.exception("check failed")
            replica.looked.set()
            if replica.is_eligible is not was:
                self._log.info("replica in" if replica.is_eligible else "replica out")
            interval = self._settings.check_interval
            pause = interval if replica.is_eligible else interval / 4
            try:
                async with asyncio.timeout(pause):
                    await replica.doubt.wait()
                # Not at once: a flood of failures must not become a flood of checks.
                await asyncio.sleep(min(0.05, pause))
            except TimeoutError:
                pass

    async def _check(self, *, is_doubted: bool) -> None:
        replica, now = self._replica, asyncio.get_running_loop().time()
        is_idle = replica.in_flight == 0 and (
            now - replica.last_heard > self._settings.check_interval
        )
        if is_idle or is_doubted or not replica.is_ready:
            await self._check_ready()
        if replica.is_ready:
            await self._scrape()
        if breaker.is_due(replica.state, asyncio.get_running_loop().time()):
            await self._try_again()
        oldest = min(replica.waiting.values(), default=None)
        now = asyncio.get_running_loop().time()
        if is_suspect(oldest, replica.last_heard, now, self._settings.timeouts.suspect):
            await self._settle_suspicion()

    async def _check_ready(self) -> None:
        replica = self._replica
        paths = (
            (NUMERICS_PATH,)
            if replica.id.pool is PoolName.STRICT
            # `/health` can be green before the model is served.
            else ("/health",)
            if replica.is_ready
            else ("/health", "/v1/models")
        )
        for path in paths:
            answer = await self._get(path)
            if answer is None:
                replica.unanswered += 1
                if replica.unanswered >= _UNANSWERED:
                    replica.is_ready = False
                    replica.abandon_waiting()
                return
            replica.unanswered = 0
            is_good = answer.status_code == 200
            if is_good and path == NUMERICS_PATH:
                replica.certified = admitted(answer.content, replica.id.fingerprint)
                is_good = replica.certified is not None
            if not is_good:
                replica.is_ready = False
                return
        replica.is_ready = True

    async def _get(self, path: str) -> httpx.Response | None:
        """The answer, None if none came in time; a refused connection counts as not ready."""
        try:
            return await self._client.get(
                self._replica.id.url + path, timeout=self._settings.timeouts.check
            )
        except httpx.TimeoutException:
            return None
        except httpx.TransportError:
            return httpx.Response(503)

    async def _scrape(self) -> None:
        answer = await self._get("/metrics")
        if answer is None or answer.status_code != 200:
            return
        figures = read_figures(answer.content)
        if figures.progress > self._replica.figures.progress:
            self._replica.heard(asyncio.get_running_loop().time())
        self._replica.figures = figures

    async def _try_again(self) -> None:
        self._replica.note(Event.TRIAL)
        is_alive = self._replica.is_ready and await self._is_answering()
        self._replica.note(Event.SUCCESS if is_alive else Event.OUTAGE)

    async def _settle_suspicion(self) -> None:
        if await self._is_answering():
            self._replica.heard(asyncio.get_running_loop().time())
            return
        self._log.warning("replica accepts requests and answers none")
        self._replica.note(Event.OUTAGE)
        self._replica.abandon_waiting()

    async def _is_answering(self) -> bool:
        """One token, by the way that requests take."""
        started = asyncio.get_running_loop().time()
        body = orjson.dumps({"model": self._replica.model, "prompt": "1", "max_tokens": 1})
        try:
            answer = await self._client.post(
                f"{self._replica.id.url}/v1/completions",
                content=body,
                headers={"content-type": "application/json"},
                timeout=self._settings.timeouts.probe,
            )
        except httpx.TransportError:
            # Another answer that came meanwhile is as good as the probe's own.
            return self._replica.last_heard > started
        # A model that cannot complete says so with 4xx: somebody is there.
        return answer.status_code < 500

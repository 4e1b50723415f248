"""Clients of both tiers that go on asking while something breaks, and what each was told."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

POOL = {"strict": "strict", "standard": "throughput"}
HANG_SECONDS = 60.0
CLIENTS = 2  # of each tier, streamed and not


@dataclass(frozen=True, slots=True)
class Told:
    """What a client saw of one request: `status` is None where the connection ended early."""

    tier: str
    asked: float  # monotonic seconds
    status: int | None
    served_by: str
    is_whole: bool  # ended as its protocol says: JSON, or a stream with its [DONE]
    is_cut: bool = False  # a stream that had to end with an error

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.is_whole and not self.is_cut

    @property
    def is_of_its_tier(self) -> bool:
        return not self.served_by or self.served_by.startswith(f"{POOL[self.tier]}/")


@contextmanager
def load(url: str) -> Iterator[list[Told]]:
    """Ask, from threads of its own, until the block ends; the list grows meanwhile.

    Raises what a client raised: a request that hangs beyond `HANG_SECONDS` is such an error.
    """
    told: list[Told] = []
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(lambda: asyncio.run(_clients(url, told, done)))
        try:
            yield told
        finally:
            done.set()
        clients.result()


async def _clients(url: str, told: list[Told], done: threading.Event) -> None:
    timeout = httpx.Timeout(HANG_SECONDS)
    async with httpx.AsyncClient(base_url=url, timeout=timeout) as client, asyncio.TaskGroup() as g:
        for tier in POOL:
            for streamed in (True, False) * (CLIENTS // 2):
                g.create_task(_ask_on(client, tier, streamed, told, done))


async def _ask_on(
    client: httpx.AsyncClient, tier: str, streamed: bool, told: list[Told], done: threading.Event
) -> None:
    body = {"model": "smollm2", "prompt": "Tell me", "max_tokens": 24, "stream": streamed}
    while not done.is_set():
        async with asyncio.timeout(HANG_SECONDS):
            told.append(await _ask(client, tier, body))
        await asyncio.sleep(0.05)  # a refusal is quick; the next one should not be a flood


async def _ask(client: httpx.AsyncClient, tier: str, body: dict[str, object]) -> Told:
    asked = time.monotonic()
    try:
        answer = await client.post(
            "/v1/completions", json=body, headers={"X-Consistency-Tier": tier}
        )
    except httpx.TimeoutException:
        raise
    except httpx.TransportError:  # the gateway itself died
        return Told(tier, asked, None, "", is_whole=False)
    ends = b"data: [DONE]\n\n" if body["stream"] and answer.status_code == 200 else b"}"
    return Told(
        tier,
        asked,
        answer.status_code,
        answer.headers.get("x-served-by", ""),
        is_whole=answer.content.endswith(ends),
        is_cut=b'"error"' in answer.content,
    )

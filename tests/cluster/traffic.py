"""Asks a gateway without pause, in mixed tiers, streamed and not; writes one JSON line an answer.

`python -m tests.cluster.traffic URL MODEL FILE TIER…` runs until it is told to stop.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.cluster import Cluster
from tests.cluster.pods import CHECKOUT

ASKERS = 6
PAUSE_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: when it was asked for, and what came. `problem`: why it counts as failed."""

    at: float
    tier: str
    status: int
    served_tier: str
    served_by: str
    problem: str

    @property
    def pool(self) -> str:
        return self.served_by.partition("/")[0]

    @property
    def revision(self) -> str:
        return self.served_by.split("/")[1] if self.served_by else ""


async def ask(client: httpx.AsyncClient, url: str, model: str, tier: str) -> dict[str, Any]:
    """One request, to the end of its answer."""
    at, is_stream = time.time(), random.random() < 0.5
    # Another prompt is another conversation: one stays with its revision.
    prompt = f"Hello {random.getrandbits(64)}"
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "stream": is_stream}
    headers = {"X-Consistency-Tier": tier}
    if random.random() < 0.3:
        headers["Connection"] = "close"
    found: dict[str, Any] = {"at": at, "tier": tier, "status": 0, "problem": ""}
    try:
        async with client.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers
        ) as answer:
            text = (await answer.aread()).decode()
    except httpx.HTTPError as exc:
        return found | {
            "served_tier": "",
            "served_by": "",
            "problem": f"{type(exc).__name__} {exc}",
        }
    problem = ""
    if answer.status_code != 200:
        problem = f"{answer.status_code}: {text[:200]}"
        if answer.status_code == 503 and "retry-after" not in answer.headers:
            problem += " without Retry-After"
    elif is_stream and ('"error"' in text or not text.rstrip().endswith("data: [DONE]")):
        problem = f"cut off: {text[-200:]}"
    return found | {
        "status": answer.status_code,
        "served_tier": answer.headers.get("X-Consistency-Tier", ""),
        "served_by": answer.headers.get("X-Served-By", ""),
        "problem": problem,
    }


async def run(url: str, model: str, file: Path, tiers: list[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with file.open("a", buffering=1) as out:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:

            async def keep_asking() -> None:
                while not stop.is_set():
                    found = await ask(client, url, model, random.choice(tiers))
                    out.write(json.dumps(found) + "\n")
                    await asyncio.sleep(PAUSE_SECONDS)

            await asyncio.gather(*(keep_asking() for _ in range(ASKERS)))


class Traffic:
    """What was asked so far."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def answers(self) -> list[Answer]:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [Answer(**json.loads(line)) for line in lines if line.endswith("}")]

    def problems(self) -> list[str]:
        """Answers that failed, or were of another tier or pool than was asked for."""
        found = []
        for one in self.answers():
            if one.problem:
                found.append(f"{one.at:.2f} {one.tier}: {one.problem}")
            elif one.served_tier != one.tier:
                found.append(f"{one.tier} was served as {one.served_tier}")
            elif one.tier == "strict" and one.pool != "strict":
                found.append(f"strict was served by {one.served_by}")
        return found

    def share(self, revision: str, since: float) -> float:
        """The percent of answers that `revision` gave since then."""
        late = [one for one in self.answers() if one.at >= since]
        return 100 * sum(one.revision == revision for one in late) / max(1, len(late))

    def last_at(self, revision: str) -> float:
        """When the last request was asked that `revision` answered; 0 if there was none."""
        return max((one.at for one in self.answers() if one.revision == revision), default=0.0)


@contextmanager
def traffic(
    cluster: Cluster, url: str, model: str, folder: Path, tiers: tuple[str, ...]
) -> Iterator[Traffic]:
    """Traffic until the block ends."""
    file = folder / f"traffic-{model}.jsonl"
    command = [*cluster.enter, sys.executable, "-m", "tests.cluster.traffic", url, model, str(file)]
    process = subprocess.Popen([*command, *tiers], cwd=CHECKOUT, env=dict(os.environ))
    try:
        yield Traffic(file)
    finally:
        process.terminate()
        process.wait(90)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))

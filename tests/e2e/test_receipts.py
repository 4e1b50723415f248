"""Receipts of a real strict worker: its digests are the answer's, and a replay has its bits."""

import asyncio
import contextlib
import hashlib
import json
import random
import signal
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import httpx
import pytest
from isobatch_contracts.receipt import DIGESTS_PATH, AnswerDigests

from tests.e2e.answers import PROMPTS, Body, neighbour, strict_client
from tests.e2e.processes import processes_of, wait_for

pytestmark = pytest.mark.model

BACK_SECONDS = 240
RECEIPTS = "/isobatch/v1/receipts"
Taken = dict[str, Body]
"""Requests by the id of their receipt."""


def sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param("/v1/completions", {"prompt": "The sea"}, id="completion"),
        pytest.param("/v1/completions", {"prompt": ["The sea", "A hill"], "n": 2}, id="prompts-n"),
        pytest.param("/v1/completions", {"prompt": "The sea", "stop": ["a"]}, id="stop"),
    ],
)
def test_the_side_channel_has_the_digests_of_the_answer(
    service: Any, path: str, fields: Body
) -> None:
    worker = service.replica_url("strict")
    name = f"req-{random.getrandbits(128):032x}"
    asked = {"model": "smollm2", "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
    body = asked | {"temperature": 0.9, "seed": 5} | fields

    answer = httpx.post(worker + path, json=body, headers={"x-request-id": name}, timeout=120)

    choices = answer.json()["choices"]
    told = httpx.get(f"{worker}{DIGESTS_PATH}{name}", timeout=10)
    sequences = AnswerDigests.model_validate_json(told.content).sequences
    assert [one.index for one in sequences] == [choice["index"] for choice in choices]
    for one, choice in zip(sequences, choices, strict=True):
        assert one.token_ids == sha256(array("i", choice["token_ids"]).tobytes())
        rows = choice["logprobs"]
        pairs = zip(rows["token_logprobs"], rows["top_logprobs"], strict=True)
        # The sampled one stands first, then the likeliest, which may be the same.
        bits = [x for own, top in pairs for x in (own, max(top.values()))]
        assert one.logprobs == sha256(struct.pack(f"<{len(bits)}f", *bits))
        assert one.finished


def requests_of(count: int) -> list[tuple[str, Body]]:
    """Requests of mixed lengths, settings and forms; no two alike."""
    made = []
    for number in range(count):
        body = neighbour(number) | {"seed": number}
        body.pop("return_token_ids")
        body["max_tokens"] = 6 + 5 * number % 40
        body["prompt"] = f"{number}. {PROMPTS[number % len(PROMPTS)]}"
        body["stream"] = number % 3 == 0
        path = "/v1/completions"
        if number % 4 == 1:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
            body["top_logprobs"], body["logprobs"] = body.pop("logprobs"), True
        if number % 10 == 2:  # sampled, as every second one is
            body["n"] = 2
        made.append((path, body))
    return made


async def take(url: str, count: int) -> Taken:
    """Ask for `count` answers at once; every seventh streamed one is left in the middle."""
    taken: Taken = {}
    places = asyncio.Semaphore(12)

    async def one(client: httpx.AsyncClient, number: int, path: str, body: Body) -> None:
        async with places, client.stream("POST", path, json=body, timeout=600) as answer:
            assert answer.status_code == 200, await answer.aread()
            taken[answer.headers["x-receipt-id"]] = body
            async for _ in answer.aiter_bytes():
                if body["stream"] and number % 7 == 0:
                    return

    async with strict_client(url) as client:
        work = (one(client, n, *asked) for n, asked in enumerate(requests_of(count)))
        await asyncio.gather(*work)
    return taken


async def load(url: str, stop: asyncio.Event) -> None:
    """Other strict requests, eight at a time, until `stop`."""
    async with strict_client(url) as client:

        async def ask(first: int) -> None:
            number = first
            while not stop.is_set():
                await client.post("/v1/completions", json=neighbour(number), timeout=600)
                number += 8

        await asyncio.gather(*(ask(n) for n in range(1000, 1008)))


def outcomes(url: str, taken: Taken) -> dict[str, int]:
    """How the receipts say that the answers ended; each has its final record."""
    counts: dict[str, int] = {}
    for receipt in taken:
        records = httpx.get(f"{url}{RECEIPTS}/{receipt}").json()["records"]
        (final,) = [r["record"]["body"] for r in records if r["record"]["kind"] == "final"]
        counts[final["outcome"]] = counts.get(final["outcome"], 0) + 1
        if final["outcome"] != "complete":
            continue
        assert all(s["finished"] for s in final["answer"]["sequences"]), final
        assert final["numerics"]["modelDigest"], final
    return counts


def all_final(url: str, taken: Taken) -> bool:
    listed = httpx.get(f"{url}{RECEIPTS}", params={"limit": 10_000}).json()["receipts"]
    return set(taken) <= set(listed)


def replay(service: Any, folder: Path, taken: Taken) -> dict[str, int]:
    """The verdicts of `isobatch receipt replay` over the receipts `taken`, by count."""
    requests = folder / "requests.jsonl"
    lines = (json.dumps({"receipt": r, "request": body}) for r, body in taken.items())
    requests.write_text("\n".join(lines))
    options = ("--gateway", service.url, "--requests", str(requests), "--only-given", "-o", "json")
    ran = service.run("receipt", "replay", "--since", "24h", *options)
    assert ran.stdout, ran.stderr
    counts: dict[str, int] = json.loads(ran.stdout)["counts"]
    return counts


@pytest.fixture(scope="module")
def count(pytestconfig: pytest.Config) -> int:
    return 500 if pytestconfig.getoption("--full") else 40


@pytest.fixture(scope="module")
def taken(service: Any, count: int) -> Taken:
    """Receipts taken under load of each other."""
    found = asyncio.run(take(service.url, count))
    wait_for(lambda: all_final(service.url, found), 60, "every receipt has its final record")
    return found


def test_each_answer_has_a_receipt_that_says_how_it_ended(
    service: Any, taken: Taken, count: int
) -> None:
    counts = outcomes(service.url, taken)

    assert sum(counts.values()) == count
    assert set(counts) == {"complete", "aborted"}


def test_all_are_reproduced_under_another_load(
    service: Any, taken: Taken, count: int, tmp_path: Path, report_figure: Any
) -> None:
    async def run() -> dict[str, int]:
        stop = asyncio.Event()
        crowd = asyncio.create_task(load(service.url, stop))
        counts = await asyncio.to_thread(replay, service, tmp_path, taken)
        stop.set()
        with contextlib.suppress(httpx.HTTPError):
            await crowd
        return counts

    counts = asyncio.run(run())

    report_figure(f"replays of {count} receipts under another load", counts)
    assert counts == {"Reproduced": count}


def test_all_are_reproduced_by_a_worker_that_was_started_anew(
    service: Any, taken: Taken, count: int, tmp_path: Path
) -> None:
    (engine,) = processes_of(service, "strict", "VLLM::EngineCore")

    engine.send_signal(signal.SIGKILL)

    wait_for(lambda: _ready(service, "strict") == 0, 60, "the strict replica is out")
    wait_for(lambda: _ready(service, "strict") == 1, BACK_SECONDS, "it is back")
    assert replay(service, tmp_path, taken) == {"Reproduced": count}


def _ready(service: Any, pool: str) -> int:
    (found,) = httpx.get(f"{service.url}/isobatch/v1/services").json()["services"]
    replicas = [r for v in found["revisions"] if v["pool"] == pool for r in v["replicas"]]
    return sum(replica["ready"] for replica in replicas)


def test_the_exported_ledger_verifies_with_its_public_keys_alone(
    service: Any, taken: Taken, tmp_path: Path
) -> None:
    out = tmp_path / "all.jsonl"
    exported = service.run("receipt", "export", "--out", str(out))
    assert exported.returncode == 0, exported.stderr

    keys = ("--public-keys", str(tmp_path / "all.keys.json"))
    verified = service.run("receipt", "verify", str(out), *keys)

    assert verified.returncode == 0, verified.stdout
    assert out.read_text().count('"kind":"final"') >= len(taken)


def test_the_commands_of_the_readme_audit_an_answer(service: Any, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    block = text.split("<!-- audit -->")[1].split("```bash\n")[1].split("```")[0]
    assert len(block.splitlines()) == 6  # the request, and five commands
    here = block.replace("http://127.0.0.1:8080", service.url)
    here = here.replace("uv run isobatch", f"{sys.executable} -m isobatch_cli")
    environment = service.environment | {"ISOBATCH_GATEWAY": service.url}

    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "verified: " in ran.stdout
    assert "Reproduced: rcpt-" in ran.stdout

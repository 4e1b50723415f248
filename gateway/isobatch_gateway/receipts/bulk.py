"""Performs: replays many receipts through the API, and sums up what was found."""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.progress import Progress


class Failed(Exception):
    """The command cannot answer; the message says why and what to do."""


def asked(answer: httpx.Response) -> bytes:
    """The body of a 200. Raises `Failed` with the gateway's words for any other."""
    if answer.status_code == 200:
        return answer.content
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = f"the gateway answered {answer.status_code}"
    raise Failed(said)


def replay_many(client: httpx.Client, arguments: argparse.Namespace) -> int:
    """0 if all were reproduced, else 1."""
    query = {"since": arguments.since, "limit": 10_000}
    ids: list[str] = orjson.loads(asked(client.get("/isobatch/v1/receipts", params=query)))[
        "receipts"
    ]
    requests = {} if arguments.requests is None else dict(_requests(arguments.requests))
    if arguments.only_given:
        ids = [receipt for receipt in ids if receipt in requests]
    if arguments.sample is not None and arguments.sample < len(ids):
        ids = random.sample(ids, arguments.sample)
    found = []
    with (
        ThreadPoolExecutor(arguments.at_once) as threads,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
    ):
        task = bar.add_task("replay", total=len(ids))

        def one(receipt: str) -> dict[str, Any]:
            path = f"/isobatch/v1/receipts/{receipt}/replay"
            answer = client.post(path, content=requests.get(receipt, b""))
            view: dict[str, Any] = orjson.loads(asked(answer))
            return view

        for view in threads.map(one, ids):
            found.append(view)
            bar.advance(task)
    return _sum_up(found, arguments.output)


def _sum_up(found: list[dict[str, Any]], output: str) -> int:
    counts = Counter(view["verdict"] for view in found)
    if output == "json":
        print(json.dumps({"counts": counts, "replays": found}, indent=2))  # noqa: T201
    else:
        for view in found:
            if view["verdict"] != "Reproduced":
                print(f"{view['receipt']}  {view['verdict']}: {view['reason']}")  # noqa: T201
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        print(f"{len(found)} replayed: {said or 'none'}")  # noqa: T201
    return 0 if found and counts["Reproduced"] == len(found) else 1


def _requests(path: Path) -> Iterator[tuple[str, bytes]]:
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = json.loads(raw)
            yield entry["receipt"], json.dumps(entry["request"]).encode()
        except (ValueError, KeyError, TypeError) as exc:
            said = f'line {number} is not {{"receipt": ID, "request": {{…}}}}'
            raise Failed(f"{path}: {said}") from exc

"""Strict answers over HTTP: token ids, and the bits of every logprob that came with them."""

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any

import httpx

TOPICS = ("rain", "a late train", "the price of salt", "an old map", "bread", "stars", "rust")
PROMPTS = tuple(
    f"{number}. Write about {topic}. " + f"The {topic.split()[-1]} matters. " * (7 * number % 37)
    for number, topic in enumerate((TOPICS * 3)[:16])
)
TOKENS = 64

Answer = tuple[tuple[int, ...], tuple[str, ...]]
"""Token ids, and the bits of their logprobs and top logprobs."""


Body = dict[str, Any]


def body_of(prompt: str, *, sampled: bool) -> Body:
    """A completion of `TOKENS` tokens, logprobs included."""
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 1.0 if sampled else 0.0,
        "seed": 7,
        "logprobs": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def bits(value: float) -> str:
    """The 64 bits of `value`, since == holds for zeros of both signs and never for NaN."""
    return struct.pack(">d", value).hex()


def strict_client(url: str) -> httpx.AsyncClient:
    """A client of a gateway or of a strict worker itself, which ignores the header."""
    return httpx.AsyncClient(base_url=url, headers={"X-Consistency-Tier": "strict"})


async def ask(client: httpx.AsyncClient, body: Body) -> Answer:
    """The answer to `body`, which must be a 200."""
    answer = await client.post("/v1/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    choice = json.loads(answer.text)["choices"][0]
    kept = choice["logprobs"]
    marks = [bits(x) for x in kept["token_logprobs"]]
    marks += [f"{token} {bits(x)}" for top in kept["top_logprobs"] for token, x in top.items()]
    return tuple(choice["token_ids"]), tuple(marks)


async def alone(url: str, bodies: Sequence[Body]) -> list[Answer]:
    """The answers to `bodies`, one after another."""
    async with strict_client(url) as client:
        return [await ask(client, body) for body in bodies]


async def crowded(url: str, bodies: Sequence[Body], neighbours: int) -> list[Answer]:
    """The answers to `bodies` at once, `neighbours` of mixed length and settings among them."""
    async with strict_client(url) as client:
        noise = [asyncio.create_task(ask(client, neighbour(n))) for n in range(neighbours)]
        answers = await asyncio.gather(*(ask(client, body) for body in bodies))
        await asyncio.gather(*noise)
        return list(answers)


def neighbour(n: int) -> Body:
    """One of a crowd in which no two ask alike."""
    return {
        **body_of("noise " * (1 + 29 * n % 211), sampled=n % 2 == 0),
        "max_tokens": 8 + 5 * n % 90,
        "top_p": 0.9 if n % 3 else 1.0,
        "min_p": 0.05 if n % 5 == 2 else 0.0,
        "frequency_penalty": 0.5 if n % 7 == 3 else 0.0,
        "logprobs": n % 6,
    }

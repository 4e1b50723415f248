"""The promise, over HTTP: tokens and logprobs of a strict answer are its request's alone."""

import asyncio
import json
import struct
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

TOPICS = ("rain", "a late train", "the price of salt", "an old map", "bread", "stars", "rust")
PROMPTS = tuple(
    f"{number}. Write about {topic}. " + f"The {topic.split()[-1]} matters. " * (7 * number % 37)
    for number, topic in enumerate((TOPICS * 3)[:16])
)
TOKENS = 64

Answer = tuple[tuple[int, ...], tuple[str, ...]]
"""Token ids, and the bits of their logprobs and top logprobs."""


def body_of(prompt: str, *, sampled: bool) -> dict[str, Any]:
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
    return struct.pack(">d", value).hex()


def strict_client(url: str) -> httpx.AsyncClient:
    """A client of a gateway or of a strict worker itself, which ignores the header."""
    return httpx.AsyncClient(base_url=url, headers={"X-Consistency-Tier": "strict"})


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    answer = await client.post("/v1/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    choice = json.loads(answer.text)["choices"][0]
    kept = choice["logprobs"]
    marks = [bits(x) for x in kept["token_logprobs"]]
    marks += [f"{token} {bits(x)}" for top in kept["top_logprobs"] for token, x in top.items()]
    return tuple(choice["token_ids"]), tuple(marks)


async def alone(url: str, *, sampled: bool) -> list[Answer]:
    async with strict_client(url) as client:
        return [await ask(client, body_of(p, sampled=sampled)) for p in PROMPTS]


async def crowded(url: str, neighbours: int, *, sampled: bool) -> list[Answer]:
    """The prompts at once, `neighbours` others of mixed length and settings among them."""
    async with strict_client(url) as client:
        others = [
            {
                **body_of("noise " * (1 + 29 * n % 211), sampled=n % 2 == 0),
                "max_tokens": 8 + 5 * n % 90,
                "top_p": 0.9 if n % 3 else 1.0,
                "logprobs": n % 6,
            }
            for n in range(neighbours)
        ]
        noise = [asyncio.create_task(ask(client, other)) for other in others]
        answers = await asyncio.gather(*(ask(client, body_of(p, sampled=sampled)) for p in PROMPTS))
        await asyncio.gather(*noise)
        return list(answers)


@pytest.fixture(scope="module", params=[False, True], ids=["greedy", "temperature-1"])
def sampled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def wanted(service: Any, sampled: bool) -> list[Answer]:
    return asyncio.run(alone(service.url, sampled=sampled))


@pytest.mark.parametrize("neighbours", [pytest.param(7, marks=pytest.mark.full), 31])
def test_an_answer_among_neighbours_has_the_bits_of_the_answer_alone(
    service: Any, wanted: list[Answer], neighbours: int, sampled: bool
) -> None:
    assert asyncio.run(crowded(service.url, neighbours, sampled=sampled)) == wanted


def test_a_warm_prefix_cache_changes_nothing(
    service: Any, wanted: list[Answer], sampled: bool
) -> None:
    before = service.metric("strict", "vllm:prefix_cache_hits_total")

    assert asyncio.run(crowded(service.url, 0, sampled=sampled)) == wanted
    assert service.metric("strict", "vllm:prefix_cache_hits_total") > before


def test_a_second_replica_with_chunked_prefill_and_preemptions_gives_the_same_bits(
    service: Any, cramped: Any, wanted: list[Answer], sampled: bool
) -> None:
    got = asyncio.run(crowded(cramped.url, 0, sampled=sampled))

    assert cramped.metric("vllm:num_preemptions_total") > 0
    assert got == wanted


def test_prompt_logprobs_of_the_finished_text_are_those_it_was_decoded_with(
    service: Any, wanted: list[Answer], sampled: bool
) -> None:
    async def score() -> list[list[str]]:
        async with strict_client(service.url) as client:
            found = []
            for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=True):
                start = await client.post(
                    "/tokenize", json={"model": "smollm2", "prompt": prompt}, timeout=60
                )
                text = [*start.json()["tokens"], *tokens]
                body = {"model": "smollm2", "prompt": text, "max_tokens": 1, "prompt_logprobs": 0}
                answer = await client.post("/v1/completions", json=body, timeout=600)
                entries = answer.json()["choices"][0]["prompt_logprobs"][-len(tokens) :]
                found.append(
                    [
                        bits(entry[str(token)]["logprob"])
                        for entry, token in zip(entries, tokens, strict=True)
                    ]
                )
            return found

    assert asyncio.run(score()) == [list(marks[:TOKENS]) for _, marks in wanted]

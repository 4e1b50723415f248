"""The promise, over HTTP: tokens and logprobs of a strict answer are its request's alone."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.answers import (
    PROMPTS,
    TOKENS,
    Answer,
    Body,
    alone,
    ask,
    bits,
    body_of,
    crowded,
    strict_client,
)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=[False, True], ids=["greedy", "temperature-1"])
def bodies(request: pytest.FixtureRequest) -> list[Body]:
    return [body_of(prompt, sampled=request.param) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def wanted(service: Any, bodies: list[Body]) -> list[Answer]:
    return asyncio.run(alone(service.url, bodies))


@pytest.mark.parametrize("neighbours", [pytest.param(7, marks=pytest.mark.full), 31])
def test_an_answer_among_neighbours_has_the_bits_of_the_answer_alone(
    service: Any, bodies: list[Body], wanted: list[Answer], neighbours: int
) -> None:
    assert asyncio.run(crowded(service.url, bodies, neighbours)) == wanted


def test_what_the_throughput_pool_does_with_the_same_requests_is_reported(
    service: Any, bodies: list[Body], report_figure: Any, request: pytest.FixtureRequest
) -> None:
    worker = service.replica_url("throughput")
    before = asyncio.run(alone(worker, bodies))

    after = asyncio.run(crowded(worker, bodies, 31))

    moved = [sum(a[part] != b[part] for a, b in zip(before, after, strict=True)) for part in (0, 1)]
    label = f"throughput pool {request.node.callspec.id}, 31 neighbours, of {len(bodies)} answers"
    report_figure(label, f"{moved[0]} moved in tokens, {moved[1]} in logprobs")
    assert [len(tokens) for tokens, _ in after] == [TOKENS] * len(bodies)  # all were answered


def test_a_warm_prefix_cache_changes_nothing(
    service: Any, bodies: list[Body], wanted: list[Answer]
) -> None:
    before = service.metric("strict", "vllm:prefix_cache_hits_total")

    assert asyncio.run(crowded(service.url, bodies, 0)) == wanted
    assert service.metric("strict", "vllm:prefix_cache_hits_total") > before


def test_a_second_replica_with_chunked_prefill_and_preemptions_gives_the_same_bits(
    cramped: Any, bodies: list[Body], wanted: list[Answer]
) -> None:
    got = asyncio.run(crowded(cramped.url, bodies, 0))

    assert cramped.metric("vllm:num_preemptions_total") > 0
    assert got == wanted


def test_prompt_logprobs_of_the_finished_text_are_those_it_was_decoded_with(
    service: Any, wanted: list[Answer]
) -> None:
    assert asyncio.run(scores(service.url, wanted)) == [list(m[:TOKENS]) for _, m in wanted]


async def scores(url: str, answers: list[Answer]) -> list[list[str]]:
    """The bits of the prompt logprobs of each answer's tokens, read behind their prompt."""
    found = []
    async with strict_client(url) as client:
        for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True):
            text = [*await tokens_of(client, prompt), *tokens]
            body = {"model": "smollm2", "prompt": text, "max_tokens": 1, "prompt_logprobs": 0}
            answer = await client.post("/v1/completions", json=body, timeout=600)
            entries = answer.json()["choices"][0]["prompt_logprobs"][-len(tokens) :]
            pairs = zip(entries, tokens, strict=True)
            found.append([bits(entry[str(token)]["logprob"]) for entry, token in pairs])
    return found


async def tokens_of(client: httpx.AsyncClient, prompt: str) -> list[int]:
    answer = await client.post("/tokenize", json={"model": "smollm2", "prompt": prompt}, timeout=60)
    return list(answer.json()["tokens"])


def test_a_prefix_that_is_partly_cached_changes_nothing(service: Any) -> None:
    worker = service.replica_url("strict")
    text = "The tide came in over the flats and nobody had moved the boats. " * 26
    body = body_of(text, sampled=False) | {"max_tokens": 16}
    other = {**body, "prompt": text[: len(text) // 2] + "Then it rained."}
    hits = "vllm:prefix_cache_hits_total"

    # A salt of its own gives each a cache that is cold at first.
    (cold,) = asyncio.run(alone(worker, [{**body, "cache_salt": "cold"}]))
    before = service.metric("strict", hits)
    asyncio.run(alone(worker, [{**other, "cache_salt": "partial"}]))
    assert service.metric("strict", hits) == before
    (partial,) = asyncio.run(alone(worker, [{**body, "cache_salt": "partial"}]))

    cached = service.metric("strict", hits) - before
    assert 0 < cached < 300  # of the prompt's 360 tokens and more
    assert partial == cold


LONG = "".join(
    f"In the year {1500 + n} the river rose and the town moved its market to the hill. "
    for n in range(84)
)
"""About 1,800 tokens: near the longest context that is served."""


@pytest.mark.parametrize("share", [0.4, 1.0], ids=["700-tokens", "1800-tokens"])
def test_a_long_context_has_the_same_bits_cold_warm_partly_cached_and_crowded(
    service: Any, share: float
) -> None:
    worker = service.replica_url("strict")
    text = LONG[: int(share * len(LONG))]
    body = body_of(text, sampled=False) | {"max_tokens": 24}

    (cold,) = asyncio.run(alone(worker, [{**body, "cache_salt": f"cold {share}"}]))
    (warm,) = asyncio.run(alone(worker, [{**body, "cache_salt": f"cold {share}"}]))
    start = {**body, "prompt": text[: len(text) // 2], "cache_salt": f"partial {share}"}
    asyncio.run(alone(worker, [start]))
    (partial,) = asyncio.run(alone(worker, [{**body, "cache_salt": f"partial {share}"}]))
    (crowd,) = asyncio.run(crowded(worker, [{**body, "cache_salt": f"crowd {share}"}], 7))

    assert [warm, partial, crowd] == [cold] * 3


def test_a_neighbour_that_asks_for_logprobs_of_tokens_changes_nobody_elses(service: Any) -> None:
    worker = service.replica_url("strict")
    body = body_of("Bread", sampled=False) | {"max_tokens": 24}
    (wanted,) = asyncio.run(alone(worker, [body]))
    asks = {**body_of("Stars", sampled=False), "logprob_token_ids": [5, 6, 7]}

    async def beside() -> list[Answer]:
        async with strict_client(worker) as client:
            url = "/v1/completions"
            others = [asyncio.create_task(client.post(url, json=asks)) for _ in range(3)]
            answers = [await ask(client, body) for _ in range(2)]
            await asyncio.gather(*others)
        return answers

    assert asyncio.run(beside()) == [wanted] * 2
    refused = httpx.post(
        f"{service.url}/v1/completions", json=asks, headers={"X-Consistency-Tier": "strict"}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "logprob_token_ids"


SETTINGS: dict[str, Body] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.3, "temperature": 0.0},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.6, "temperature": 1.7},
    "bias": {"logit_bias": {"28": 5, "260": -100}, "temperature": 0.0},
    "bad-words": {"bad_words": [" the"], "min_tokens": 20},
    "grammar": {"structured_outputs": {"choice": ["yes it is", "no it is not"]}},
}


def test_what_a_request_may_ask_of_the_sampler_keeps_the_bits_too(service: Any) -> None:
    bodies = [
        {**body_of(PROMPTS[n], sampled=True), "max_tokens": 24, "ignore_eos": False, **asked}
        for n, asked in enumerate(SETTINGS.values())
    ]

    wanted = asyncio.run(alone(service.url, bodies))

    got = dict(zip(SETTINGS, asyncio.run(crowded(service.url, bodies, 12)), strict=True))
    assert got == dict(zip(SETTINGS, wanted, strict=True))


def test_each_of_several_choices_keeps_its_bits(service: Any) -> None:
    body = {**body_of("Once", sampled=True), "max_tokens": 16, "seed": -9, "n": 4}

    async def choices() -> list[Any]:
        async with strict_client(service.url) as client:
            noise = [asyncio.create_task(ask(client, body_of("x", sampled=True))) for _ in range(3)]
            answer = await client.post("/v1/completions", json=body, timeout=600)
            await asyncio.gather(*noise)
        found = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in found]

    first, again = asyncio.run(choices()), asyncio.run(choices())

    assert first == again
    assert len({tuple(ids) for ids, _ in first}) == 4


def test_a_seed_is_what_decides_a_sampled_answer(service: Any) -> None:
    async def answers() -> list[Answer]:
        async with strict_client(service.url) as client:
            body = body_of("Once", sampled=True) | {"max_tokens": 12}
            return [await ask(client, {**body, "seed": seed}) for seed in (1, 2, 1, 2**53 - 1)]

    first, second, again, last = asyncio.run(answers())
    assert first == again
    assert len({first[0], second[0], last[0]}) == 3

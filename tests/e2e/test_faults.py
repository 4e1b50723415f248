"""What dies under load is replaced, nobody hangs, and no tier is answered by another's pool."""

import asyncio
import signal
import time
from typing import Any

import httpx
import pytest

from tests.benchmarks.machine import slowness
from tests.e2e.answers import PROMPTS, TOKENS, Body, alone, body_of
from tests.e2e.load import POOL, Told, load
from tests.e2e.processes import processes_of, wait_for

pytestmark = pytest.mark.model

BACK_SECONDS = 240
_OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
GUIDES: tuple[Body, ...] = (
    {"json": {**_OBJECT, "required": ["a", "b"]}},
    {"regex": "(ab|ba){3,9}c?"},
    {"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+'},
    {"choice": ["north by west", "north", "south"]},
)
FOREIGN: Body = {"json": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}
"""What the grammar library of strict cannot express: under vLLM's "auto" it would choose another
library, for this request and for all that follow."""


def bodies() -> list[Body]:
    plain = [body_of(prompt, sampled=True) for prompt in PROMPTS[:4]]
    guided = [
        {**body_of(PROMPTS[n], sampled=True), "ignore_eos": False, "structured_outputs": guide}
        for n, guide in enumerate(GUIDES)
    ]
    return plain + guided


@pytest.mark.parametrize(
    ("pool", "title"),
    [
        pytest.param("strict", "VLLM::EngineCore", id="strict-engine"),
        pytest.param("throughput", "VLLM::Worker", id="throughput-engine-worker"),
        pytest.param("strict", "--pool strict", id="strict-worker", marks=pytest.mark.full),
        pytest.param("throughput", "--pool throughput", id="throughput", marks=pytest.mark.full),
    ],
)
def test_a_process_killed_under_load_is_replaced_and_gives_the_same_bits(
    service: Any, pool: str, title: str, report_figure: Any
) -> None:
    before = asyncio.run(alone(service.url, bodies()))
    fingerprint = service.numerics().fingerprint
    with load(service.url) as told:
        wait_for(lambda: _answered(told) == set(POOL), 60, "both tiers are under load")
        victims = processes_of(service, pool, title)
        assert victims
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        before_loss = len(told)
        wait_for(lambda: _refused(told[before_loss:], pool), 60, "the loss is noticed")
        lost = time.monotonic()

        def is_back() -> bool:
            answered = {POOL[tier] for tier in _answered(told, since=lost)}
            return pool in answered and not any(v.is_running() for v in victims)

        seconds = wait_for(is_back, BACK_SECONDS, f"{pool} answers again")

    report_figure(f"{title} killed under load", f"{_counts(told)}; back in {seconds:.0f} s")
    _check(told, pool)
    _ask_for_a_foreign_grammar(service)
    assert asyncio.run(alone(service.url, bodies())) == before
    again = service.numerics()
    assert again.fingerprint == fingerprint
    assert again.from_cache or pool == "throughput"
    assert again.certification_seconds <= (1 if again.from_cache else 20) * slowness()


def test_a_gateway_killed_under_load_is_replaced(service: Any, report_figure: Any) -> None:
    (gateway,) = [p for p in service.processes("--tables") if "gateway" in p.cmdline()]
    with load(service.url) as told:
        wait_for(lambda: _answered(told) == set(POOL), 60, "both tiers are under load")
        gateway.send_signal(signal.SIGKILL)
        wait_for(lambda: any(t.status is None for t in told), 60, "the loss is noticed")
        lost = time.monotonic()
        seconds = wait_for(lambda: _answered(told, since=lost) == set(POOL), 60, "it is back")

    report_figure("gateway killed under load", f"{_counts(told)}; back in {seconds:.1f} s")
    assert not gateway.is_running()
    assert all(t.is_of_its_tier for t in told)
    # 503: the new one has not yet heard from a replica.
    assert {200, None} <= {t.status for t in told} <= {200, 503, None}


@pytest.mark.parametrize("tier", list(POOL))
@pytest.mark.parametrize(
    "asked",
    [{"prompt": [1, 49_152]}, {"prompt": "x", "stop_token_ids": [49_152], "min_tokens": 2}],
    ids=["prompt", "stop"],
)
def test_no_token_id_takes_an_engine_down(service: Any, tier: str, asked: Body) -> None:
    headers = {"X-Consistency-Tier": tier}
    body = {"model": "smollm2", "max_tokens": 4, **asked}

    refused = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)

    assert refused.status_code == 400, refused.text
    body = {"model": "smollm2", "prompt": [1, 49_151], "max_tokens": 4}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def _answered(told: list[Told], since: float = 0.0) -> set[str]:
    """The tiers that answered a request asked after `since`."""
    return {t.tier for t in told if t.is_answered and t.asked > since}


def _refused(told: list[Told], pool: str) -> bool:
    return any(POOL[t.tier] == pool and not t.is_answered for t in told)


def _counts(told: list[Told]) -> str:
    of = {tier: [t.is_answered for t in told if t.tier == tier] for tier in POOL}
    return ", ".join(f"{tier} {sum(a)} of {len(a)} answered" for tier, a in of.items())


def _check(told: list[Told], pool: str) -> None:
    """Of the pool that lost a process every answer is whole or a refusal; the other lost none."""
    assert [t for t in told if not (t.is_of_its_tier and t.is_whole)] == []
    assert {t.status for t in told if POOL[t.tier] == pool} <= {200, 502, 503}
    assert all(t.is_answered for t in told if POOL[t.tier] != pool)


def _ask_for_a_foreign_grammar(service: Any) -> None:
    """The engine's first structured request: it must be refused, and decide nothing."""
    body = {"model": "smollm2", "prompt": "x", "max_tokens": TOKENS, "structured_outputs": FOREIGN}
    headers = {"X-Consistency-Tier": "strict"}
    refused = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert refused.status_code == 400, refused.text
    assert "not supported by xgrammar" in refused.json()["error"]["message"]

"""`isobatch up` as a newcomer meets it: what it prints works, clients work, faults pass."""

import json
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

from tests.benchmarks.machine import slowness
from tests.e2e.processes import wait_for

pytestmark = pytest.mark.model

START_SECONDS = 150
STORY = {"model": "smollm2", "prompt": "A story:", "max_tokens": 1500, "ignore_eos": True}


def chat(service: Any, tier: str) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/chat/completions",
        headers={"X-Consistency-Tier": tier},
        json={
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 4,
        },
        timeout=120,
    )


@pytest.fixture
def client(service: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_it_is_ready_in_time_and_its_certificate_is_cheap(service: Any) -> None:
    certificate, slower = service.numerics(), slowness()

    assert service.start_seconds <= START_SECONDS * slower
    assert certificate.certification_seconds <= (1 if certificate.from_cache else 20) * slower
    assert {operator.operator for operator in certificate.operators} >= {
        *("linear", "attention", "rms-norm", "log-softmax", "penalties", "min-p")
    }


def test_the_printed_curl_lines_are_answered(service: Any) -> None:
    lines = [line for line in service.started.stdout.splitlines() if line.startswith("curl ")]

    assert len(lines) == 2
    for line in lines:
        ran = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=120, check=True
        )
        assert json.loads(ran.stdout)["choices"][0]["message"]["content"], ran


def test_the_printed_sdk_snippet_is_answered_in_both_tiers(service: Any) -> None:
    text = service.started.stdout
    snippet = text[text.index("from openai") : text.index("# it runs in the background")]

    ran = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=120, check=True
    )
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["strict", "standard"]


@pytest.mark.parametrize(
    "declare",
    [
        pytest.param({"extra_headers": {"X-Consistency-Tier": "strict"}}, id="header"),
        pytest.param({"extra_body": {"consistency_tier": "strict"}}, id="extra-body"),
        pytest.param({"model": "smollm2:strict"}, id="model-suffix"),
    ],
)
def test_a_tier_can_be_declared_in_three_ways(
    client: openai.OpenAI, declare: dict[str, Any]
) -> None:
    arguments = {"model": "smollm2", "prompt": "1, 2, 3,", "max_tokens": 4, **declare}
    answer = client.completions.with_raw_response.create(**arguments)

    assert answer.headers["x-consistency-tier"] == "strict"
    assert answer.headers["x-served-by"].startswith("strict/")
    assert answer.headers["x-numerics-fingerprint"].startswith("sha256:")
    assert 0 <= int(answer.headers["x-seed"]) < 2**53


def test_a_stream_ends_with_usage_and_has_the_text_of_the_plain_answer(
    client: openai.OpenAI,
) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2:strict",
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 24,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    plain = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert plain.choices[0].logprobs is not None
    assert streamed == plain.choices[0].logprobs.content


def test_tools_are_passed_on(client: openai.OpenAI) -> None:
    city = {"type": "string", "enum": ["Bergen", "Rome"]}  # bounded: no answer can be cut short
    parameters = {
        "type": "object",
        "properties": {"city": city},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    answer = client.chat.completions.create(
        model="smollm2:strict",
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[weather],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
        temperature=0,
    )

    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in city["enum"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "nobody", "prompt": "x"}, openai.NotFoundError),
        ({"model": "smollm2", "prompt": "x", "temperature": -1}, openai.BadRequestError),
        (
            {"model": "smollm2", "prompt": "x", "extra_body": {"consistency_tier": "bold"}},
            openai.BadRequestError,
        ),
    ],
    ids=["unknown-model", "vllm-refuses", "unknown-tier"],
)
def test_errors_are_typed_as_the_sdk_types_them(
    client: openai.OpenAI, arguments: dict[str, Any], error: type[openai.APIError]
) -> None:
    with pytest.raises(error):
        client.completions.create(**arguments)


@pytest.mark.parametrize("tier", ["strict", "standard"])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "plain"])
def test_a_client_that_leaves_ends_the_work_within_two_seconds(
    service: Any, tier: str, streamed: bool
) -> None:
    pool = {"strict": "strict", "standard": "throughput"}[tier]
    running = "vllm:num_requests_running"
    body = json.dumps({**STORY, "stream": streamed})
    url = f"{service.url}/v1/completions"
    headers = ["-H", "Content-Type: application/json", "-H", f"X-Consistency-Tier: {tier}"]
    client = subprocess.Popen(["curl", "-sN", url, *headers, "-d", body], stdout=subprocess.DEVNULL)
    wait_for(lambda: service.metric(pool, running) == 1, 20, "the request runs upstream")

    client.kill()
    client.wait()

    wait_for(lambda: service.metric(pool, running) == 0, 2, "the request ends upstream")


@pytest.mark.parametrize("grammar", ["root ::= ", "no grammar at all ::", "root ::= missing"])
def test_a_grammar_that_cannot_be_is_the_client_s_fault(service: Any, grammar: str) -> None:
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 4}
    headers = {"X-Consistency-Tier": "strict"}
    url = f"{service.url}/v1/completions"

    asked = {**body, "structured_outputs": {"grammar": grammar}}
    refused = httpx.post(url, json=asked, headers=headers, timeout=60)

    assert refused.status_code == 400, refused.text
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200

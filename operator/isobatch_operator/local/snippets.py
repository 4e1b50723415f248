"""Decides the commands that `isobatch up` prints once it is ready: they work as they are pasted."""

import json

from isobatch_contracts.resource import InferenceServiceSpec
from isobatch_contracts.tiers import Tier

_KEY = "ISOBATCH_API_KEY"  # of the environment
_QUESTION = "What is the capital of France?"


def usable_tiers(spec: InferenceServiceSpec) -> tuple[Tier, ...]:
    """Strict and standard, as far as `spec` allows them and has their pool."""
    has_pool = {
        Tier.STRICT: spec.pools.strict is not None,
        Tier.STANDARD: spec.pools.throughput is not None,
    }
    return tuple(
        tier for tier, is_there in has_pool.items() if is_there and tier in spec.tiers.allowed
    )


def curl_command(url: str, model: str, tier: Tier, *, has_keys: bool = False) -> str:
    """One line of shell that asks `model` a question in `tier`, with the key of the environment."""
    # With a seed, so that pasting it twice shows what strict is.
    question = [{"role": "user", "content": _QUESTION}]
    body = json.dumps({"model": model, "messages": question, "max_tokens": 32, "seed": 1})
    key = f'-H "Authorization: Bearer ${_KEY}" ' if has_keys else ""
    return (
        f"curl -s {url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-H 'X-Consistency-Tier: {tier.value}' -d '{body}'"
    )


def sdk_snippet(url: str, model: str, tiers: tuple[Tier, ...], *, has_keys: bool = False) -> str:
    """The same with the OpenAI SDK, in every one of `tiers`."""
    key = f'os.environ["{_KEY}"]' if has_keys else '"unused"'
    standard = "import os\n\n" if has_keys else ""
    return f"""\
{standard}from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
for tier in {json.dumps([tier.value for tier in tiers])}:
    answer = client.chat.completions.create(
        model="{model}",
        messages=[{{"role": "user", "content": "{_QUESTION}"}}],
        max_tokens=32,
        seed=1,
        extra_headers={{"X-Consistency-Tier": tier}},
    )
    print(tier, repr(answer.choices[0].message.content))
"""


def welcome(url: str, model: str, tiers: tuple[Tier, ...], *, has_keys: bool) -> str:
    """What to print when everything is ready."""
    curls = "\n".join(curl_command(url, model, tier, has_keys=has_keys) for tier in tiers)
    return f"""
{model} is ready at {url}/v1

# with curl
{curls}

# with the OpenAI SDK (pip install openai)
{sdk_snippet(url, model, tiers, has_keys=has_keys)}"""

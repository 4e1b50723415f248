"""Performs `helm test`: asks each service once a tier, and says what came back.

Standard library only: it runs in whatever image the gateway has.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPMessage


def ask(
    url: str, seconds: float, body: object = None, tier: str = ""
) -> tuple[object, HTTPMessage]:
    """The JSON answer to one request, and its headers."""
    headers = {"Content-Type": "application/json"}
    if tier:
        headers["X-Consistency-Tier"] = tier
    if key := os.environ.get("ISOBATCH_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310  # the chart's own Service
    with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
        return json.load(answer), answer.headers


def failure_of(gateway: str, seconds: float, model: str, tier: str) -> str | None:
    """What is wrong with the answer of `tier`, or None."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    try:
        answer, headers = ask(f"{gateway}/v1/completions", seconds, body, tier)
    except urllib.error.HTTPError as error:
        return f"answered {error.code}: {error.read().decode(errors='replace')}"
    except OSError as error:
        return f"could not be asked: {error}"
    if headers["X-Consistency-Tier"] != tier:
        return f"was served as {headers['X-Consistency-Tier']!r}"
    if not isinstance(answer, dict) or not answer.get("choices"):
        return "has no choices in its answer"
    return None


def main() -> int:
    """0: every tier of every service answered; 1: not so, or there was nobody to ask."""
    gateway, seconds, wanted = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    try:
        listing, _ = ask(f"{gateway}/isobatch/v1/services", seconds)
    except OSError as error:
        print(f"the gateway could not be asked for its services: {error}")
        return 1
    assert isinstance(listing, dict), "the gateway's list of services is an object"
    tiers = {service["model"]: service["allowed_tiers"] for service in listing["services"]}
    failures = [
        f"{model} is not served; served: {sorted(tiers)}" for model in set(wanted) - {*tiers}
    ]
    asked = [(model, tier) for model in (wanted or tiers) for tier in tiers.get(model, ())]
    for model, tier in asked:
        failure = failure_of(gateway, seconds, model, tier)
        print(f"{model} {tier}: {failure or 'ok'}")
        failures += [failure] if failure else []
    if not asked:
        print("nobody was asked: apply an InferenceService, wait until it is Ready, and test again")
    return 1 if failures or not asked else 0


if __name__ == "__main__":
    sys.exit(main())

"""Performs the probes over HTTP: asks a worker or the gateway whether it would serve."""

import re

import httpx
from isobatch_contracts.fields import Digest
from isobatch_contracts.numerics import NUMERICS_PATH, Certified, NotCertified
from isobatch_contracts.tiers import PoolName
from pydantic import TypeAdapter, ValidationError

from isobatch_operator.exposition import Report, read_report
from isobatch_operator.readiness import Answers, NotYet, Probe, Refuses, Silent

_LOAD = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_NUMERICS: TypeAdapter[Certified | NotCertified] = TypeAdapter(Certified | NotCertified)


async def probe_worker(
    client: httpx.AsyncClient,
    url: str,
    pool: PoolName,
    served_name: str,
    digest: Digest | None,
) -> Probe:
    """Whether the worker at `url` would serve `served_name`, by its own paths for its pool."""
    try:
        match pool:
            case PoolName.STRICT:
                numerics = await client.get(url + NUMERICS_PATH)
                verdict = judge_numerics(numerics.status_code, numerics.content, digest)
                if not isinstance(verdict, Answers):
                    return verdict
                fingerprint = verdict.fingerprint
            case PoolName.THROUGHPUT:
                fingerprint = None
        health = await client.get(f"{url}/health")
        if health.status_code != 200:
            return NotYet(f"/health answers {health.status_code}")
        models = await client.get(f"{url}/v1/models")
        if served_name not in _model_ids(models):
            return NotYet(f"/v1/models does not list {served_name}")
        load = await client.get(f"{url}/metrics")
    except httpx.HTTPError as exc:
        return Silent(f"no answer ({type(exc).__name__})")
    return Answers(fingerprint, _requests_in_flight(load))


def judge_numerics(status: int, body: bytes, digest: Digest | None) -> Answers | NotYet | Refuses:
    """What a strict worker's answer at `/isobatch/v1/numerics` means. Anything unclear: not yet."""
    try:
        said = _NUMERICS.validate_json(body)
    except ValidationError:
        return NotYet(f"{NUMERICS_PATH} answers {status} without a verdict")
    match said:
        case Certified() if status != 200:
            return NotYet(f"{NUMERICS_PATH} says certified, but answers {status}")
        case Certified() if digest is not None and said.model_digest != digest:
            return Refuses(f"the weights are {said.model_digest}, not {digest} as the spec asks")
        case Certified():
            return Answers(said.fingerprint)
        case NotCertified(state="certifying"):
            return NotYet(said.reason)
        case NotCertified():
            return Refuses(said.reason)


async def probe_gateway(client: httpx.AsyncClient, url: str) -> tuple[Probe, Report | None]:
    """Whether the gateway is ready, and what it says of its tables and of what it counted."""
    try:
        ready = await client.get(f"{url}/readyz")
        if ready.status_code != 200:
            return NotYet(f"/readyz answers {ready.status_code}"), None
        metrics = await client.get(f"{url}/metrics")
    except httpx.HTTPError as exc:
        return Silent(f"no answer ({type(exc).__name__})"), None
    return Answers(), read_report(metrics.text) if metrics.status_code == 200 else None


def _model_ids(response: httpx.Response) -> list[str]:
    try:
        return [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _requests_in_flight(response: httpx.Response) -> int | None:
    samples = _samples(_LOAD, response)
    return int(sum(samples)) if samples else None


def _samples(pattern: re.Pattern[str], response: httpx.Response) -> list[float]:
    if response.status_code != 200:
        return []
    try:
        return [float(value) for value in pattern.findall(response.text)]
    except ValueError:
        return []

"""Our OpenAPI document is true: schemathesis finds no 5xx of ours and no schema violation."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from isobatch_gateway.openapi import PROXIED
from isobatch_gateway.receipts.routes import KEYS, RECEIPTS
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.gateway.fakes import Stage, until
from tests.gateway.receipts.kept import kept

OPERATIONS = [
    *(("POST", path) for path in PROXIED),
    *(("GET", path) for path in ("/v1/models", "/isobatch/v1/services")),
    *(("GET", path) for path in (RECEIPTS, KEYS, f"{RECEIPTS}/{{receipt}}")),
    *(("GET", f"{RECEIPTS}/{{receipt}}/verify"), ("POST", f"{RECEIPTS}/{{receipt}}/replay")),
    *(("GET", path) for path in ("/healthz", "/readyz", "/metrics")),
]
CASES = [
    *((GenerationMode.POSITIVE, method, path) for method, path in OPERATIONS),
    # Without parameters there is nothing to get wrong.
    *((GenerationMode.NEGATIVE, "POST", path) for path in PROXIED),
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway with fake workers, in a loop of its own: schemathesis calls from this thread."""
    found: list[str] = []
    is_up, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve(folder: Path) -> None:
        async with AsyncExitStack() as stack:
            stage = Stage(folder, stack)
            gateway, _, _ = await stage.pair(receipts=kept(folder))
            found.append(gateway.url)
            is_up.set()
            await stop.wait()

    folder = tmp_path_factory.mktemp("openapi")
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(folder)))
    thread.start()
    assert is_up.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    return httpx.get(f"{address}/openapi.json", trust_env=False).json()


@pytest.fixture(scope="module")
def schema(address: str) -> Any:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.parametrize(("mode", "method", "path"), CASES)
def test_every_answer_is_what_the_document_says(
    schema: Any, mode: GenerationMode, method: str, path: str
) -> None:
    operation = schema[path][method]

    # schemathesis' own pytest plugin does not know pytest 9.
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    def holds(case: Any) -> None:
        case.validate_response(case.call(), checks=CHECKS)

    holds()


def test_the_document_names_every_path(document: Any) -> None:
    found = [(method.upper(), path) for path, item in document["paths"].items() for method in item]

    assert sorted(found) == sorted(OPERATIONS)


def test_the_document_asks_for_a_key_only_where_keys_are(document: Any) -> None:
    assert "securitySchemes" not in document["components"]


async def test_with_keys_the_document_says_which_paths_ask_for_one(stage: Stage) -> None:
    gateway = await stage.gateway(keys=[])

    document = (await gateway.http.get("/openapi.json")).json()

    for path, item in document["paths"].items():
        asks = all("security" in operation for operation in item.values())
        assert asks == (path not in ("/healthz", "/readyz", "/metrics"))
    await until(lambda: gateway.runtime.keys)

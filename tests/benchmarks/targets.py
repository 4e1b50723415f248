"""Performs: starts what a load is sent to, all in front of one stub: nothing, isobatch, rivals.

A rival is installed from PyPI into an environment of its own, in the user's cache folder.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from isobatch_contracts.resource import Tiers
from isobatch_contracts.routing_table import Endpoint, Revision, RoutingTable, dump
from isobatch_contracts.tiers import PoolName
from isobatch_operator.local.ports import free_port

from tests.benchmarks import wire
from tests.benchmarks.machine import LOAD_CORE, TARGET_CORE, start, stop, tree
from tests.benchmarks.stub import FINGERPRINT

START_SECONDS = 120.0
LITELLM = "1.108.7"  # the newest whose extra `proxy` can be installed from PyPI
VLLM_ROUTER = "0.1.17"
RIVAL_KEY = "sk-benchmark"


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat requests: where, with which headers, by which processes."""

    name: str
    version: str
    port: int
    headers: str
    pids: tuple[int, ...]


@contextmanager
def direct(stub: int, folder: Path) -> Iterator[Target]:
    """The stub itself: what is left when nothing is in between."""
    yield Target("direct", "-", stub, "", ())


@contextmanager
def isobatch(stub: int, folder: Path, *options: str, tier: str = "") -> Iterator[Target]:
    """Our gateway as it ships: tier routing, keys, metrics, receipts and the access log on."""
    tables, keys = folder / "tables", folder / "keys.json"
    tables.mkdir()
    (tables / "bench.json").write_text(dump(routing_table(stub)))
    program = [sys.executable, "-m", "isobatch_cli"]
    made = subprocess.run(
        [*program, "key", "create", "--file", str(keys), "--id", "bench", "-o", "json"],
        check=True,
        capture_output=True,
        text=True,
    )
    headers = _bearer(json.loads(made.stdout)["key"])
    port = free_port("127.0.0.1")
    command = ["gateway", "--tables", str(tables), "--keys", str(keys), "--port", str(port)]
    command += options or ("--receipts", str(folder / "receipts.db"))
    if tier:
        headers += f"x-consistency-tier: {tier}\r\n"
    with _running([*program, *command], folder, port, headers) as pids:
        yield Target("isobatch", "this commit", port, headers, pids)


@contextmanager
def litellm(stub: int, folder: Path) -> Iterator[Target]:
    """LiteLLM's proxy, one worker, with a master key."""
    scripts = installed("litellm", f"litellm[proxy]=={LITELLM}")
    parameters = {"model": f"openai/{wire.MODEL}", "api_key": "none"}
    upstream = {"api_base": f"http://127.0.0.1:{stub}/v1"}
    config = {
        "model_list": [{"model_name": wire.MODEL, "litellm_params": parameters | upstream}],
        "general_settings": {"master_key": RIVAL_KEY},
        "litellm_settings": {"telemetry": False},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
    port, headers = free_port("127.0.0.1"), _bearer(RIVAL_KEY)
    options = ["--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command = [str(scripts / "litellm"), *options, "--num_workers", "1"]
    with _running(command, folder, port, headers, quiet) as pids:
        yield Target("LiteLLM", LITELLM, port, headers, pids)


@contextmanager
def vllm_router(stub: int, folder: Path) -> Iterator[Target]:
    """vLLM's router in Rust; it has no keys for clients."""
    scripts = installed("vllm-router", f"vllm-router=={VLLM_ROUTER}")
    port = free_port("127.0.0.1")
    command = [
        *(str(scripts / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"http://127.0.0.1:{stub}", "--policy", "cache_aware"),
        *("--prometheus-port", str(free_port("127.0.0.1")), "--log-level", "warning"),
    ]
    with _running(command, folder, port, "") as pids:
        yield Target("vllm-router", VLLM_ROUTER, port, "", pids)


TARGETS = {
    "direct": direct,
    "isobatch": isobatch,
    "litellm": litellm,
    "vllm-router": vllm_router,
}


@contextmanager
def stub_worker(folder: Path) -> Iterator[int]:
    """A stub upstream; its port."""
    with (folder / "stub.log").open("w") as log:
        process = start([sys.executable, "-m", "tests.benchmarks.stub"], LOAD_CORE, log)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        stop(process)


def routing_table(stub: int) -> RoutingTable:
    """Both pools, one replica each; all at the stub."""
    url = f"http://127.0.0.1:{stub}"

    def revision(pool: PoolName, fingerprint: str | None) -> Revision:
        endpoint = Endpoint(name=f"{pool.value}-0", url=url)
        return Revision(
            name="r1", pool=pool, weight=100, fingerprint=fingerprint, endpoints=(endpoint,)
        )

    return RoutingTable(
        version=1,
        service="bench",
        model=wire.MODEL,
        tiers=Tiers(),
        pools=tuple(PoolName),
        revisions=(revision(PoolName.STRICT, FINGERPRINT), revision(PoolName.THROUGHPUT, None)),
    )


def installed(name: str, requirement: str) -> Path:
    """The folder of programs of an environment with `requirement`, made once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isobatch"
    venv = cache / "benchmarks" / requirement.replace("[", "-").replace("]", "").replace("==", "-")
    if not (venv / "bin" / name).exists():
        uv = os.environ.get("UV", "uv")
        python = ["--python", str(venv / "bin" / "python")]
        subprocess.run([uv, "venv", "--clear", "--python", "3.11", str(venv)], check=True)
        subprocess.run([uv, "pip", "install", *python, requirement], check=True)
    return venv / "bin"


@contextmanager
def _running(
    command: list[str],
    folder: Path,
    port: int,
    headers: str,
    extra_env: dict[str, str] | None = None,
) -> Iterator[tuple[int, ...]]:
    """`command`, from the moment it answers a chat request; the ids of its processes."""
    environment = {**os.environ, **(extra_env or {})}
    with (folder / "log").open("w") as log:
        process = start(command, TARGET_CORE, log, environment, stdout=log)
    try:
        _wait_until(lambda: _answers(port, headers), process, folder / "log")
        yield tree(process.pid)
    finally:
        stop(process)


def _wait_until(is_true: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"does not answer:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def _answers(port: int, headers: str) -> bool:
    """Whether a short stream is answered."""
    message = {"role": "user", "content": "interval_ms=1 chunks=1"}
    body = {"model": wire.MODEL, "messages": [message], "max_tokens": 1, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", **_parsed(headers)},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return b"[DONE]" in answer.read()
    except (urllib.error.URLError, OSError):
        return False


def _bearer(key: str) -> str:
    return f"authorization: Bearer {key}\r\n"


def _parsed(headers: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in headers.splitlines())

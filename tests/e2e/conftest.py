import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from isobatch_contracts.numerics import NUMERICS_PATH, Certified
from isobatch_operator.local.ports import free_port
from isobatch_worker.cache import default_cache_dir
from isobatch_worker.models import resolve, show_progress

READY_SECONDS = 240
MODEL = "builtin://smollm2-135m"


class Worker:
    """A real `isobatch worker` in a process group of its own."""

    def __init__(self, pool: str, log: Path, *vllm_args: str) -> None:
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "isobatch_cli", "worker", "--pool", pool]
        command += ["--model", MODEL, "--served-model-name", "smollm2"]
        command += ["--port", str(self.port), "--", *vllm_args]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read()

    def wait_until_answering(self) -> None:
        """Poll until the port answers; a worker that ended fails with its log."""
        for _ in range(READY_SECONDS):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)
                break
            with contextlib.suppress(OSError):
                self.get("/version")
                return
        pytest.fail(f"worker does not answer:\n{self.log.read_text()[-4000:]}")

    def metric(self, name: str) -> float:
        _, text = self.get("/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


class Service:
    """A real `isobatch up --detach` in a state folder of its own; `arguments` are more of `up`."""

    def __init__(
        self, state: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = state
        self.environment = {
            **os.environ,
            "ISOBATCH_STATE_DIR": str(state),
            **(environment or {}),
        }
        begun = time.monotonic()
        self.started = self.run("up", "--detach", "--port", str(self.port), *arguments)
        self.start_seconds = time.monotonic() - begun

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "isobatch_cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def replica_url(self, pool: str) -> str:
        (table,) = self.state.glob("*/tables/table.json")
        revisions = json.loads(table.read_text())["revisions"]
        (found,) = [e["url"] for r in revisions if r["pool"] == pool for e in r["endpoints"]]
        return str(found)

    def numerics(self) -> Certified:
        """The certificate of the strict replica."""
        url = self.replica_url("strict") + NUMERICS_PATH
        with urllib.request.urlopen(url, timeout=10) as answer:
            return Certified.model_validate_json(answer.read())

    def metric(self, pool: str, name: str) -> float:
        with urllib.request.urlopen(self.replica_url(pool) + "/metrics", timeout=10) as answer:
            lines = [x for x in answer.read().decode().splitlines() if x.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def processes(self, part: str) -> list[psutil.Process]:
        """Our processes whose command line or title holds `part`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                title = " ".join(process.cmdline())
                if environment.get("ISOBATCH_STATE_DIR") == str(self.state) and part in title:
                    found.append(process)
        return found


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # Its conversion is no part of a start.
    resolve(MODEL, cache_dir=default_cache_dir(), expected_digest=None, progress=show_progress)
    service = Service(tmp_path_factory.mktemp("state"))
    assert service.started.returncode == 0, service.started.stdout + service.started.stderr
    yield service
    stopped = service.run("down")
    assert stopped.returncode == 0, stopped.stderr
    assert service.processes("isobatch") == []


@pytest.fixture(scope="session")
def cramped(logs: Path, service: Service) -> Iterator[Worker]:
    """A second replica: prefill chunked at 64 tokens, and a KV cache that forces preemptions."""
    worker = Worker(
        "strict",
        logs / "cramped.log",
        *("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "12"),
        *("--max-model-len", "512", "--no-enable-prefix-caching"),
    )
    worker.wait_until_answering()
    yield worker
    worker.stop()


@pytest.fixture
def service_of(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Start one more service: (arguments of `up`, environment) -> it, stopped afterwards."""
    started: list[Service] = []

    def start(*arguments: str, **environment: str) -> Service:
        state = tmp_path / f"state-{len(started)}"
        started.append(Service(state, *arguments, environment=environment))
        return started[-1]

    yield start
    for service in started:
        service.run("down")

"""The commands as a user runs them: processes, exit codes, signals."""

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import structlog
from isobatch_gateway import commands, keys
from isobatch_gateway.server import listen

from tests.gateway.fakes import CHAT, HELLO, FakeWorker, Stage, begin_then_hang, event, until

RUN = "import sys; from isobatch_gateway.commands import gateway; sys.exit(gateway(sys.argv[1:]))"


@dataclass
class Running:
    process: asyncio.subprocess.Process
    url: str
    log: Path

    async def exit_code(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@asynccontextmanager
async def running(stage: Stage, *more: str) -> AsyncIterator[Running]:
    log = stage.folder / "log"
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RUN,
            *("--tables", str(stage.folder / "tables"), "--port", "0", *more),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            said = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", said)
        assert found, (said, log.read_text())
        yield Running(process, found[0], log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ready(http: httpx.AsyncClient, url: str) -> None:
    for _ in range(2000):
        got = await http.get(f"{url}/isobatch/v1/services")
        replicas = [r["replicas"] for s in got.json()["services"] for r in s["revisions"]]
        if replicas and all(replica["ready"] for some in replicas for replica in some):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never ready")


@asynccontextmanager
async def streaming(stage: Stage, *more: str) -> AsyncIterator[tuple[Running, FakeWorker, str]]:
    """A gateway process with one open stream that never ends; the stream's text is written."""
    worker = await stage.worker()
    worker.reply = begin_then_hang
    stage.write(stage.table(worker))
    async with running(stage, *more) as gateway, httpx.AsyncClient(trust_env=False) as http:
        await ready(http, gateway.url)
        yield gateway, worker, gateway.url


async def read_all(url: str, began: asyncio.Event) -> bytes:
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
        http.stream("POST", url + CHAT, json=HELLO | {"stream": True}) as got,
    ):
        text = b""
        async for chunk in got.aiter_bytes():
            text += chunk
            began.set()
        return text


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in this process does to the log."""
    root, was = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**was)


async def test_sigterm_lets_open_streams_finish_and_exits_0(stage: Stage) -> None:
    async with streaming(stage, "--drain-timeout", "20s") as (gateway, worker, url):
        began = asyncio.Event()
        stream = asyncio.create_task(read_all(url, began))
        await began.wait()
        gateway.process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient(trust_env=False) as http:
            await _until_not_ready(http, url)
            refused = await http.post(url + CHAT, json=HELLO)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"]

        await worker.kill()

        assert b'"upstream_failed"' in await stream
        assert await gateway.exit_code() == 0


async def test_at_the_drain_deadline_streams_end_in_a_frame_and_the_exit_code_is_0(
    stage: Stage,
) -> None:
    async with streaming(stage, "--drain-timeout", "200ms") as (gateway, _, url):
        began = asyncio.Event()
        stream = asyncio.create_task(read_all(url, began))
        await began.wait()
        gateway.process.send_signal(signal.SIGTERM)

        text = await stream

        assert text.startswith(event(0))
        assert text.endswith(b"data: [DONE]\n\n")
        assert b'"pool_unavailable"' in text
        assert await gateway.exit_code() == 0


async def test_a_second_signal_ends_it_at_once(stage: Stage) -> None:
    async with streaming(stage, "--drain-timeout", "60s") as (gateway, _, url):
        began = asyncio.Event()
        stream = asyncio.create_task(read_all(url, began))
        await began.wait()
        gateway.process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient(trust_env=False) as http:
            await _until_not_ready(http, url)
        gateway.process.send_signal(signal.SIGTERM)

        assert await gateway.exit_code() == 1
        await asyncio.gather(stream, return_exceptions=True)


async def test_an_idle_gateway_stops_at_once(stage: Stage) -> None:
    stage.write(stage.table(await stage.worker()))
    async with running(stage) as gateway:
        gateway.process.send_signal(signal.SIGINT)

        assert await gateway.exit_code() == 0


async def test_a_line_a_request_says_what_was_done_and_nothing_that_was_said(
    stage: Stage,
) -> None:
    stage.write(stage.table(await stage.worker()))
    async with running(stage) as gateway, httpx.AsyncClient(trust_env=False) as http:
        await ready(http, gateway.url)
        await http.post(
            gateway.url + CHAT,
            json={"model": "m", "messages": [{"role": "user", "content": "a private matter"}]},
            headers={"x-request-id": "mine", "authorization": "Bearer isk-private"},
        )
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.exit_code()

    assert "private" not in gateway.log.read_text()
    (line,) = [line for line in gateway.lines() if line["event"] == "request"]
    expected = {
        "request_id": "mine",
        "tenant": "anonymous",
        "model": "m",
        "tier": "standard",
        "pool": "throughput",
        "revision": "rev1",
        "replica": "r0",
        "status": 200,
        "outcome": "ok",
    }
    assert expected.items() <= line.items()


async def test_the_log_can_be_switched_off(stage: Stage) -> None:
    stage.write(stage.table(await stage.worker()))
    async with (
        running(stage, "--log-level", "off") as gateway,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        await ready(http, gateway.url)
        await http.post(gateway.url + CHAT, json=HELLO)
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.exit_code() == 0

    assert gateway.log.read_text() == ""


def test_a_taken_port_names_who_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code = commands.gateway(["--tables", str(tmp_path), "--port", str(port)])

    assert code == 1
    said = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is taken by process {os.getpid()}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tables", "/nowhere"], "--tables /nowhere is no folder"),
        (["--tables", ".", "--keys", "/nowhere/keys.json"], "keys file /nowhere/keys.json"),
        (["--tables", ".", "--secret", "/nowhere/secret"], "secret file /nowhere/secret"),
        (["--tables", ".", "--idle-timeout", "0"], "timeout idle must be above 0"),
    ],
    ids=["tables", "keys", "secret", "timeout"],
)
def test_malformed_settings_stop_the_start(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.gateway(arguments) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [commands.gateway, commands.key])
def test_help_has_an_example(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(["--help"])  # type: ignore[operator]  # both take a list

    assert stopped.value.code == 0
    assert "example:" in capsys.readouterr().out


def test_a_keys_file_that_is_not_there_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.key(["list", "--file", str(tmp_path / "none.json")]) == 1
    assert "no keys file" in capsys.readouterr().err


def test_a_key_is_made_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "keys.json")
    limits = '{"strict": {"requestsPerMinute": 60}}'
    made = commands.key(
        [
            *f"create --file {file} --id ci --tier strict --model m -o json".split(),
            *("--default-tier", "strict", "--limits", limits),
        ]
    )
    token = json.loads(capsys.readouterr().out)["key"]

    assert made == 0
    text = Path(file).read_text()
    assert token not in text
    assert Path(file).stat().st_mode & 0o077 == 0
    ring = keys.KeyRing(keys.parse(text).keys)
    holder = ring.holder(token)
    assert holder is not None
    assert (holder.id, holder.tenant, holder.models) == ("ci", "ci", ("m",))
    assert holder.may_see("m")
    assert not holder.may_see("n")

    assert commands.key(["create", "--file", file, "--id", "ci"]) == 1
    assert commands.key(["list", "--file", file, "-o", "json"]) == 0
    listed = capsys.readouterr().out
    assert json.loads(listed)[0]["id"] == "ci"
    assert "sha256" not in listed
    assert commands.key(["list", "--file", file]) == 0
    assert commands.key(["revoke", "--file", file, "ci"]) == 0
    assert commands.key(["revoke", "--file", file, "ci"]) == 1
    assert keys.parse(Path(file).read_text()).keys == ()


@pytest.mark.parametrize(
    "more",
    [
        ["--id", "a/b"],
        ["--id", "a", "--limits", "{"],
        ["--id", "a", "--limits", '{"strict": {"x": 1}}'],
        ["--id", "a", "--tier", "strict", "--default-tier", "standard"],
    ],
    ids=["id", "limits are no JSON", "unknown limit", "default is not allowed"],
)
def test_a_malformed_key_is_not_made(tmp_path: Path, more: list[str]) -> None:
    file = tmp_path / "keys.json"

    assert commands.key(["create", "--file", str(file), *more]) == 1
    assert not file.exists()


async def _until_not_ready(http: httpx.AsyncClient, url: str) -> None:
    codes: list[int] = []

    async def look() -> None:
        while not codes or codes[-1] != 503:
            codes.append((await http.get(f"{url}/readyz")).status_code)

    async with asyncio.timeout(15):
        await look()
    await until(lambda: codes[-1] == 503)

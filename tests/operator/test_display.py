"""What people see: the table on a terminal, the snippets they paste."""

import ast
import fcntl
import io
import json
import os
import pty
import select
import shlex
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from isobatch_contracts.tiers import Tier
from isobatch_operator.local.ports import base_url, free_port
from isobatch_operator.local.programs import GatewayStart, Listening, gateway_command
from isobatch_operator.local.snippets import curl_command, sdk_snippet, usable_tiers
from isobatch_operator.local.state import InstancePhase, LocalState, ProcessRecord, ReplicaView
from isobatch_operator.local.table_view import Progress, state_table
from isobatch_operator.status import Phase
from rich.console import Console

FAKE_UP = str(Path(__file__).parent / "fakes" / "fake_up.py")


def state_with(**gateway: Any) -> LocalState:
    return LocalState(
        instance="i",
        name="chat",
        phase=InstancePhase.STARTING,
        model="chat",
        url="http://127.0.0.1:1",
        host="127.0.0.1",
        port=1,
        manifest=None,
        supervisor=ProcessRecord(name="up", pid=1, created_at=0.0, log=""),
        gateway=ReplicaView(name="gateway", log="", **gateway),
    )


def test_a_narrow_table_wraps_the_detail_alone() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)

    console.print(state_table(state_with(phase=Phase.STARTING, since=2.0, detail="[x] " * 40), 9.0))

    heading, line, *more = out.getvalue().splitlines()
    assert heading.split() == ["POOL", "REPLICA", "STATE", "SINCE", "DETAIL"]
    assert line.split()[:5] == ["gateway", "gateway", "starting", "7", "s"]
    assert " ".join([line, *more]).count("[x]") == 40


def test_plain_lines_say_each_change_once() -> None:
    out = io.StringIO()
    with Progress(out) as progress:
        progress.show(state_with(phase=Phase.STARTING, detail="loading 1"))
        progress.show(state_with(phase=Phase.STARTING, detail="loading 2"))
        progress.show(state_with(phase=Phase.READY))

    lines = [line.partition(" ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["gateway: starting (loading 1)", "gateway: ready"]


def test_a_terminal_shows_a_live_table_then_the_welcome_and_ctrl_c_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBATCH_STATE_DIR", str(tmp_path))
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    popen = subprocess.Popen(
        [sys.executable, FAKE_UP, "--port", str(free_port("127.0.0.1"))],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environ,
        start_new_session=True,
        preexec_fn=_take_terminal,  # noqa: PLW1509  # no thread of ours runs yet
    )
    os.close(theirs)
    seen = _read_until(ours, b"Ctrl-C drains")
    os.write(ours, b"\x03")
    popen.wait(timeout=30)
    os.close(ours)

    text = seen.decode()
    assert "REPLICA" in text
    assert "smollm2 is ready at" in text
    assert popen.returncode == 0


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(descriptor: int, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        readable, _, _ = select.select([descriptor], [], [], 60)
        assert readable, f"nothing more came after {seen!r}"
        seen += os.read(descriptor, 65536)
    return seen


def test_the_curl_line_is_one_shell_command_with_a_json_body() -> None:
    words = shlex.split(curl_command("http://127.0.0.1:8080", "chat", Tier.STRICT))

    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/chat/completions"]
    assert "X-Consistency-Tier: strict" in words
    assert json.loads(words[-1])["model"] == "chat"


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_curl_line_sends_the_key_of_the_environment_where_one_is_needed(
    *, has_keys: bool
) -> None:
    line = curl_command("http://h", "chat", Tier.STRICT, has_keys=has_keys)

    assert ("Authorization: Bearer $ISOBATCH_API_KEY" in shlex.split(line)) is has_keys


def test_the_gateway_is_started_with_the_keys_that_up_was_given(tmp_path: Path) -> None:
    def command(keys: Path | None) -> tuple[str, ...]:
        at = Listening("127.0.0.1", 8080, keys)
        files = (tmp_path / name for name in ("tables", "secret", "receipts.db"))
        return gateway_command(GatewayStart(at, *files))

    assert "--keys" not in command(None)
    assert command(tmp_path / "keys.json")[-2:] == ("--keys", str(tmp_path / "keys.json"))


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_sdk_snippet_is_python_and_asks_in_every_tier(*, has_keys: bool) -> None:
    snippet = sdk_snippet("http://h", "chat", (Tier.STRICT, Tier.STANDARD), has_keys=has_keys)

    assert ast.parse(snippet)
    assert ('os.environ["ISOBATCH_API_KEY"]' in snippet) is has_keys
    assert 'for tier in ["strict", "standard"]' in snippet


@pytest.mark.parametrize(
    ("options", "tiers"),
    [
        ({}, ["strict", "standard"]),
        ({"strict": None}, ["standard"]),
        ({"throughput": None}, ["strict"]),
    ],
    ids=["both", "no strict pool", "no throughput pool"],
)
def test_snippets_use_the_tiers_that_the_service_has(
    make_service: Any, options: dict[str, None], tiers: list[str]
) -> None:
    assert [tier.value for tier in usable_tiers(make_service(**options).spec)] == tiers


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert base_url(host, 80) == url

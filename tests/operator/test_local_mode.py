"""`isobatch up`, `status`, `logs` and `down`, end to end with fake workers and a fake gateway."""

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml
from isobatch_contracts.routing_table import RoutingTable
from isobatch_contracts.tiers import PoolName
from isobatch_operator.local.commands import down, logs, rollout, status
from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.ports import free_port
from isobatch_operator.local.processes import end, find_tagged, is_alive
from isobatch_operator.local.programs import Programs, Timings
from isobatch_operator.local.state import InstancePhase, LocalState, ReplicaView, RolloutView
from isobatch_operator.local.up_command import run_up
from isobatch_operator.rollout import Phase as RolloutPhase
from isobatch_operator.status import Phase

FAKE_UP = str(Path(__file__).parent / "fakes" / "fake_up.py")
Eventually = Callable[[Callable[[], bool]], None]


class Up:
    """`fake_up.py ARGV` in a process of its own, forked: the imports are ours, and paid once."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.returncode: int | None = None
        self._files = [Path(tempfile.mkstemp(dir=folder, suffix=".txt")[1]) for _ in range(2)]
        self.pid = os.fork()
        if self.pid == 0:
            self._become(argv)

    def _become(self, argv: list[str]) -> None:
        code: object = 1
        try:
            os.setsid()
            for number, path in enumerate(self._files, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = (
                os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
            )
            sys.argv = [FAKE_UP, *argv]
            runpy.run_path(FAKE_UP, run_name="__main__")
        except SystemExit as exc:
            code = exc.code
        except BaseException:  # noqa: BLE001  # the last frame of a process
            traceback.print_exc()
        os._exit(code if isinstance(code, int) else 1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def output(self) -> tuple[str, str]:
        out, err = (path.read_text() for path in self._files)
        return out, err


@dataclass
class Local:
    """One state folder, and what runs by it."""

    root: Path
    eventually: Eventually
    name: str = "chat"
    port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    started: list[Up] = field(default_factory=list)

    @property
    def directory(self) -> StateDirectory:
        return StateDirectory(self.root / self.name)

    def up(self, *argv: str, patient: bool = False) -> Up:
        flags = ["--patient"] if patient else []
        up = Up([*flags, "--port", str(self.port), *argv], self.root.parent)
        self.started.append(up)
        return up

    def finish(self, up: Up) -> tuple[int | None, str, str]:
        self.eventually(lambda: up.poll() is not None)
        return (up.returncode, *up.output())

    def detach(self, *argv: str) -> tuple[int | None, str, str]:
        return self.finish(self.up("--detach", *argv))

    def serve(self, *argv: str, patient: bool = False) -> Up:
        """`up` in the foreground, once it is ready."""
        up = self.up(*argv, patient=patient)
        self.eventually(lambda: self.phase is InstancePhase.READY or up.poll() is not None)
        assert up.poll() is None, up.output()
        return up

    @property
    def state(self) -> LocalState:
        state = self.directory.read_state()
        assert state is not None
        return state

    @property
    def phase(self) -> InstancePhase | None:
        state = self.directory.read_state()
        return state.phase if state else None

    @property
    def table(self) -> RoutingTable:
        table = self.directory.read_table()
        assert table is not None
        return table

    @property
    def rollout(self) -> RolloutView:
        view = self.state.rollout
        assert view is not None
        return view

    def routed(self, pool: PoolName) -> list[str]:
        return [e.name for r in self.table.revisions if r.pool is pool for e in r.endpoints]

    def replicas(self, pool: str) -> list[ReplicaView]:
        return [view for p in self.state.pools if p.name == pool for view in p.replicas]

    def processes(self) -> list[psutil.Process]:
        return find_tagged(self.directory.instance_prefix)


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> Iterator[Local]:
    monkeypatch.setenv("ISOBATCH_STATE_DIR", str(tmp_path / "state"))
    local = Local(tmp_path / "state", eventually)
    yield local
    for up in local.started:
        up.send_signal(signal.SIGKILL)
        local.finish(up)
    state = local.directory.read_state()
    supervisor = psutil.Process(state.supervisor.pid) if state and is_running(state) else None
    end([p for p in (supervisor, *local.processes()) if p], grace_seconds=0)


def is_running(state: LocalState) -> bool:
    try:
        return is_alive(psutil.Process(state.supervisor.pid))
    except psutil.NoSuchProcess:
        return False


def test_detach_returns_when_ready_and_the_other_commands_see_it(
    local: Local, write_manifest: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = str(write_manifest())
    code, out, err = local.detach("-f", manifest)

    assert (code, err) == (0, "")
    assert f"chat is ready at http://127.0.0.1:{local.port}/v1" in out
    assert out.count("curl -s ") == 2

    assert status([]) == 0
    shown = capsys.readouterr().out
    assert f"chat: ready at http://127.0.0.1:{local.port}/v1" in shown
    assert "strict fingerprint: sha256:aaaa" in shown
    assert shown.splitlines()[1].split() == ["POOL", "REPLICA", "STATE", "SINCE", "DETAIL"]
    assert status(["-o", "json", "chat"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert status(["-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == as_json
    assert [pool["ready"] for pool in as_json["pools"]] == [1, 1]
    assert local.directory.secret_file().stat().st_mode & 0o777 == 0o600
    assert [p.name for p in local.directory.tables.iterdir()] == ["table.json"]

    assert logs(["strict"]) == 0
    assert "fake strict worker" in capsys.readouterr().out
    assert logs(["up", "--tail", "1"]) == 0
    assert '"phase": "ready"' in capsys.readouterr().out
    assert logs(["strict", "--replica", "7"]) == 1
    assert "no log of replica 7 of strict" in capsys.readouterr().err

    second, _, said = local.detach("-f", manifest)
    assert second == 1
    assert f"chat is already running: pid {local.state.supervisor.pid}" in said
    assert f"http://127.0.0.1:{local.port} (ready: strict 1/1, throughput 1/1)" in said

    assert down([]) == 0
    assert capsys.readouterr().out == "chat is stopped\n"
    assert local.processes() == []
    assert status([]) == 1
    assert "chat: stopped" in capsys.readouterr().out
    assert down([]) == 0
    assert "chat is not running" in capsys.readouterr().out


def test_ctrl_c_drains_the_gateway_and_leaves_nothing(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest(strict_args=("--fork",), throughput_args=("--fork-away",))
    up = local.serve("-f", str(manifest))
    # Three programs, and a child of each worker.
    local.eventually(lambda: len(local.processes()) == 5)

    up.send_signal(signal.SIGINT)
    code, out, err = local.finish(up)

    assert (code, err) == (0, "")
    assert "Ctrl-C drains" in out
    assert "draining" in local.directory.log_file("gateway").read_text()
    assert local.processes() == []
    assert local.phase is InstancePhase.STOPPED


def test_a_second_ctrl_c_ends_everything_at_once(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    up = local.serve("-f", str(write_manifest(strict_args=("--ignore-sigterm",))), patient=True)

    up.send_signal(signal.SIGINT)
    local.eventually(lambda: len(local.processes()) == 1)
    up.send_signal(signal.SIGINT)
    code, _, _ = local.finish(up)

    assert code == 130
    assert local.processes() == []


def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(
    local: Local, write_manifest: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    local.serve("-f", str(write_manifest(strict_args=("--ignore-sigterm", "--fork"))))

    assert down([]) == 0

    assert capsys.readouterr().out == "chat is stopped\n"
    assert local.processes() == []


def test_kill_9_of_the_supervisor_leaves_no_process_and_up_starts_anew(
    local: Local, write_manifest: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = str(write_manifest())
    up = local.serve("-f", manifest)
    version = local.table.version

    up.send_signal(signal.SIGKILL)

    local.eventually(lambda: local.processes() == [])
    assert status([]) == 1
    assert "was killed" in capsys.readouterr().out
    assert local.detach("-f", manifest)[0] == 0
    assert local.table.version > version
    assert status([]) == 0


@pytest.mark.parametrize("by", ["down", "up"])
def test_what_survives_a_kill_9_of_the_supervisor_is_ended_by_the_next_command(
    local: Local, write_manifest: Callable[..., Path], by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers of ours kill their own children; these do not, and one ignores its signal too."""
    stubborn = ("--ignore-sigterm", "--fork", "--fork-away")
    manifest = write_manifest(strict_args=stubborn)
    up = local.serve("-f", str(manifest))
    up.send_signal(signal.SIGKILL)
    local.eventually(lambda: len(local.processes()) == 2)
    survivors = local.processes()

    if by == "down":
        assert down([]) == 0
        assert "ended 2 processes it had left" in capsys.readouterr().out
        assert local.processes() == []
    else:
        local.directory.state_file.unlink()  # the tags alone must do
        write_manifest()
        assert local.detach("-f", str(manifest))[0] == 0
        assert not [process for process in survivors if is_alive(process)]


def test_a_killed_worker_is_restarted_and_its_children_die_with_it(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    local.serve("-f", str(write_manifest(strict_args=("--fork-away",))))
    [before] = local.replicas("strict")
    assert before.pid is not None
    children = psutil.Process(before.pid).children()

    os.kill(before.pid, signal.SIGKILL)
    local.eventually(lambda: local.routed(PoolName.STRICT) == [])
    assert local.routed(PoolName.THROUGHPUT) != []
    local.eventually(lambda: local.replicas("strict")[0].phase is Phase.BACKING_OFF)
    assert "killed by SIGKILL" in local.replicas("strict")[0].detail
    local.eventually(lambda: local.phase is InstancePhase.READY)

    assert local.replicas("strict")[0].pid != before.pid
    assert local.routed(PoolName.STRICT) == [before.name]
    assert not [process for process in children if is_alive(process)]


def test_a_killed_gateway_is_restarted_on_its_port(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    local.serve("-f", str(write_manifest()))
    before = local.state.gateway
    assert before is not None
    assert before.pid is not None

    os.kill(before.pid, signal.SIGKILL)
    local.eventually(lambda: local.phase is InstancePhase.DEGRADED)
    local.eventually(lambda: local.phase is InstancePhase.READY)

    after = local.state.gateway
    assert after is not None
    assert after.pid != before.pid
    assert after.url == before.url


def test_an_edit_replaces_the_revision_without_a_gap(
    local: Local, write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    manifest = write_manifest(strict=1, throughput=1)
    local.serve("-f", str(manifest))
    [old] = local.replicas("strict")
    gate = tmp_path / "go"

    write_manifest(strict_args=("--ready-when", str(gate)))
    local.eventually(lambda: len(local.replicas("strict")) == 2)
    new_throughput = [v.name for v in local.replicas("throughput") if v.revision != old.revision]
    local.eventually(lambda: all(v.phase is Phase.READY for v in local.replicas("throughput")))
    assert local.routed(PoolName.STRICT) == [old.name]
    assert local.routed(PoolName.THROUGHPUT) != new_throughput

    gate.touch()
    local.eventually(lambda: local.routed(PoolName.STRICT) != [old.name])
    assert local.routed(PoolName.STRICT) != []
    assert local.routed(PoolName.THROUGHPUT) == new_throughput
    local.eventually(lambda: len(local.replicas("strict")) == 1)  # drained and stopped
    local.eventually(lambda: len(local.processes()) == 3)


def weights(local: Local) -> dict[str, int]:
    return {r.name: r.weight for r in local.table.revisions if r.pool is PoolName.STRICT}


@pytest.mark.parametrize("verb", ["abort", "promote", "resume"])
def test_a_step_that_pauses_waits_for_a_person(
    local: Local,
    write_manifest: Callable[..., Path],
    verb: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = ({"weight": 30, "pause": True},)
    local.serve("-f", str(write_manifest(steps=steps)))
    [old] = weights(local)

    write_manifest(strict_args=("--note", "x"), steps=steps)
    local.eventually(lambda: local.rollout.phase is RolloutPhase.PAUSED)
    [new] = set(weights(local)) - {old}
    assert weights(local) == {old: 70, new: 30}
    assert rollout(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["reason"] == "PausedByStep"

    assert rollout([verb, "chat"]) == 0
    kept = old if verb == "abort" else new
    ends = RolloutPhase.FAILED if verb == "abort" else RolloutPhase.IDLE
    local.eventually(lambda: local.rollout.phase is ends)
    assert weights(local) == {kept: 100}
    assert local.rollout.stable_revision == kept
    local.eventually(lambda: [r.revision for r in local.replicas("strict")] == [kept])
    assert rollout(["status"]) == (1 if verb == "abort" else 0)


def test_scaling_by_an_edit_keeps_the_running_replicas(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    local.serve("-f", str(write_manifest()))
    before = {v.pid for pool in local.state.pools for v in pool.replicas}

    write_manifest(throughput=2)
    local.eventually(lambda: len(local.routed(PoolName.THROUGHPUT)) == 2)
    write_manifest(throughput=1)
    local.eventually(lambda: len(local.routed(PoolName.THROUGHPUT)) == 1)
    local.eventually(lambda: len(local.replicas("throughput")) == 1)

    assert len(local.processes()) == 3
    assert {v.pid for pool in local.state.pools for v in pool.replicas} == before


def test_an_invalid_edit_is_said_and_the_old_one_keeps_serving(
    local: Local, write_manifest: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_manifest()
    local.serve("-f", str(manifest))
    good, table = manifest.read_text(), local.table

    manifest.write_text(good.replace("replicas", "replicsa"))
    local.eventually(lambda: local.state.manifest_problems != ())
    assert status([]) == 0
    assert "refused edit: spec.pools.strict.replicsa" in capsys.readouterr().out
    manifest.write_text(good.replace("name: chat", "name: other"))
    local.eventually(lambda: "isobatch down chat" in "".join(local.state.manifest_problems))
    assert local.table == table

    manifest.write_text(good)
    local.eventually(lambda: local.state.manifest_problems == ())
    assert local.phase is InstancePhase.READY


def test_detach_says_why_a_worker_cannot_start(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    code, _, err = local.detach("-f", str(write_manifest(throughput_args=("--exit-code", "3"))))

    assert code == 1
    [failed] = local.state.blocked
    assert f"{failed.name} cannot become ready: exited with code 3" in err
    assert "  | something is wrong with the model" in err
    assert f"log: {failed.log}" in err


def test_a_worker_that_says_wrong_use_is_given_up_at_once(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    code, _, err = local.detach("-f", str(write_manifest(throughput_args=("--exit-code", "2"))))

    assert code == 1
    assert "exited with code 2" in err
    assert local.state.blocked[0].failures == 1


def test_a_refused_certification_leaves_standard_serving(
    local: Local, write_manifest: Callable[..., Path]
) -> None:
    code, _, err = local.detach("-f", str(write_manifest(strict_args=("--refuse",))))

    assert code == 1
    assert "cannot become ready: no schedule of mm[576] keeps its bits" in err
    local.eventually(lambda: len(local.routed(PoolName.THROUGHPUT)) == 1)
    assert local.routed(PoolName.STRICT) == []


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """What `up` says that does not come as far as starting anything."""
    code = run_up(["--detach", *argv], Programs(), Timings())
    return code, capsys.readouterr().err


def test_a_taken_port_is_named_with_its_owner(
    local: Local, write_manifest: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", local.port))
        taken.listen()

        code, err = refused(capsys, "-f", str(write_manifest()), "--port", str(local.port))

    assert code == 1
    assert f"port {local.port} of 127.0.0.1 is taken by " in err
    assert f"(pid {os.getpid()})" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"uri": "pvc://claim/model"}, "spec.model.uri: pvc:// exists in a cluster only"),
        ({"url": "builtin://x"}, "spec.model.url: there is no such field; did you mean uri?"),
    ],
)
def test_a_manifest_that_cannot_be_served_here_is_wrong_use(
    local: Local,
    write_manifest: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    options: dict[str, str],
    expected: str,
) -> None:
    code, err = refused(capsys, "-f", str(write_manifest(**options)))

    assert code == 2
    assert expected in err


def test_a_manifest_that_is_not_there_is_wrong_use(
    local: Local, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = refused(capsys, "-f", "/nowhere.yaml")

    assert code == 2
    assert "/nowhere.yaml" in err
    assert "No such file" in err


def test_commands_before_any_up_say_so(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([]) == 1
    assert down(["chat"]) == 1
    assert logs(["strict"]) == 1
    assert "nothing has run here yet" in capsys.readouterr().err

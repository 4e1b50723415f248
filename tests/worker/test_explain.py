"""`isobatch numerics explain`: by its own command line, over plans kept and replicas running."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from isobatch_contracts import routing_table
from isobatch_contracts.numerics import NUMERICS_PATH, Certified, NotCertified, OperatorSummary
from isobatch_contracts.resource import Tiers
from isobatch_contracts.routing_table import Endpoint, Revision, RoutingTable
from isobatch_contracts.tiers import PoolName
from isobatch_kernels.plan import Arithmetic, OperatorPlan, Plan
from isobatch_worker.explain import numerics
from isobatch_worker.plan_cache import save_plan
from pydantic import BaseModel

OPERATOR = OperatorPlan(
    operator="linear",
    shape="8x32 bfloat16",
    tree="plain-k16",
    admitted={"cublas": (4, 8)},
    refused={},
    comparisons=9,
)
PLAN = Plan(
    model_digest="sha256:" + "1" * 64,
    settings="sha256:" + "2" * 64,
    arithmetic=Arithmetic(device="cpu made up", isa="AVX512", threads=3),
    versions={"torch": "2.11.0"},
    sampler="a sampler",
    dtype="torch.bfloat16",
    operators=(OPERATOR,),
)
REPLICA = Certified(
    fingerprint="sha256:" + "ab" * 32,
    model_digest=PLAN.model_digest,
    device="cuda made up",
    versions={"vllm": "0.26.0"},
    operators=(
        OperatorSummary(
            operator="rope", shape="x", reference="t", admitted=(), refused=(), comparisons=1
        ),
    ),
    from_cache=False,
    certification_seconds=1.0,
)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOBATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ISOBATCH_STATE_DIR", str(tmp_path / "state"))
    save_plan(tmp_path / "cache" / "plans" / "a.json", PLAN)
    (tmp_path / "cache" / "plans" / "torn.json").write_text('{"schema_id"')
    return tmp_path


def serve(status: int, body: BaseModel) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == NUMERICS_PATH
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.model_dump_json(by_alias=True).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def replica() -> Iterator[str]:
    yield from serve(200, REPLICA)


@pytest.fixture
def uncertified() -> Iterator[str]:
    yield from serve(503, NotCertified(state="refused", reason="no"))


@pytest.mark.parametrize("said", [PLAN.fingerprint, PLAN.fingerprint.removeprefix("sha256:")[:8]])
def test_a_kept_plan_is_explained_in_words(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics(["explain", said]) == 0

    words = capsys.readouterr().out
    for part in (PLAN.fingerprint, PLAN.settings, "cpu made up", "3 threads", "a sampler"):
        assert part in words
    assert "products in order of K, fused groups of 16" in words


def test_json_holds_all_that_the_fingerprint_covers(capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics(["explain", PLAN.fingerprint, "-o", "json"]) == 0

    said = json.loads(capsys.readouterr().out)
    assert said["fingerprint"] == PLAN.fingerprint
    assert said["arithmetic"] == PLAN.arithmetic.model_dump()
    assert said["trees"] == [{"operator": "linear", "shape": OPERATOR.shape, "tree": "plain-k16"}]
    assert {"modelDigest", "settings", "sampler", "dtype", "probe", "versions"} < said.keys()


def test_a_replica_named_is_asked(replica: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics(["explain", REPLICA.fingerprint, "--replica", replica + "/"]) == 0

    assert f"the running replica {replica}" in capsys.readouterr().out


def test_the_replicas_of_this_machines_services_are_asked(
    replica: str, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    revision = Revision(
        name="r1",
        pool=PoolName.STRICT,
        weight=0,
        endpoints=(Endpoint(name="strict-0", url=replica),),
    )
    table = RoutingTable(
        version=1,
        service="chat",
        model="m",
        tiers=Tiers(),
        pools=(PoolName.STRICT,),
        revisions=(revision,),
    )
    file = folders / "state" / "chat" / "tables" / "table.json"
    file.parent.mkdir(parents=True)
    file.write_text(routing_table.dump(table))

    assert numerics(["explain", REPLICA.fingerprint]) == 0
    assert "cuda made up" in capsys.readouterr().out


def test_what_is_not_known_here_says_where_it_was_looked_for(
    uncertified: str, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = "http://127.0.0.1:1"
    asked = ["explain", "sha256:" + "0" * 64, "--replica", uncertified, "--replica", gone]

    assert numerics(asked) == 1

    said = capsys.readouterr().err
    assert str(folders / "cache" / "plans") in said
    assert "2 running replicas" in said


def test_a_beginning_of_two_names_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = REPLICA.model_copy(update={"fingerprint": PLAN.fingerprint[:40] + "0" * 31})
    with contextlib.contextmanager(serve)(200, other) as twin:
        assert numerics(["explain", PLAN.fingerprint[:20], "--replica", twin]) == 1

    said = capsys.readouterr().err
    assert PLAN.fingerprint in said
    assert other.fingerprint in said


@pytest.mark.parametrize("said", ["", "xyz", "sha256:", "sha512:" + "0" * 64, "0" * 65, "ABCDEF01"])
def test_what_is_no_fingerprint_is_wrong_use(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics(["explain", said]) == 2
    assert "expected sha256: and 64 hex digits" in capsys.readouterr().err

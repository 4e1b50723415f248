"""What a worker's answers mean, and what they do to the state of its replica."""

from collections.abc import Callable

import httpx
import pytest
from isobatch_contracts.numerics import Certified, NotCertified
from isobatch_contracts.tiers import PoolName
from isobatch_operator.exposition import Report
from isobatch_operator.local.observe import judge_numerics, probe_gateway, probe_worker
from isobatch_operator.observed import Ready, Refused, ReplicaState, Starting, Stopping, Unready
from isobatch_operator.readiness import Answers, NotYet, Probe, Refuses, Silent, advance

PRINT, WEIGHTS, OTHER = ("sha256:" + letter * 64 for letter in "adf")
CERTIFIED = Certified(
    fingerprint=PRINT,
    model_digest=WEIGHTS,
    device="cpu",
    versions={},
    operators=(),
    from_cache=False,
    certification_seconds=1.0,
).model_dump_json()
CERTIFYING = NotCertified(state="certifying", reason="3 of 12").model_dump_json()
REFUSED = NotCertified(state="refused", reason="no schedule").model_dump_json()


@pytest.mark.parametrize(
    ("status", "body", "digest", "expected"),
    [
        pytest.param(200, CERTIFIED, None, Answers(PRINT), id="certified"),
        pytest.param(200, CERTIFIED, WEIGHTS, Answers(PRINT), id="certified, digest as asked"),
        pytest.param(503, CERTIFYING, None, NotYet("3 of 12"), id="certifying"),
        pytest.param(503, REFUSED, None, Refuses("no schedule"), id="refused"),
    ],
)
def test_numerics_verdicts(status: int, body: str, digest: str | None, expected: Probe) -> None:
    assert judge_numerics(status, body.encode(), digest) == expected


@pytest.mark.parametrize(
    ("status", "body", "digest", "kind"),
    [
        pytest.param(200, CERTIFIED, OTHER, Refuses, id="other weights"),
        pytest.param(503, CERTIFIED, None, NotYet, id="certified with a 503"),
        pytest.param(404, "{}", None, NotYet, id="no such path"),
        pytest.param(200, "", None, NotYet, id="empty"),
        pytest.param(200, CERTIFIED.replace("device", "x"), None, NotYet, id="unknown field"),
    ],
)
def test_an_unclear_verdict_is_never_ready(
    status: int, body: str, digest: str | None, kind: type
) -> None:
    assert isinstance(judge_numerics(status, body.encode(), digest), kind)


def worker(pages: dict[str, tuple[int, str]]) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        status, body = pages.get(request.url.path, (404, ""))
        return httpx.Response(status, text=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


GOOD = {
    "/isobatch/v1/numerics": (200, CERTIFIED),
    "/health": (200, ""),
    "/v1/models": (200, '{"data": [{"id": "chat"}]}'),
    "/metrics": (
        200,
        'vllm:num_requests_running{engine="0",model="m"} 2.0\n'
        "vllm:num_requests_waiting 1.0\nvllm:num_requests_running_x 9\n",
    ),
}


@pytest.mark.parametrize("pool", list(PoolName))
@pytest.mark.parametrize(
    ("change", "judge"),
    [
        pytest.param({}, lambda p: isinstance(p, Answers) and p.requests == 3, id="good"),
        pytest.param({"/metrics": (404, "")}, lambda p: isinstance(p, Answers), id="no metrics"),
        pytest.param({"/health": (503, "")}, lambda p: isinstance(p, NotYet), id="engine dead"),
        pytest.param(
            {"/v1/models": (200, '{"data": [{"id": "other"}]}')},
            lambda p: p == NotYet("/v1/models does not list chat"),
            id="other model",
        ),
        pytest.param({"/v1/models": (200, "[]")}, lambda p: isinstance(p, NotYet), id="nonsense"),
    ],
)
async def test_a_worker_answers_when_all_its_paths_do(
    pool: PoolName, change: dict[str, tuple[int, str]], judge: Callable[[Probe], bool]
) -> None:
    async with worker({**GOOD, **change}) as client:
        probe = await probe_worker(client, "http://w", pool, "chat", None)

    assert judge(probe), probe


async def test_throughput_needs_no_certificate_and_strict_does() -> None:
    pages = {path: page for path, page in GOOD.items() if "numerics" not in path}
    async with worker(pages) as client:
        stock = await probe_worker(client, "http://w", PoolName.THROUGHPUT, "chat", None)
        strict = await probe_worker(client, "http://w", PoolName.STRICT, "chat", None)

    assert isinstance(stock, Answers)
    assert isinstance(strict, NotYet)


async def test_the_gateway_says_which_table_it_serves() -> None:
    metrics = (200, 'isobatch_gateway_table_version{model="chat"} 7.0\n')
    async with worker({"/readyz": (200, ""), "/metrics": metrics}) as client:
        assert await probe_gateway(client, "http://g") == (Answers(), Report({"chat": 7}))
    async with worker({"/readyz": (503, "")}) as client:
        assert await probe_gateway(client, "http://g") == (NotYet("/readyz answers 503"), None)


NOW = 9.0


@pytest.mark.parametrize(
    ("state", "probe", "expected"),
    [
        (Starting(1), Answers(PRINT, 0), Ready(NOW, PRINT, 0)),
        (Ready(1, misses=2), Answers(PRINT, 4), Ready(1, PRINT, 4)),
        (Unready(1, "x"), Answers(), Ready(NOW)),
        (Refused(1, "x"), Answers(PRINT), Ready(NOW, PRINT)),
        (Starting(1), NotYet("a"), Starting(1, "a")),
        (Ready(1), NotYet("a"), Unready(NOW, "a")),
        (Unready(1, "x"), NotYet("a"), Unready(1, "a")),
        (Starting(1), Refuses("a"), Refused(NOW, "a")),
        (Ready(1), Refuses("a"), Refused(NOW, "a")),
        (Refused(1, "x"), Refuses("a"), Refused(1, "a")),
        (Starting(1, "a"), Silent("b"), Starting(1, "a")),
        (Ready(1, PRINT), Silent("b"), Ready(1, PRINT, misses=1)),
        (Ready(1, PRINT, misses=2), Silent("b"), Unready(NOW, "b")),
        (Unready(1, "x"), Silent("b"), Unready(1, "b")),
        (Refused(1, "x"), Silent("b"), Refused(1, "x")),
        (Stopping(1), Answers(), Stopping(1)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_state_after_a_probe(state: ReplicaState, probe: Probe, expected: ReplicaState) -> None:
    assert advance(state, probe, NOW) == expected

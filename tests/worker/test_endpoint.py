from pathlib import Path

import httpx
import pytest
from isobatch_contracts.numerics import NUMERICS_PATH, Certified, NotCertified
from isobatch_contracts.receipt import DIGESTS_PATH, AnswerDigests
from isobatch_worker.answers import Answers, Told
from isobatch_worker.endpoint import Message, NumericsEndpoint, Receive, Send
from isobatch_worker.report import REPORT_FILE, Report, write_report

CERTIFIED = Certified(
    fingerprint="sha256:" + "a" * 64,
    model_digest="sha256:" + "b" * 64,
    device="cpu",
    versions={},
    operators=(),
    from_cache=False,
    certification_seconds=1.0,
)


async def vllm(_scope: Message, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"vllm"})


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "numerics.json"
    monkeypatch.setenv(REPORT_FILE, str(path))
    return path


def client(answers: Answers | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=NumericsEndpoint(vllm, answers or Answers()))
    return httpx.AsyncClient(transport=transport, base_url="http://worker")


@pytest.mark.parametrize(
    "found",
    [
        None,
        NotCertified(state="certifying", reason="3 of 14"),
        NotCertified(state="refused", reason="linear 4x4"),
    ],
    ids=["nothing-yet", "certifying", "refused"],
)
async def test_uncertified_answers_503_with_the_reason_on_every_path(
    report: Path, found: Report | None
) -> None:
    if found is not None:
        write_report(report, found)
    async with client() as http:
        numerics = await http.get(NUMERICS_PATH)
        answers = [await http.post(path) for path in ("/v1/completions", "/health", "/tokenize")]

    assert numerics.status_code == 503
    assert numerics.json()["state"] in ("certifying", "refused")
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "strict_unavailable"
        assert answer.headers["retry-after"]
        if isinstance(found, NotCertified):
            assert found.reason in answer.json()["error"]["message"]


async def test_certified_passes_requests_on_and_shows_the_certificate(report: Path) -> None:
    write_report(report, CERTIFIED)
    async with client() as http:
        numerics = await http.get(NUMERICS_PATH)
        answer = await http.post("/v1/completions")

    assert numerics.status_code == 200
    assert Certified.model_validate(numerics.json()) == CERTIFIED
    assert answer.text == "vllm"


async def test_the_side_channel_tells_the_digests_of_an_answer(report: Path) -> None:
    answers = Answers()
    answers.tell(Told("chatcmpl-req-1", 0, 1, 4, [1, 2, 3], None, is_finished=True))
    async with client(answers) as http:
        closed = await http.get(f"{DIGESTS_PATH}req-1")
        write_report(report, CERTIFIED)
        whole = await http.get(f"{DIGESTS_PATH}req-1")
        part = await http.get(f"{DIGESTS_PATH}req-1?at=2&ids=1")
        unknown = await http.get(f"{DIGESTS_PATH}req-2")

    assert (closed.status_code, unknown.status_code) == (503, 404)
    assert AnswerDigests.model_validate_json(whole.content).sequences[0].tokens == 3
    assert AnswerDigests.model_validate_json(part.content).sequences[0].ids == (1, 2)
    assert unknown.json()["error"]["code"] == "path_not_found"

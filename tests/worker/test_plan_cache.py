"""A kept plan is found only for what it was made of: anything else is proved anew."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
from isobatch_kernels.certification import CertificationRefused
from isobatch_kernels.plan import Arithmetic, OperatorPlan, Plan
from isobatch_worker.certificate import PLANS_FOLDER, Subject, prove
from isobatch_worker.plan_cache import kept_plans, load_plan, plan_file, save_plan
from isobatch_worker.report import REPORT_FILE, read_report

KEY = ("linear", "8x32 bfloat16", "plain-k16")
OPERATOR = OperatorPlan(
    operator=KEY[0], shape=KEY[1], tree=KEY[2], admitted={"a": (1,)}, refused={}, comparisons=1
)
CARD = Arithmetic(
    device="cuda NVIDIA H200 processors=132 driver=580.1 cuda=13.0", isa="sm90", threads=0
)
WANTED = Plan(
    model_digest="sha256:" + "1" * 64,
    settings="sha256:" + "2" * 64,
    arithmetic=CARD,
    versions={"torch": "2.11.0", "vllm": "0.26.0"},
    sampler="s",
    dtype="torch.bfloat16",
    operators=(),
)
KEPT = WANTED.model_copy(update={"operators": (OPERATOR,), "probe": "sha256:" + "3" * 64})


def another_card(**change: str) -> dict[str, Any]:
    return {"arithmetic": CARD.model_copy(update=change)}


STALE = {
    "driver": another_card(device=CARD.device.replace("580.1", "590.2")),
    "card": another_card(device=CARD.device.replace("H200", "H100")),
    "processors": another_card(device=CARD.device.replace("132", "114")),
    "cuda": another_card(device=CARD.device.replace("13.0", "12.9")),
    "family": another_card(isa="sm8x"),
    "torch": {"versions": {"torch": "2.12.0", "vllm": "0.26.0"}},
    "model": {"model_digest": "sha256:" + "9" * 64},
    "arguments": {"settings": "sha256:" + "9" * 64},
    "sampler": {"sampler": "t"},
    "dtype": {"dtype": "torch.float16"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / "plans"))
    monkeypatch.setenv(REPORT_FILE, str(tmp_path / "report.json"))
    return tmp_path / "plans"


def test_the_same_is_found_again(folder: Path) -> None:
    save_plan(plan_file(folder, WANTED), KEPT)

    assert load_plan(plan_file(folder, WANTED), WANTED, {KEY}) == KEPT
    assert [plan for _, plan in kept_plans(folder)] == [KEPT]


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_a_stale_plan_is_not_found_even_under_the_right_name(
    change: dict[str, Any], folder: Path
) -> None:
    now = WANTED.model_copy(update=change)
    save_plan(plan_file(folder, now), KEPT)

    assert plan_file(folder, now) != plan_file(folder, WANTED)
    assert load_plan(plan_file(folder, now), now, {KEY}) is None


@pytest.mark.parametrize(
    "operators",
    [set(), {KEY, ("rope", "x", "t")}, {(KEY[0], KEY[1], "chunk64-k16")}],
    ids=["fewer", "more", "another-tree"],
)
def test_a_plan_of_other_operators_is_not_found(
    operators: set[tuple[str, str, str]], folder: Path
) -> None:
    save_plan(plan_file(folder, WANTED), KEPT)

    assert load_plan(plan_file(folder, WANTED), WANTED, operators) is None


@pytest.mark.parametrize("text", ["", "{}", '{"schema_id": "isobatch.plan/v1"'])
def test_a_torn_plan_is_not_found(text: str, folder: Path) -> None:
    path = plan_file(folder, WANTED)
    path.parent.mkdir()
    path.write_text(text)

    assert load_plan(path, WANTED, {KEY}) is None
    assert list(kept_plans(folder)) == []


def fail(_: object = None) -> NoReturn:
    raise CertificationRefused("planted: other bits")


def test_a_kept_plan_whose_sample_fails_is_dropped_and_refused(folder: Path) -> None:
    path = plan_file(folder, WANTED)
    save_plan(path, KEPT)

    with pytest.raises(CertificationRefused, match="planted"):
        prove([Subject(KEY, lambda: OPERATOR, fail)], WANTED)

    assert not path.exists()
    plan, _, was_kept = prove([Subject(KEY, lambda: OPERATOR, fail)], WANTED)
    assert (plan.operators, was_kept) == ((OPERATOR,), False)


def test_what_is_being_proved_is_reported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CertificationRefused):
        prove([Subject(KEY, lambda: OPERATOR), Subject(("rope", "x", "t"), fail)], WANTED)

    report = read_report(tmp_path / "report.json")
    assert report.model_dump()["reason"] == "certifying rope x (2 of 2)"

"""What gates say: three outcomes, and none that promotes without having seen anything."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isobatch_contracts.steering import Gate, Rollout
from isobatch_operator.analysis import Window, counted, judge, judged, moved, quantile
from isobatch_operator.exposition import Counts, Report, read_report
from isobatch_operator.rollout import Outcome, RolloutState, Stage

METRICS = """\
# HELP isobatch_requests_total Requests.
isobatch_gateway_table_version{model="m"} 7.0
isobatch_requests_total{code="200",model="m",pool="strict",revision="b",tier="strict"} 90.0
isobatch_requests_total{code="200",model="m",pool="throughput",revision="b",tier="standard"} 5.0
isobatch_requests_total{code="502",model="m",pool="throughput",revision="b",tier="standard"} 1.0
isobatch_requests_total{code="503",model="m",pool="",revision="",tier="strict"} 9.0
isobatch_upstream_failures_total{model="m",pool="strict",revision="b"} 4.0
isobatch_time_to_first_token_seconds_bucket{le="0.1",model="m",pool="strict",revision="b"} 50.0
isobatch_time_to_first_token_seconds_bucket{le="+Inf",model="m",pool="strict",revision="b"} 95.0
isobatch_requests_total{model="broken} 1
isobatch_requests_total{code="200",model="m",revision="b"} many
"""


def rollout(least: int = 10, **bound: str) -> Rollout:
    metric = {} if "metric" in bound or "prometheus" in bound else {"metric": "errorRate"}
    gate = Gate.model_validate({"name": "g", **metric, **bound})
    return Rollout(gates=(gate,), min_requests=least)


def test_report_is_read_by_revision() -> None:
    report = read_report(METRICS)

    assert report.versions == {"m": 7}
    assert set(report.counts) == {("m", "b")}
    counts = report.counts["m", "b"]
    assert (counts.answered, counts.failed) == (95, 5)
    assert counts.first_byte_within == {0.1: 50, math.inf: 95}


@pytest.mark.parametrize(
    ("answered", "failed", "outcome"),
    [
        (0, 0, Outcome.INCONCLUSIVE),
        (9, 0, Outcome.INCONCLUSIVE),
        (0, 9, Outcome.INCONCLUSIVE),
        (95, 5, Outcome.PASS),
        (94, 6, Outcome.FAIL),
        (0, 10, Outcome.FAIL),
    ],
)
def test_error_rate(answered: int, failed: int, outcome: Outcome) -> None:
    assert judge(rollout(max="0.05"), Counts(answered, failed), Counts()).outcome is outcome


@pytest.mark.parametrize(
    ("canary", "stable", "outcome"),
    [
        (Counts(100, 2), Counts(100, 2), Outcome.PASS),
        (Counts(100, 9), Counts(100, 2), Outcome.FAIL),
        (Counts(100, 0), Counts(100, 0), Outcome.PASS),
        (Counts(100, 1), Counts(100, 0), Outcome.FAIL),
        (Counts(100, 0), Counts(3, 0), Outcome.INCONCLUSIVE),
    ],
)
def test_ratio_to_stable(canary: Counts, stable: Counts, outcome: Outcome) -> None:
    assert judge(rollout(maxRatioToStable="1.2"), canary, stable).outcome is outcome


def test_first_byte_is_judged_by_its_tail() -> None:
    slow = Counts(100, 0, {0.1: 90.0, 1.0: 100.0, math.inf: 100.0})
    gates = rollout(metric="ttftP99Seconds", max="0.5")

    verdict = judge(gates, slow, Counts())

    assert verdict.outcome is Outcome.FAIL
    assert verdict.gates[0].value == "0.91"


@pytest.mark.parametrize("metric", ["driftRate", "strictViolations"])
def test_what_nobody_measures_is_inconclusive(metric: str) -> None:
    verdict = judge(rollout(metric=metric, max="0"), Counts(1000, 0), Counts(1000, 0))

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert metric in verdict.message


def test_gates_without_a_gateway_are_inconclusive_and_no_gates_pass() -> None:
    state = RolloutState(stage=Stage.MOVING, stable="a", canary="b")

    _, held = judged(Window(), rollout(max="1"), state, {"g": None}, "m")
    _, free = judged(Window(), Rollout(), state, {}, "m")

    assert (held.outcome, free.outcome) == (Outcome.INCONCLUSIVE, Outcome.PASS)


def report(answered: float, failed: float = 0.0) -> Report:
    return Report({}, {("m", "b"): Counts(answered, failed)})


def test_only_what_happened_at_this_level_counts() -> None:
    state = RolloutState(stage=Stage.MOVING, stable="a", canary="b", weight=5)
    window = moved(Window(), state, {"g1": report(100, 50)})

    window = moved(window, state, {"g1": report(130, 50), "g2": report(900)})
    seen = {"g1": report(140, 51), "g2": report(905)}
    assert counted(window, seen, "m", "b") == Counts(45, 1)

    restarted = {"g1": report(7), "g2": report(905)}
    assert counted(window, restarted, "m", "b") == Counts(12, 0)

    higher = RolloutState(stage=Stage.MOVING, stable="a", canary="b", weight=25)
    assert counted(moved(window, higher, seen), seen, "m", "b") == Counts(0, 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_quantile_lies_within_the_buckets_and_rises_with_its_share(
    counts: list[int], share: float
) -> None:
    bounds, total, within = [0.1 * 2**n for n in range(len(counts))], 0.0, {}
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        within[bound] = total
    within[math.inf] = total

    found, tail = quantile(within, share), quantile(within, 1.0)

    if total == 0:
        assert found is None
    else:
        assert found is not None
        assert tail is not None
        assert 0 <= found <= tail <= bounds[-1]

"""Decides what gates say of a canary: from counts since its level began, with three outcomes.

What cannot be measured, or not often enough, is inconclusive: no data never promotes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isobatch_contracts.service_status import GateStatus
from isobatch_contracts.steering import Gate, Metric, Rollout

from isobatch_operator.exposition import Counts, Report
from isobatch_operator.rollout import Outcome, RolloutState

Reports = Mapping[str, Report]
"""What each gateway says, by its address."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is looked at: since `start`, the reports at its beginning."""

    start: tuple[str | None, int] = (None, 0)
    base: Reports = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all gates say together, and each."""

    outcome: Outcome = Outcome.PASS
    message: str = ""
    gates: tuple[GateStatus, ...] = ()


def moved(window: Window, state: RolloutState, now: Reports) -> Window:
    """The window for `state`: a new one for each level. A gateway counts from when it is seen."""
    start = (state.canary, state.weight)
    if start != window.start:
        return Window(start, dict(now))
    return Window(start, {**now, **window.base})


def counted(window: Window, now: Reports, model: str, revision: str | None) -> Counts:
    """What happened at `revision` since the window began, at all gateways."""
    total = Counts()
    for address, report in now.items():
        if revision is None or address not in window.base:
            continue
        current = report.counts.get((model, revision), Counts())
        before = window.base[address].counts.get((model, revision), Counts())
        # Fewer than before: the gateway at this address began anew.
        total += current if current.attempts < before.attempts else current - before
    return total


def judge(rollout: Rollout, canary: Counts, stable: Counts) -> Verdict:
    """What the gates of `rollout` say."""
    gates = tuple(_gate(gate, rollout.min_requests, canary, stable) for gate in rollout.gates)
    for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
        which = [gate for gate in gates if gate.outcome == outcome.value]
        if which:
            return Verdict(outcome, "; ".join(f"{g.name}: {g.message}" for g in which), gates)
    return Verdict(Outcome.PASS, "", gates)


def judged(
    window: Window,
    rollout: Rollout,
    state: RolloutState,
    reports: Mapping[str, Report | None],
    model: str,
) -> tuple[Window, Verdict]:
    """What the gates say of the canary in `state` now, and the window to give back next time."""
    if state.canary is None or not rollout.gates:
        return window, Verdict()
    heard = {address: report for address, report in reports.items() if report is not None}
    if not heard:
        return window, unmeasured(rollout, "no gateway says what it counted")
    window = moved(window, state, heard)
    canary, stable = (
        counted(window, heard, model, revision) for revision in (state.canary, state.stable)
    )
    return window, judge(rollout, canary, stable)


def unmeasured(rollout: Rollout, why: str) -> Verdict:
    """The verdict where nobody could be asked."""
    gates = tuple(
        GateStatus(name=gate.name, outcome="Inconclusive", message=why) for gate in rollout.gates
    )
    if not gates:
        return Verdict()
    return Verdict(Outcome.INCONCLUSIVE, why, gates)


def _gate(gate: Gate, least: int, canary: Counts, stable: Counts) -> GateStatus:
    if gate.metric not in (Metric.ERROR_RATE, Metric.TTFT_P99_SECONDS):
        what = "PromQL" if gate.metric is None else gate.metric.value
        return GateStatus(
            name=gate.name, outcome="Inconclusive", message=f"{what} is not measured by gateways"
        )
    value, samples = _value(gate.metric, canary)
    if value is None or samples < least:
        text = f"{samples} of {max(least, 1)} requests that are needed"
        return _said(gate, "Inconclusive", value, samples, text)
    bound = gate.max
    if gate.max_ratio_to_stable is not None:
        other, others = _value(gate.metric, stable)
        if other is None or others < least:
            text = f"the stable revision has {others} of {max(least, 1)} requests that are needed"
            return _said(gate, "Inconclusive", value, samples, text)
        value = _ratio(value, other)
        bound = gate.max_ratio_to_stable
    assert bound is not None, "a gate has exactly one bound"
    what = gate.metric.value if gate.max is not None else f"{gate.metric.value} to stable"
    is_within = value <= float(bound)
    text = f"{what} is {value:.4g}, {'within' if is_within else 'above'} {bound}"
    return _said(gate, "Pass" if is_within else "Fail", value, samples, text)


def _said(gate: Gate, outcome: str, value: float | None, samples: int, text: str) -> GateStatus:
    return GateStatus.model_validate(
        {
            "name": gate.name,
            "outcome": outcome,
            "value": None if value is None else f"{value:.4g}",
            "samples": samples,
            "message": text,
        }
    )


def _value(metric: Metric, counts: Counts) -> tuple[float | None, int]:
    """The figure and how many requests it rests on."""
    if metric is Metric.ERROR_RATE:
        attempts = int(counts.attempts)
        return (counts.failed / counts.attempts if attempts > 0 else None), attempts
    within = counts.first_byte_within
    return quantile(within, 0.99), int(max(within.values(), default=0.0))


def _ratio(value: float, other: float) -> float:
    if other == 0:
        return 0.0 if value == 0 else math.inf
    return value / other


def quantile(within: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of the answers lie; linear inside a bucket, as PromQL has it.

    `within` is cumulative. Beyond the last finite bound the answer is that bound.
    """
    total = max(within.values(), default=0.0)
    if total <= 0:
        return None
    rank = share * total
    lower, below = 0.0, 0.0
    for bound in sorted(within):
        count = within[bound]
        if count >= rank:
            if math.isinf(bound):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = bound, count
    return lower

"""Decides what a probe's answer means for the state of a replica."""

from dataclasses import dataclass, replace
from typing import assert_never

from isobatch_operator.observed import (
    Ready,
    Refused,
    ReplicaState,
    Starting,
    Stopping,
    Unready,
)

MISSES_ALLOWED = 2
"""A busy worker may be late twice; the third lost probe in a row takes it out."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The replica would serve. `requests`: in flight, when the probe asked."""

    fingerprint: str | None = None
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class NotYet:
    """The replica answered that it is not ready."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuses:
    """The replica answered that it will never be ready."""

    reason: str


@dataclass(frozen=True, slots=True)
class Silent:
    """No answer at all."""

    reason: str


Probe = Answers | NotYet | Refuses | Silent


def advance(state: ReplicaState, probe: Probe, now: float) -> ReplicaState:
    """The state after `probe`. A silent replica is given some time; one that declines is not."""
    if isinstance(state, Stopping):
        return state
    match probe:
        case Answers(fingerprint, requests):
            since = state.since if isinstance(state, Ready) else now
            return Ready(since, fingerprint, requests)
        case NotYet(reason):
            return _declined(state, reason, now)
        case Refuses(reason):
            return Refused(state.since if isinstance(state, Refused) else now, reason)
        case Silent(reason):
            return _unheard(state, reason, now)
        case _:
            assert_never(probe)


def _declined(state: ReplicaState, reason: str, now: float) -> ReplicaState:
    match state:
        case Starting(since):
            return Starting(since, reason)
        case Unready(since):
            return Unready(since, reason)
        case Ready() | Refused():
            return Unready(now, reason)
        case Stopping():
            return state
        case _:
            assert_never(state)


def _unheard(state: ReplicaState, reason: str, now: float) -> ReplicaState:
    match state:
        case Ready(misses=misses) if misses < MISSES_ALLOWED:
            return replace(state, misses=misses + 1)
        case Ready():
            return Unready(now, reason)
        case Unready(since):
            return Unready(since, reason)
        case Starting() | Refused() | Stopping():
            return state
        case _:
            assert_never(state)

"""Decides when a replica is taken out of the choice, and when it is tried again."""

from dataclasses import dataclass, replace
from enum import Enum, auto

from isobatch_gateway.settings import Breaking


@dataclass(frozen=True, slots=True)
class Closed:
    """In use. `failures` is the number in a row since the last success.

    `is_doubted` asks for a probe while it stays in use: what failed may have been the requests.
    """

    failures: int = 0
    is_doubted: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Out of use until `until` (monotonic seconds); `pause` is how long this pause is."""

    until: float
    pause: float


@dataclass(frozen=True, slots=True)
class HalfOpen:
    """Out of use, with one trial under way. `pause` is the one that went before."""

    pause: float


State = Closed | Open | HalfOpen


class Event(Enum):
    """What happened at a replica. A client's own mistake or departure is no event."""

    SUCCESS = auto()  # a request finished, or a probe was answered
    FAILURE = auto()  # a connection that died, a late first byte
    BAD_ANSWER = auto()  # 5xx: the replica's failure, or the request's, which a probe tells apart
    OUTAGE = auto()  # nobody accepts connections, or a probe failed: no second opinion needed
    TRIAL = auto()  # a probe begins


def after(state: State, event: Event, now: float, rules: Breaking) -> State:
    """The state that follows `state` once `event` happened at `now`."""
    match event, state:
        case Event.SUCCESS, Closed() | HalfOpen():
            return Closed()
        case ((Event.SUCCESS | Event.FAILURE | Event.OUTAGE | Event.BAD_ANSWER), Open()):
            # A request that was under way when the breaker opened: it proves little.
            return state
        case Event.TRIAL, Open(pause=pause):
            return HalfOpen(pause)
        case (Event.TRIAL, Closed() | HalfOpen()) | (Event.BAD_ANSWER, HalfOpen()):
            return state
        case Event.BAD_ANSWER, Closed(failures=failures):
            return Closed(failures + 1, is_doubted=failures + 1 >= rules.failures)
        case Event.FAILURE, Closed(failures=failures) if failures + 1 < rules.failures:
            return replace(state, failures=failures + 1)
        case ((Event.FAILURE | Event.OUTAGE), Closed()):
            return Open(now + rules.first_pause, rules.first_pause)
        case ((Event.FAILURE | Event.OUTAGE), HalfOpen(pause=pause)):
            longer = min(pause * 2, rules.longest_pause)
            return Open(now + longer, longer)
    raise AssertionError((state, event))


def admits(state: State) -> bool:
    """Whether requests may go there. A half-open replica is tried by the probe alone."""
    return isinstance(state, Closed)


def is_due(state: State, now: float) -> bool:
    """Whether a trial should begin."""
    match state:
        case Open(until=until):
            return now >= until
        case Closed(is_doubted=is_doubted):
            return is_doubted
        case HalfOpen():
            return False

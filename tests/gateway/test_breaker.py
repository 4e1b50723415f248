from hypothesis import given
from hypothesis import strategies as st
from isobatch_gateway import breaker
from isobatch_gateway.breaker import Closed, Event, HalfOpen, Open, after
from isobatch_gateway.settings import Breaking

RULES = Breaking(failures=3, first_pause=0.5, longest_pause=1.0)


def run(*events: Event, state: breaker.State = Closed()) -> breaker.State:  # noqa: B008  # frozen
    for event in events:
        state = after(state, event, 10.0, RULES)
    return state


def test_a_single_failure_takes_nobody_out() -> None:
    assert run(Event.FAILURE, Event.FAILURE) == Closed(2)


def test_failures_in_a_row_open_it() -> None:
    assert run(*[Event.FAILURE] * 3) == Open(10.5, 0.5)


def test_bad_answers_ask_for_a_probe_and_take_nobody_out() -> None:
    state = run(*[Event.BAD_ANSWER] * 3)

    assert breaker.admits(state)
    assert breaker.is_due(state, 10.0)
    assert run(Event.TRIAL, Event.SUCCESS, state=state) == Closed()
    assert run(Event.TRIAL, Event.OUTAGE, state=state) == Open(10.5, 0.5)
    assert not breaker.is_due(run(Event.BAD_ANSWER), 10.0)


def test_a_success_between_failures_starts_the_count_again() -> None:
    assert run(Event.FAILURE, Event.FAILURE, Event.SUCCESS, Event.FAILURE) == Closed(1)


def test_a_refused_connection_opens_it_at_once() -> None:
    assert run(Event.OUTAGE) == Open(10.5, 0.5)


def test_a_trial_that_succeeds_closes_it() -> None:
    assert run(Event.OUTAGE, Event.TRIAL) == HalfOpen(0.5)
    assert run(Event.OUTAGE, Event.TRIAL, Event.SUCCESS) == Closed()


def test_a_trial_that_fails_waits_longer_but_never_long() -> None:
    twice = run(Event.OUTAGE, Event.TRIAL, Event.OUTAGE)

    assert twice == Open(11.0, 1.0)
    assert run(Event.TRIAL, Event.OUTAGE, state=twice) == Open(11.0, 1.0)


def test_an_old_success_does_not_close_it() -> None:
    assert run(Event.OUTAGE, Event.SUCCESS) == Open(10.5, 0.5)


def test_a_trial_is_due_after_the_pause() -> None:
    state = run(Event.OUTAGE)

    assert not breaker.is_due(state, 10.4)
    assert breaker.is_due(state, 10.5)


@given(st.lists(st.sampled_from(list(Event))))
def test_it_can_always_come_back(events: list[Event]) -> None:
    state = run(*events)
    recovered = run(Event.TRIAL, Event.SUCCESS, state=state)

    assert breaker.admits(recovered)
    assert breaker.admits(state) == isinstance(state, Closed)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.tiers.breaker import Breaker
from tests.rigs.tier_faults import Clock


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert breaker.fail(at_once=True)
    return breaker


def test_three_failures_in_a_row_open_it() -> None:
    breaker = Breaker(Clock())
    assert [(breaker.fail(), breaker.closed) for _ in range(4)] == [
        (False, True),
        (False, True),
        (True, False),
        (False, False),
    ]


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        assert not breaker.fail() and not breaker.fail()
        breaker.succeed()
    assert breaker.closed


def test_who_succeeds_does_not_excuse_who_fails() -> None:
    breaker = Breaker(Clock())
    for _ in range(2):
        assert not breaker.fail("reads")
        breaker.succeed("lookups")
    assert breaker.fail("reads")


def test_two_who_fail_now_and_then_do_not_add_up() -> None:
    breaker = Breaker(Clock())
    for source in ("one", "two", "one", "two"):
        assert not breaker.fail(source)
    assert breaker.closed


def test_one_probe_is_due_when_the_wait_is_over() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.probe_due()
    clock.advance(0.999)
    assert not breaker.probe_due()
    clock.advance(0.001)
    assert [breaker.probe_due(), breaker.probe_due(), breaker.closed] == [True, False, False]
    breaker.probed(well=True)
    assert [breaker.closed, breaker.probe_due()] == [True, False]


def test_nothing_is_due_while_it_is_closed() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    clock.advance(1e6)
    assert not breaker.probe_due()


def test_each_failed_probe_doubles_the_wait_up_to_half_a_minute() -> None:
    clock = Clock()
    breaker = opened(clock)
    waits = []
    for _ in range(8):
        start = clock.now
        while not breaker.probe_due():
            clock.advance(0.5)
        waits.append(clock.now - start)
        breaker.probed(well=False)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_failing_again_soon_goes_on_with_the_doubled_wait() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.advance(1)
    assert breaker.probe_due()
    breaker.probed(well=True)
    clock.advance(0.5)
    breaker.fail(at_once=True)
    clock.advance(1)
    assert not breaker.probe_due()
    clock.advance(1)
    assert breaker.probe_due()


def test_staying_well_for_long_forgives_earlier_waits() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(3):
        clock.advance(60)
        assert breaker.probe_due()
        breaker.probed(well=False)
    clock.advance(60)
    assert breaker.probe_due()
    breaker.probed(well=True)
    clock.advance(60)
    breaker.fail(at_once=True)
    clock.advance(1)
    assert breaker.probe_due()


def test_failures_from_before_it_opened_do_not_prolong_the_wait() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.advance(0.9)
    assert not breaker.fail(at_once=True)
    clock.advance(0.1)
    assert breaker.probe_due()
    assert not breaker.fail(at_once=True)
    breaker.probed(well=True)
    assert breaker.closed
    assert [breaker.fail() for _ in range(3)] == [False, False, True]


def test_a_probe_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(AssertionError, match="no probe was due"):
        Breaker(Clock()).probed(well=True)


events = st.one_of(
    st.tuples(st.just("fail"), st.sampled_from("ab")),
    st.tuples(st.just("late"), st.just("a")),
    st.tuples(st.just("succeed"), st.sampled_from("ab")),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 7.0, 40.0])),
    st.tuples(st.just("probe"), st.booleans()),
)


@given(st.lists(events, max_size=60))
def test_whatever_happens_it_lets_calls_through_only_after_a_probe_went_well(
    history: list[tuple[str, str | float | bool]],
) -> None:
    clock = Clock()
    breaker = Breaker(clock)
    in_a_row = {"a": 0, "b": 0}
    closed, opened_at = True, 0.0
    for what, argument in history:
        if what in {"fail", "late"}:
            source = str(argument)
            in_a_row[source] += 1
            opens = closed and (what == "late" or in_a_row[source] == 3)
            assert breaker.fail(source, at_once=what == "late") is opens
            if opens:
                closed, opened_at = False, clock.now
        elif what == "succeed":
            in_a_row[str(argument)] = 0
            breaker.succeed(str(argument))
        elif what == "wait":
            clock.advance(float(argument))
        elif breaker.probe_due():
            assert not closed and clock.now - opened_at >= 1.0
            breaker.probed(well=bool(argument))
            closed, opened_at = bool(argument), clock.now
            if closed:
                in_a_row = {"a": 0, "b": 0}
        else:
            # Never longer than the longest wait without a probe.
            assert closed or clock.now - opened_at < 30.0
        assert breaker.closed is closed

from __future__ import annotations

import pytest

from layerstream.falls import FALLS_PER_S, LONGEST_HOLD_S, Falls
from tests.rigs.tiering_rig import Clock


def test_turns_are_spread_evenly_and_no_turn_is_far_away() -> None:
    clock = Clock()
    falls = Falls(clock)
    turns = [falls.turn() - clock.now for _ in range(300)]
    apart = 1.0 / FALLS_PER_S
    spread = int(LONGEST_HOLD_S * FALLS_PER_S)
    assert turns[:spread] == [pytest.approx(i * apart) for i in range(spread)]
    assert turns[spread:] == [pytest.approx(LONGEST_HOLD_S)] * (300 - spread)


def test_a_burst_does_not_hold_back_those_who_come_after_it() -> None:
    clock = Clock()
    falls = Falls(clock)
    for _ in range(1000):
        falls.turn()
    clock.now += LONGEST_HOLD_S + 1.0 / FALLS_PER_S
    assert falls.turn() == pytest.approx(clock.now)


def test_who_falls_alone_is_not_held_back() -> None:
    clock = Clock()
    falls = Falls(clock)
    for _ in range(5):
        assert falls.turn() == clock.now
        clock.now += 1.0

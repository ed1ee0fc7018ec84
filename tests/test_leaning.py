from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerstream.leaning import MARGIN, Leaning


def test_the_first_decision_takes_what_loses_no_more_than_the_margin() -> None:
    assert Leaning().take(100, -0.99 * MARGIN, 1.0)
    assert not Leaning().take(100, -1.01 * MARGIN, 1.0)


def test_a_decision_stands_until_the_other_is_better_by_the_margin() -> None:
    leaning = Leaning()
    gains = [0.5, -0.05, 0.05, -0.05, -0.2, 0.05, -0.05, 0.05, 0.2, -0.05]
    assert [leaning.take(100, gain, 1.0) for gain in gains] == [True] * 4 + [False] * 4 + [True] * 2


def test_other_sizes_are_decided_for_themselves() -> None:
    leaning = Leaning()
    assert not leaning.take(100, -0.5, 1.0)
    assert leaning.take(1000, 0.05, 1.0) and not leaning.take(100, 0.05, 1.0)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(-1, 1), st.floats(0, 1)), max_size=30))
def test_asked_again_the_answer_is_the_same(cases: list[tuple[int, float, float]]) -> None:
    leaning = Leaning()
    for case in cases:
        assert leaning.take(*case) == leaning.take(*case)

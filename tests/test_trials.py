from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.errors import ConfigError
from layerstream.trials import MIN_SAMPLES, Interval, alternate, median_interval, ratio_interval

finite = st.floats(min_value=1e-3, max_value=1e3)


def interval(low: float, high: float, samples: int = 10) -> Interval:
    return Interval(median=(low + high) / 2, low=low, high=high, samples=samples)


def test_the_side_that_begins_changes_and_results_keep_their_side() -> None:
    order: list[str] = []

    def side(name: str) -> str:
        order.append(name)
        return name

    pairs = list(alternate(lambda: side("a"), lambda: side("b"), 3))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert pairs == [("a", "b")] * 3


def test_a_pair_is_run_only_when_it_is_asked_for() -> None:
    runs: list[int] = []
    trials = alternate(lambda: runs.append(1), lambda: runs.append(2), 5)
    next(trials)
    assert runs == [1, 2]


@given(st.lists(finite, min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_stays_within_the_samples(samples: list[float]) -> None:
    found = median_interval(samples)
    assert found.median == float(np.median(samples))
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)
    assert found.samples == len(samples)


def test_the_same_input_gives_the_same_interval() -> None:
    samples = np.random.default_rng(3).lognormal(size=6).tolist()
    # Six samples put the interval's ends between two of them, where another draw would show.
    assert median_interval(samples) == median_interval(samples)


def test_about_95_of_100_intervals_hold_the_true_median() -> None:
    # Known answer: the median of a log-normal with mu = 0 is 1. 400 repetitions, so one standard error is 1.1 %.
    draw = np.random.default_rng(11)
    held = 0
    for _ in range(400):
        found = median_interval(draw.lognormal(0.0, 0.2, size=15).tolist())
        held += found.low <= 1.0 <= found.high
    assert 0.91 <= held / 400 <= 0.99


def test_slow_spells_of_the_machine_cancel_in_pairs() -> None:
    # Both sides of a pair slow down together, up to tenfold; the first side always takes 2 % longer.
    spells = [1.0, 10.0, 3.0, 1.0, 7.0, 1.5, 2.0, 9.0]
    found = ratio_interval([(1.02 * spell, spell) for spell in spells])
    assert found.low == pytest.approx(1.02) and found.high == pytest.approx(1.02)


def test_a_few_disturbed_pairs_do_not_move_the_ratio() -> None:
    pairs = [(1.0, 1.0)] * 9 + [(50.0, 1.0)]
    assert ratio_interval(pairs) == Interval(median=1.0, low=1.0, high=1.0, samples=10)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.98, 1.03, "met"),
        (0.98, 1.031, "unresolved, n = 10"),
        (1.03, 1.05, "unresolved, n = 10"),
        (1.031, 1.05, "missed"),
    ],
)
def test_a_target_from_above_is_met_by_the_upper_end_and_missed_by_the_lower(
    low: float, high: float, expected: str
) -> None:
    assert interval(low, high).verdict(at_most=1.03) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.95, 0.99, "met"),
        (0.949, 0.99, "unresolved, n = 10"),
        (0.90, 0.95, "unresolved, n = 10"),
        (0.90, 0.949, "missed"),
    ],
)
def test_a_target_from_below_is_met_by_the_lower_end_and_missed_by_the_upper(
    low: float, high: float, expected: str
) -> None:
    assert interval(low, high).verdict(at_least=0.95) == expected


def test_fewer_than_six_samples_decide_nothing() -> None:
    assert interval(0.5, 0.6, samples=MIN_SAMPLES - 1).verdict(at_most=1.0) == "unresolved, n = 5"
    assert interval(0.5, 0.6, samples=MIN_SAMPLES).verdict(at_most=1.0) == "met"
    assert 1 - 2 / 2**MIN_SAMPLES >= 0.95 > 1 - 2 / 2 ** (MIN_SAMPLES - 1)


@pytest.mark.parametrize("targets", [{}, {"at_most": 1.0, "at_least": 1.0}])
def test_a_verdict_needs_exactly_one_target(targets: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="either at_most or at_least"):
        interval(0.9, 1.0).verdict(**targets)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_that_have_no_median_are_refused(samples: list[float]) -> None:
    with pytest.raises(ConfigError, match="finite numbers"):
        median_interval(samples)


@pytest.mark.parametrize("pair", [(0.0, 1.0), (1.0, 0.0), (-1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_times_that_have_no_ratio_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="finite numbers > 0"):
        ratio_interval([(1.0, 1.0), pair])


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="one or more"):
        ratio_interval([])


def test_an_interval_prints_as_median_and_bounds() -> None:
    assert str(interval(0.98, 1.04)) == "1.010 [0.980, 1.040]"

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.estimates import CARRIED, ENOUGH_SAMPLES, MOST_BINS, RECENT, Estimate, Line

FIXED, BYTE = 300e-6, 1 / 40e9
"""Of a link at 40 GB/s."""


def link(nbytes: float) -> float:
    return FIXED + BYTE * nbytes


def learned(samples: int, *, noise: float = 0.05, seed: int = 1) -> Estimate:
    draw = random.Random(seed)
    estimate = Estimate(1)
    for _ in range(samples):
        nbytes = 2 ** draw.uniform(16, 30)
        estimate.learn((nbytes,), link(nbytes) * draw.lognormvariate(0.0, noise))
    return estimate


def line(estimate: Estimate) -> Line:
    found = estimate.line
    assert found is not None
    return found


def test_nothing_is_known_before_the_first_sample_nor_decided_by_before_there_are_enough() -> None:
    estimate = Estimate(1)
    assert (estimate.line, estimate.known, estimate.spread) == (None, False, math.inf)
    for _ in range(ENOUGH_SAMPLES - 1):
        estimate.learn((1 << 20,), 0.001)
    assert line(estimate).seconds(1 << 20) == pytest.approx(0.001, rel=0.01) and not estimate.known
    estimate.learn((1 << 20,), 0.001)
    assert estimate.known


@pytest.mark.parametrize("nbytes", [1 << 17, 1 << 22, 1 << 28])
def test_fixed_cost_and_rate_are_found_from_loads_of_all_sizes(nbytes: int) -> None:
    assert line(learned(300)).seconds(nbytes) == pytest.approx(link(nbytes), rel=0.1)


def test_the_three_parts_of_a_forward_are_told_apart() -> None:
    draw = random.Random(2)
    estimate = Estimate(2)
    for _ in range(300):
        tokens, context = draw.randint(1, 8192), draw.choice([0, draw.randint(0, 30_000)])
        pairs = tokens * context + tokens * (tokens + 1) // 2
        estimate.learn((tokens, pairs), (8e-3 + 4e-5 * tokens + 1e-9 * pairs) * draw.lognormvariate(0.0, 0.05))
    found = line(estimate)
    assert found.fixed_s == pytest.approx(8e-3, rel=0.1)
    assert found.unit_s == pytest.approx((4e-5, 1e-9), rel=0.1)


def test_one_size_alone_counts_for_the_size_and_not_for_what_it_cannot_tell() -> None:
    estimate = Estimate(2)
    for _ in range(50):
        estimate.learn((1024, 1024 * 1025 // 2), 0.1)
    found = line(estimate)
    assert found.unit_s[0] == pytest.approx(0.1 / 1024, rel=0.02)
    assert found.fixed_s + found.unit_s[1] * 1024 * 1025 / 2 < 0.002


def test_an_hour_of_one_size_does_not_lose_the_others() -> None:
    estimate = learned(100)
    for _ in range(5 * RECENT):
        estimate.learn((1 << 20,), link(1 << 20))
    assert line(estimate).seconds(1 << 29) == pytest.approx(link(1 << 29), rel=0.15)


@pytest.mark.parametrize("factor", [0.01, 50.0])
def test_four_strays_in_a_row_move_nothing(factor: float) -> None:
    estimate = learned(100, noise=0.02)
    for _ in range(RECENT // 2):
        estimate.learn((1 << 24,), factor * link(1 << 24))
    assert line(estimate).seconds(1 << 24) == pytest.approx(link(1 << 24), rel=0.15)


def test_one_in_ten_being_a_stray_moves_little_and_the_rest_is_still_trusted() -> None:
    draw = random.Random(5)
    estimate = Estimate(1)
    for _ in range(400):
        nbytes = 2 ** draw.uniform(16, 30)
        estimate.learn((nbytes,), link(nbytes) * (30.0 if draw.random() < 0.1 else 1.0))
    assert line(estimate).seconds(1 << 24) == pytest.approx(link(1 << 24), rel=0.1)
    assert estimate.known


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_device_that_changes_its_speed_is_followed_after_five_samples_at_every_size(factor: float) -> None:
    draw = random.Random(3)
    estimate = learned(200, noise=0.01)
    for _ in range(RECENT // 2 + 1):
        nbytes = 2 ** draw.uniform(16, 30)
        estimate.learn((nbytes,), factor * link(nbytes))
    for nbytes in (1 << 18, 1 << 29):
        assert line(estimate).seconds(nbytes) == pytest.approx(factor * link(nbytes), rel=0.25)


def test_what_has_changed_for_good_is_all_that_remains() -> None:
    draw = random.Random(4)
    estimate = learned(300)
    for _ in range(600):
        nbytes = 2 ** draw.uniform(16, 30)
        estimate.learn((nbytes,), 3e-3 + nbytes / 5e9)
    found = line(estimate)
    assert found.fixed_s == pytest.approx(3e-3, rel=0.1) and found.unit_s[0] == pytest.approx(1 / 5e9, rel=0.1)


def test_sizes_that_do_not_come_any_more_count_less_and_less() -> None:
    draw = random.Random(9)
    estimate = learned(300)
    for _ in range(2000):
        nbytes = 2 ** draw.uniform(18, 24)
        estimate.learn((nbytes,), 0.01 + BYTE * nbytes)
    # What is kept of larger ones says that nothing takes so long.
    assert line(estimate).seconds(1 << 23) == pytest.approx(0.01 + BYTE * (1 << 23), rel=0.15)


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_the_error_is_about_that_of_a_median_of_the_last_samples(noise: float) -> None:
    errors = []
    for seed in range(40):
        estimate = learned(60, noise=noise, seed=seed)
        errors.append(math.log(line(estimate).seconds(1 << 24) / link(1 << 24)) / estimate.error)
    # Of normal errors 68 % are within one standard error, and 95 % within two.
    assert sum(abs(error) <= 1 for error in errors) >= 18
    assert sum(abs(error) <= 2 for error in errors) >= 32


def test_the_last_sample_tells_how_far_it_was_from_what_was_expected() -> None:
    estimate = learned(100, noise=0.001)
    estimate.learn((1 << 24,), link(1 << 24) / 4)
    assert estimate.surprise == pytest.approx(-math.log(4), abs=0.05)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((0.0,), 1.0), ((-1.0,), 1.0), ((1.0,), 0.0), ((1.0,), -1.0), ((math.nan,), 1.0), ((1.0,), math.inf), ((), 1.0)],
)
def test_a_sample_of_no_use_is_left_out(sizes: tuple[float, ...], seconds: float) -> None:
    estimate = Estimate(1)
    estimate.learn(sizes, seconds)
    assert estimate.samples == 0 and estimate.line is None


@given(st.lists(st.tuples(st.floats(1.0, 1e12), st.floats(0.0, 1e12), st.floats(1e-9, 1e4)), min_size=1, max_size=60))
def test_whatever_was_measured_no_part_is_negative(samples: list[tuple[float, float, float]]) -> None:
    estimate = Estimate(2)
    for tokens, pairs, seconds in samples:
        estimate.learn((tokens, pairs), seconds)
    found = line(estimate)
    assert min(found.fixed_s, *found.unit_s) >= 0.0 and math.isfinite(found.seconds(1e6, 1e9))


def test_however_many_sizes_come_only_so_many_are_kept() -> None:
    estimate = Estimate(2)
    for octave in range(40):
        for other in range(40):
            estimate.learn((2.0**octave, 2.0**other), 1.0)
    assert len(estimate.middles()) == MOST_BINS


def test_what_was_kept_is_known_at_once_and_outvoted_by_what_is_seen() -> None:
    before = learned(200)
    after = Estimate(1)
    after.seed(before.middles(), count=before.samples, spread=before.spread)
    assert after.known
    assert line(after).seconds(1 << 24) == pytest.approx(line(before).seconds(1 << 24), rel=0.1)
    for _ in range(CARRIED + 2):
        after.learn((1 << 24,), 10 * link(1 << 24))
    assert line(after).seconds(1 << 24) == pytest.approx(10 * link(1 << 24), rel=0.25)

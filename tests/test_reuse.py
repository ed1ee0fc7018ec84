from __future__ import annotations

from layerstream.reuse import ReuseAges


def prompt(name: str, blocks: int) -> list[str]:
    return [f"{name} {block}" for block in range(blocks)]


def test_an_age_is_told_in_slots_filled_since_the_last_use() -> None:
    ages = ReuseAges(windows=16)
    ages.see(prompt("a", 8), 100)
    ages.filled += 50
    ages.see(prompt("a", 8), 100)
    assert ages.within(32) == 0
    assert ages.within(100) == 8


def test_every_block_of_a_prompt_weighs_the_same_however_few_are_followed() -> None:
    for blocks in (1, 2, 3, 4, 7, 8, 9, 100):
        ages = ReuseAges(windows=16)
        ages.see(prompt("a", blocks), 1000)
        ages.see(prompt("a", blocks), 1000)
        assert ages.within(1) == blocks
        assert len(ages._last) == blocks.bit_length()


def test_a_shared_head_counts_for_itself_alone() -> None:
    ages = ReuseAges(windows=16)
    ages.see([*prompt("system", 4), *prompt("a", 60)], 1000)
    ages.see([*prompt("system", 4), *prompt("b", 60)], 1000)
    assert 4 <= ages.within(1) < 8


def test_a_use_ends_the_age_before_it() -> None:
    ages = ReuseAges(windows=16)
    for _ in range(3):
        ages.see(prompt("a", 1), 1000)
        ages.filled += 10
    assert ages.within(12) == 2


def test_what_is_longer_away_than_the_windows_is_forgotten() -> None:
    ages = ReuseAges(windows=2)
    ages.see(prompt("a", 1), 100)
    ages.filled += 201
    ages.see(prompt("b", 1), 100)
    assert list(ages._last) == ["b 0"]
    ages.see(prompt("a", 1), 100)
    assert ages.within(1 << 30) == 0


def test_no_more_blocks_are_followed_than_windows_times_slots() -> None:
    ages = ReuseAges(windows=2)
    for number in range(1000):
        ages.see(prompt(f"short {number}", 1), 100)
    assert len(ages._last) == 200


def test_old_reuses_fade() -> None:
    ages = ReuseAges(windows=2)
    ages.see(prompt("a", 8), 100)
    ages.see(prompt("a", 8), 100)
    before = ages.within(10)
    ages.fade()
    assert 0.89 * before < ages.within(10) < 0.91 * before


def test_an_age_beyond_all_buckets_is_the_oldest() -> None:
    ages = ReuseAges(windows=1 << 80)
    ages.see(prompt("a", 1), 100)
    ages.filled += 1 << 70
    ages.see(prompt("a", 1), 100)
    assert ages.within(1 << 60) == 0
    assert sum(ages._weights) == 1


def test_what_is_asked_for_again_is_followed_as_long_as_what_is_new() -> None:
    ages = ReuseAges(windows=2)
    ages.see(prompt("a", 1), 100)
    ages.see(prompt("b", 1), 100)
    ages.filled += 150
    ages.see(prompt("a", 1), 100)
    ages.filled += 60
    ages.see(prompt("c", 1), 100)
    assert list(ages._last) == ["a 0", "c 0"]

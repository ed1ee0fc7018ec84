from __future__ import annotations

import pytest

from layerstream.estimates import ENOUGH_SAMPLES
from layerstream.rates import Rates
from layerstream.worth import OFFERS_SEEN, USES_SEEN, Piece, Worth
from tests.rigs.known_rates import known_rates

BLOCK_BYTES = 2 << 20
"""16 tokens of a model with 128 KiB a token."""


def tiers(rates: Rates, **seconds_a_byte: float) -> Rates:
    for name, unit in seconds_a_byte.items():
        for shift in range(20, 20 + ENOUGH_SAMPLES):
            rates.promoted(name, 1 << shift, unit * (1 << shift))
    return rates


def worth(rates: Rates) -> Worth:
    return Worth(rates, block_tokens=16, block_bytes=BLOCK_BYTES)


def pieces(tier: str, *, count: int = 16, blocks: int = 32, start: int = 0) -> list[Piece]:
    return [Piece(tier, blocks, start + (number + 1) * blocks) for number in range(count)]


def prefill(seconds: float) -> Rates:
    """8192 tokens are computed in so many seconds."""
    return known_rates(step_fixed_s=0.0, token_s=seconds / 8192, pair_s=0.0)


@pytest.mark.parametrize(("saved", "brought"), [(0.005, 0), (0.200, 16)])
def test_a_gibibyte_at_400_gbit_is_brought_for_200_ms_of_computing_and_not_for_5(saved: float, brought: int) -> None:
    its = worth(tiers(prefill(saved), store=1 / 50e9))
    assert its.leading(0, pieces("store"), {}) == brought


@pytest.mark.parametrize("known", ["nothing", "forwards", "tier"])
def test_what_is_not_known_is_brought(known: str) -> None:
    rates = prefill(1e-6) if known == "forwards" else Rates()
    if known == "tier":
        tiers(rates, store=1.0)
    assert worth(rates).leading(0, pieces("store"), {}) == 16
    assert worth(rates).leading(0, [], {}) == 0


def test_the_end_of_a_prefix_may_be_on_a_tier_that_is_not_worth_it() -> None:
    its = worth(tiers(prefill(0.2), disk=1 / 50e9, far=1 / 1e9))
    parts = [*pieces("disk", count=10), *pieces("far", count=6, start=320)]
    assert its.leading(0, parts, {}) == 10


def test_tiers_bring_their_parts_side_by_side() -> None:
    # Each alone takes 172 ms, one after the other 344: more than the 300 that they save.
    its = worth(tiers(prefill(0.3), one=1 / 6.25e9, two=1 / 6.25e9))
    parts = [*pieces("one", count=16), *pieces("two", count=16, start=512)]
    assert its.leading(0, parts[:16], {}) == 16
    assert its.leading(0, parts, {}) == 32


def test_what_is_on_its_way_already_is_waited_for() -> None:
    rates = tiers(prefill(0.2), store=1 / 50e9)
    assert worth(rates).leading(0, pieces("store"), {"store": 512}) == 16
    rates.promoted("store", 1 << 30, 0.0215)
    assert worth(rates).leading(0, pieces("store"), {"store": 16 * 512}) == 0


def test_blocks_that_the_engine_has_save_nothing() -> None:
    its = worth(tiers(prefill(0.2), store=1 / 10e9))
    assert its.leading(0, pieces("store"), {}) == 16
    rates = tiers(prefill(0.2), store=1 / 10e9)
    rates.promoted("store", 1 << 30, 0.1074)
    assert worth(rates).leading(480, pieces("store"), {}) == 0
    assert worth(rates).leading(512, pieces("store"), {}) == 16


def test_a_tier_that_lost_is_tried_so_seldom_that_trials_cost_a_twentieth_of_computing() -> None:
    # What takes 200 ms to compute comes in 500 ms: that loses 1.5 times as much as it saves, so it is one of 30.
    rates = tiers(prefill(0.2), store=0.5 / (1 << 30))
    its = worth(rates)
    tries = [its.leading(0, pieces("store"), {}) for _ in range(40)]
    assert tries == [0] * 29 + [16] * 11
    assert its.leading(0, pieces("store"), {"store": 1}) == 0
    rates.promoted("store", 1 << 30, 0.5)
    assert its.leading(0, pieces("store"), {}) == 0


def admits(its: Worth, *, stop: int = 512, waiting: float = 0.0, seen: bool = False, objects: int = 1) -> bool:
    return its.admits("store", stop=stop, blocks=stop, objects=objects, waiting=waiting, seen=seen)


def writes(rates: Rates, seconds_a_byte: float) -> Rates:
    for shift in range(20, 20 + ENOUGH_SAMPLES):
        rates.demoted("store", 1 << shift, seconds_a_byte * (1 << shift))
    return rates


def test_what_takes_longer_to_bring_back_than_to_compute_is_never_written() -> None:
    assert not admits(worth(tiers(prefill(0.2), store=1 / 1e9)), seen=True)
    assert admits(worth(tiers(prefill(0.2), store=1 / 50e9)), seen=True)


def test_a_prefix_that_nobody_wanted_yet_must_pay_its_write_by_how_often_such_ones_are_used() -> None:
    # It saves 200 - 21.5 ms, and one in four is used: 44.6 ms.
    assert admits(worth(writes(tiers(prefill(0.2), store=1 / 50e9), 0.040 / (1 << 30))))
    rates = writes(tiers(prefill(0.2), store=1 / 50e9), 0.050 / (1 << 30))
    assert not admits(worth(rates)) and admits(worth(rates), seen=True)


def test_a_full_queue_takes_only_the_best() -> None:
    its = worth(writes(tiers(prefill(0.2), store=1 / 50e9), 0.030 / (1 << 30)))
    assert admits(its, waiting=0.2) and not admits(its, waiting=0.5)


def test_how_often_prefixes_are_used_is_learned() -> None:
    rates = writes(tiers(prefill(0.2), store=1 / 50e9), 0.040 / (1 << 30))
    its = worth(rates)
    assert USES_SEEN / OFFERS_SEEN == 0.25 and admits(its)
    for _ in range(100):
        admits(its)
    assert not admits(its)
    its.used(100)
    assert admits(its)


def test_what_is_not_known_is_written() -> None:
    assert admits(worth(Rates()))
    assert admits(worth(tiers(prefill(0.2), store=1 / 50e9)))

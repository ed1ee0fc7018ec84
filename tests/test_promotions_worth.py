"""Prefixes that tiers have: what is brought, what is computed instead, and what is learned of tiers meanwhile."""

from __future__ import annotations

import pytest

from layerstream.estimates import ENOUGH_SAMPLES
from layerstream.rates import TRIAL_EVERY, Rates
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.known_rates import known_rates
from tests.rigs.tiering_rig import TieringRig, chain

K = 4
PROMPT = chain(range(8 * K))
MIB = 1 << 20
"""Of a block."""


def rates_of(*, token_s: float, **tiers: float) -> Rates:
    """A token takes so long to compute, a block of each tier so long to bring."""
    rates = known_rates(step_fixed_s=0.0, token_s=token_s, pair_s=0.0)
    for name, block_s in tiers.items():
        for _ in range(2):
            for count in range(1, ENOUGH_SAMPLES):
                rates.promoted(name, count * MIB, count * block_s)
    return rates


def rig_of(rates: Rates, *tiers: FakeTier, bring_all: bool = False) -> TieringRig:
    rig = TieringRig(*(tiers or (FakeTier(),)), slots=64, rates=rates, bring_all=bring_all)
    for tier in rig.tiers:
        for one in rig.objects(PROMPT):
            tier.put(one, PROMPT)
    return rig


@pytest.mark.parametrize(("token_s", "brought"), [(0.001, 8 * K), (1e-5, 0)])
def test_a_prefix_is_brought_if_that_is_sooner_than_to_compute_it(token_s: float, brought: int) -> None:
    # A block of 16 tokens comes in 2 ms.
    rig = rig_of(rates_of(token_s=token_s, tier0=0.002))
    assert rig.serve("a", PROMPT) == brought
    counts = rig.coordinator.tiering.take_counts() if rig.coordinator.tiering is not None else None
    assert counts is not None and counts.promoted_blocks == brought and counts.passed_blocks == 8 * K - brought
    rig.check_idle()


def test_a_request_does_not_wait_for_what_is_not_brought() -> None:
    rig = rig_of(rates_of(token_s=1e-5, tier0=0.002))
    assert rig.ask("a", PROMPT) == 0
    rig.plan()
    assert rig.tier_jobs == []


def test_what_the_pool_has_of_it_is_a_hit_all_the_same() -> None:
    rig = rig_of(rates_of(token_s=1e-5, tier0=0.002))
    assert rig.serve("head", PROMPT[: 3 * K]) == 0
    assert rig.serve("a", PROMPT) == 3 * K
    rig.check_idle()


def test_only_the_part_is_brought_that_a_near_tier_has() -> None:
    near, far = FakeTier(0), FakeTier(1)
    rig = rig_of(rates_of(token_s=0.001, tier0=0.002, tier1=0.2), near, far)
    near.lose(*rig.objects(PROMPT)[5:])
    assert rig.serve("a", PROMPT) == 5 * K
    assert rig.coordinator.tiering is not None
    assert rig.coordinator.tiering.take_counts().passed_blocks == 3 * K
    rig.check_idle()


@pytest.mark.parametrize("rates", [Rates(), known_rates(token_s=1e-9)], ids=["nothing", "only computing"])
def test_from_a_tier_of_which_nothing_is_known_all_is_brought(rates: Rates) -> None:
    assert rig_of(rates).serve("a", PROMPT) == 8 * K


def test_all_is_brought_if_so_asked_for() -> None:
    assert rig_of(rates_of(token_s=1e-5, tier0=0.002), bring_all=True).serve("a", PROMPT) == 8 * K


def test_a_tier_that_lost_is_tried_again() -> None:
    rates = rates_of(token_s=1e-5, tier0=0.002)
    rig = rig_of(rates)
    for _ in range(12 * TRIAL_EVERY):
        rates.passed("promote/tier0")
    assert rig.serve("a", PROMPT) == 8 * K
    assert rig.serve("b", chain("b") + PROMPT) == 0
    rig.check_idle()


def test_the_time_of_a_tier_is_learned_from_its_jobs_with_what_was_before_them_on_the_way() -> None:
    rates = Rates()
    rig = rig_of(rates)
    assert rig.ask("a", PROMPT) is None
    rig.turn(0.125)
    assert rig.ask("a", PROMPT) == 8 * K
    estimate = rates.estimate("promote/tier0")
    assert estimate is not None and estimate.middles() == [((8.0 * K * MIB,), 0.125)]


def test_of_a_job_that_did_not_bring_all_nothing_is_learned() -> None:
    rates = Rates()
    tier = FakeTier()
    rig = rig_of(rates, tier)
    assert rig.ask("a", PROMPT) is None
    tier.lose(*rig.objects(PROMPT)[3:])
    rig.turn(0.125)
    assert rates.estimate("promote/tier0") is None


def test_the_time_of_writes_is_learned_too() -> None:
    rates = Rates()
    rig = TieringRig(FakeTier(), slots=64, rates=rates)
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    rig.turn()
    rig.plan()
    rig.plan()
    rig.turn(0.25)
    estimate = rates.estimate("demote/tier0")
    assert estimate is not None and estimate.middles() == [((8.0 * K * MIB,), 0.25)]

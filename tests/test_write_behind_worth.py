"""Tiers that are written by value: a prefix is written as soon as, and only if, it is worth it."""

from __future__ import annotations

import pytest

from layerstream.estimates import ENOUGH_SAMPLES
from layerstream.rates import Rates
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.known_rates import known_rates
from tests.rigs.tiering_rig import TieringRig, chain

K = 4
MIB = 1 << 20
"""Of a block."""


def rates_of(*, pair_s: float = 0.0, token_s: float = 0.001, promote_s: float, demote_s: float) -> Rates:
    """Seconds of computing a token and a pair, and of moving a block from and to the tier."""
    rates = known_rates(step_fixed_s=0.0, token_s=token_s, pair_s=pair_s)
    for count in range(1, ENOUGH_SAMPLES + 1):
        rates.promoted("tier0", count * MIB, count * promote_s)
        rates.demoted("tier0", count * MIB, count * demote_s)
    return rates


def rig_of(rates: Rates) -> TieringRig:
    return TieringRig(FakeTier(admission="value"), slots=64, rates=rates)


def written(rig: TieringRig) -> int:
    return len(rig.tiers[0].ranks[0])


# A block of 16 tokens takes 16 ms to compute.


@pytest.mark.parametrize(("demote_s", "objects"), [(0.001, 3), (0.1, 0)])
def test_what_was_not_used_yet_is_written_if_that_is_cheap(demote_s: float, objects: int) -> None:
    rig = rig_of(rates_of(promote_s=0.001, demote_s=demote_s))
    rig.serve("a", chain(range(3 * K)))
    assert written(rig) == objects
    rig.check_idle()


def test_what_is_used_again_is_written_whatever_that_takes() -> None:
    rig = rig_of(rates_of(promote_s=0.001, demote_s=0.1))
    rig.serve("a", chain(range(3 * K)))
    assert written(rig) == 0
    assert rig.serve("b", chain(range(3 * K))) == 3 * K
    assert written(rig) == 3
    rig.check_idle()


def test_what_is_computed_sooner_than_brought_back_is_never_written() -> None:
    rig = rig_of(rates_of(promote_s=0.1, demote_s=0.0001))
    for name in "abc":
        rig.serve(name, chain(range(3 * K)))
    assert written(rig) == 0
    rig.check_idle()


def test_a_prefix_that_has_grown_to_be_worth_it_is_written_from_its_beginning() -> None:
    # Only pairs count: 12 blocks save 192 * 193 / 2 pairs, too few, and 32 save seven times as many.
    rates = rates_of(token_s=0.0, pair_s=1e-6, promote_s=0.002, demote_s=0.0001)
    rig = rig_of(rates)
    short, long = chain(range(3 * K)), chain(range(8 * K))
    rig.serve("a", short)
    assert written(rig) == 0
    assert rig.serve("b", long) == 3 * K
    assert written(rig) == 8
    rig.check_idle()


def test_without_rates_all_is_written() -> None:
    rig = TieringRig(FakeTier(admission="value"), slots=64)
    rig.serve("a", chain(range(3 * K)))
    assert written(rig) == 3
    assert TieringRig(FakeTier(admission="value"), slots=64, rates=Rates()).serve("a", chain(range(K))) == 0


def test_tiers_that_take_all_ask_no_rates() -> None:
    rig = TieringRig(FakeTier(), slots=64, rates=rates_of(promote_s=0.1, demote_s=0.1))
    rig.serve("a", chain(range(3 * K)))
    assert written(rig) == 3

from __future__ import annotations

import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.chooser import RateChooser
from layerstream.decisions import REASONS, Decision, LoadCase, LoadMode
from layerstream.measured import Measured
from layerstream.rates import LOAD, TRIAL_EVERY, Rates
from tests.rigs.known_rates import known_rates

GIB = 1 << 30
BLOCK_BYTES = 2 << 20
"""16 tokens of a model with 128 KiB a token."""


LINKS = [known_rates(load_unit_s=slow / 50e9) for slow in (1.0, 100.0, 1e4)]


def case(blocks: int, rest: int = 1, **other: object) -> LoadCase:
    whole = LoadCase(
        num_tokens=16 * blocks + rest,
        local_tokens=0,
        found_tokens=16 * blocks,
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        layers=32,
        queued_bytes=0,
        running=0,
        step_s=None,
    )
    return dataclasses.replace(whole, **other)  # type: ignore[arg-type]


def chosen(rates: Rates, what: LoadCase, *, step_tokens: int = 8192, recompute: bool = True) -> Decision:
    rates.step_tokens = step_tokens
    return RateChooser(rates, recompute=recompute).choose(what)


def test_a_release_reckons_with_the_steps_until_it_takes_effect() -> None:
    rates = known_rates(load_fixed_s=0.0, step_fixed_s=0.0, token_s=1e-4, pair_s=0.0)
    rates.step_tokens = 8192
    busy = case(512, rest=20, running=4, step_s=2e-3)
    layers = []
    for lag_steps in (1, 2):
        decision = RateChooser(rates, lag_steps=lag_steps).choose(busy)
        assert decision.mode is LoadMode.PARKED and decision.release_after_layer is not None
        layers.append(decision.release_after_layer)
    # A layer of 32 MiB takes 0.67 ms at 50 GB/s, so a step of 2 ms is about three of them.
    assert layers[0] - layers[1] == 3


def rates_of_prefill(seconds: float) -> Rates:
    """Loads at 400 Gbit/s, and 8192 tokens computed in so many seconds."""
    return known_rates(load_fixed_s=0.0, step_fixed_s=0.0, token_s=seconds / 8192, pair_s=0.0)


def test_a_gibibyte_over_400_gbit_takes_21_5_ms_which_is_worth_200_ms_of_computing_and_not_5() -> None:
    # 512 blocks of 2 MiB are 1 GiB; 50e9 bytes in a second.
    gib = case(512)
    assert gib.found_tokens // 16 * gib.block_bytes == GIB
    # Steps of one block compute too little to hide anything.
    worth = chosen(rates_of_prefill(0.200), gib, step_tokens=16)
    assert (worth.tokens, worth.reason) == (8192, "load")
    assert worth.load_s == pytest.approx(0.0215, rel=0.01)
    assert worth.recompute_s == pytest.approx(0.200, rel=0.01)
    not_worth = chosen(rates_of_prefill(0.005), gib, step_tokens=16)
    assert (not_worth.tokens, not_worth.reason) == (0, "recompute")
    assert not_worth.load_s == pytest.approx(0.0215, rel=0.01)
    assert not_worth.recompute_s == pytest.approx(0.005, rel=0.01)


def test_where_all_is_not_worth_it_the_part_may_be_that_hides_behind_computing_the_rest() -> None:
    decision = chosen(rates_of_prefill(0.005), case(512))
    assert decision.reason == "load_part" and decision.tokens == 1536
    # A fixed cost that is more than it saves ends that.
    rates = known_rates(load_fixed_s=0.002, step_fixed_s=0.0, token_s=0.005 / 8192, pair_s=0.0)
    assert chosen(rates, case(512)).reason == "recompute"


def test_a_part_that_is_hardly_better_than_all_is_not_computed() -> None:
    # Computing a tenth of it would bring the first token 1 % sooner, and take the device from others for that.
    assert chosen(rates_of_prefill(0.200), case(512)).reason == "load"


def test_a_long_hit_on_a_gpu_is_loaded_whole() -> None:
    # 32k tokens of an 8B model: 4 GiB at 50 GB/s against more than a second of prefill.
    decision = chosen(known_rates(), case(2048, 512))
    assert (decision.tokens, decision.reason, decision.mode) == (32_768, "load", LoadMode.LAYERWISE)
    assert decision.recompute_s is not None and decision.recompute_s > 1.0
    assert decision.stall_s is not None and decision.load_s is not None and decision.stall_s < decision.load_s


def test_beside_others_a_load_slower_than_compute_is_parked_and_released_early() -> None:
    decision = chosen(known_rates(), case(2048, 512, running=4, step_s=0.01))
    assert decision.mode is LoadMode.PARKED and decision.tokens == 32_768
    assert decision.release_after_layer is not None and decision.release_after_layer < 31


def test_a_slow_link_loads_the_part_that_computing_the_rest_hides() -> None:
    decision = chosen(known_rates(load_unit_s=1 / 1e9), case(512, 4096))
    assert decision.reason == "load_part" and 0 < decision.tokens < 8192 and decision.tokens % 16 == 0
    assert decision.stall_s is not None and decision.recompute_s is not None
    assert decision.stall_s < decision.recompute_s


@pytest.mark.parametrize("known", ["nothing", "loads", "forwards"])
def test_what_is_not_known_is_loaded(known: str) -> None:
    everything = known_rates(load_unit_s=1e-6)
    rates = Rates()
    state = everything.state()
    rates.restore({name: kept for name, kept in state.items() if known == "loads" and name == LOAD})
    if known == "forwards":
        rates.restore({"prefill": state["prefill"]})
    decision = chosen(rates, case(512))
    assert (decision.tokens, decision.reason, decision.mode) == (8192, "unknown_rates", LoadMode.LAYERWISE)
    assert (decision.load_s, decision.recompute_s, decision.stall_s) == (None, None, None)


def test_forwards_much_smaller_than_a_hit_say_nothing_of_computing_it() -> None:
    # Up to 64 tokens a forward takes its fixed time, so that computing more seems to be free.
    rates = known_rates(load_unit_s=1e-9)
    rates.restore({"prefill": {"count": 20, "spread": 0.01, "samples": [[[2.0**n, 2.0**n], 0.008] for n in range(7)]}})
    assert chosen(rates, case(16)).reason == "recompute"
    assert chosen(rates, case(512)).reason == "unknown_rates"
    assert chosen(rates, case(512), step_tokens=256).reason == "recompute"


def test_a_queue_makes_a_hit_not_worth_it_that_was() -> None:
    hit = case(64)
    assert chosen(known_rates(), hit).reason == "load"
    assert chosen(known_rates(), dataclasses.replace(hit, queued_bytes=16 * GIB)).reason == "recompute"


@pytest.mark.parametrize(("spread", "reason"), [(0.01, "recompute"), (1.5, "load")])
def test_computing_must_be_sooner_even_if_the_estimate_errs(spread: float, reason: str) -> None:
    # A gibibyte seems to take 21.5 ms to load, and 12 ms to compute.
    rates = rates_of_prefill(0.012)
    rates.restore(
        {"load": {"count": 20, "spread": spread, "samples": [[[2.0**n], 2.0**n / 50e9] for n in range(20, 31)]}}
    )
    decision = chosen(rates, case(512), step_tokens=16)
    assert decision.reason == reason
    # The numbers that are told are those that are likely.
    assert decision.load_s == pytest.approx(0.0215, rel=0.01)


def test_never_to_recompute_loads_all_of_it_and_still_picks_the_mode() -> None:
    hit = case(512, 512, running=4, step_s=0.01)
    decision = chosen(known_rates(load_unit_s=1 / 1e8), hit, recompute=False)
    assert (decision.tokens, decision.reason, decision.mode) == (8192, "load", LoadMode.PARKED)


def test_near_break_even_samples_do_not_turn_decisions_back_and_forth() -> None:
    # 1 GiB loads in 21.5 ms. What computing takes wavers by 4 % around that.
    def reasons(*prefills: float) -> list[str]:
        rates = Rates(step_tokens=16)
        chooser = RateChooser(rates)
        said = []
        for seconds in prefills:
            rates.restore(rates_of_prefill(seconds).state())
            said.append(chooser.choose(case(512)).reason)
        return said

    near = (0.0206, 0.0224) * 3
    assert reasons(*near) == ["load"] * 6
    assert reasons(0.015, *near) == ["recompute"] * 7
    assert reasons(0.015, *near, 0.03, *near) == ["recompute"] * 7 + ["load"] * 7


def slow_link(passed: int) -> tuple[Rates, RateChooser]:
    """Loading 8192 tokens takes 1.2 s and computing them 0.44 s."""
    rates = known_rates(load_fixed_s=1.0, load_unit_s=0.2 / GIB)
    rates.learn(Measured(loads=[("staged", 1 << 24, 1.003)]))
    for _ in range(passed):
        rates.passed(LOAD)
    rates.step_tokens = 8192
    return rates, RateChooser(rates)


def test_a_link_that_lost_is_tried_so_seldom_that_trials_cost_a_twentieth_of_computing() -> None:
    # A trial loses 0.76 s where 0.44 s would be computed: 1.7 times as much, so it is one of 34.
    _, chooser = slow_link(TRIAL_EVERY)
    assert chooser.choose(case(512)).reason == "recompute"
    rates, chooser = slow_link(2 * TRIAL_EVERY)
    trial = chooser.choose(case(512))
    assert (trial.reason, trial.tokens) == ("trial", 8192)
    assert chooser.choose(case(512, queued_bytes=1)).reason == "recompute"
    rates.learn(Measured(loads=[("staged", GIB, 1.2)]))
    assert chooser.choose(case(512)).reason == "recompute"


def test_a_link_that_became_fast_is_found_again_by_trials() -> None:
    rates, chooser = slow_link(2 * TRIAL_EVERY)
    trials = 0
    while (decision := chooser.choose(case(512))).reason == "trial":
        trials += 1
        rates.learn(Measured(loads=[("staged", GIB, 100e-6 + GIB / 50e9)]))
    assert decision.reason == "load" and trials == 5


@given(st.integers(1, 2000), st.integers(1, 9000), st.sampled_from([0, GIB]), st.integers(0, 3))
def test_asked_again_it_says_the_same_and_never_more_than_was_found(
    blocks: int, rest: int, queued: int, running: int
) -> None:
    what = case(blocks, rest, queued_bytes=queued, running=running, step_s=0.02)
    for rates in LINKS:
        rates.step_tokens = 2048
        chooser = RateChooser(rates)
        decision = chooser.choose(what)
        assert decision == chooser.choose(what)
        assert 0 <= decision.tokens <= what.found_tokens and decision.tokens % 16 == 0
        assert decision.reason in REASONS
        assert (decision.tokens == 0) == (decision.reason == "recompute")


def test_a_decision_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="layerstream.chooser"):
        decision = chosen(known_rates(), case(512))
    (record,) = caplog.records
    assert repr(decision) in record.getMessage() and "found_tokens=8192" in record.getMessage()

from __future__ import annotations

import dataclasses
import json

import pytest

from layerstream.decisions import FixedMode, LoadCase, LoadMode
from layerstream.estimates import ENOUGH_SAMPLES
from layerstream.measured import Measured, attended
from layerstream.rates import ENOUGH_STEPS, LOAD, PREFILL, SAVE, TRIAL_EVERY, Rates, tokens_s
from tests.rigs.known_rates import known_rates


def forwards(count: int) -> Measured:
    return Measured(steps=[(100, 5050, 0.1)] * count)


def test_samples_of_ranks_become_rates_over_all_paths_and_of_each() -> None:
    rates = Rates()
    rates.learn(
        Measured(
            loads=[("staged", 1 << 20, 1.0)] * ENOUGH_SAMPLES + [("zero_copy", 1 << 30, 2.0)] * ENOUGH_SAMPLES,
            saves=[("staged", 1 << 20, 3.0)] * ENOUGH_SAMPLES,
        )
    )
    assert sorted(rates.names()) == ["load", "load/staged", "load/zero_copy", "save", "save/staged"]
    for name, nbytes, seconds in (
        ("load/staged", 1 << 20, 1.0), ("load/zero_copy", 1 << 30, 2.0), (SAVE, 1 << 20, 3.0),
    ):  # fmt: skip
        line = rates.line(name)
        assert line is not None and line.seconds(nbytes) == pytest.approx(seconds, rel=0.01)


def test_a_rate_is_none_until_it_is_known_well_enough() -> None:
    rates = Rates()
    rates.learn(forwards(ENOUGH_SAMPLES - 1))
    assert rates.line(PREFILL) is None and rates.recompute_s(10, 0) is None
    assert rates.line("promote/disk") is None and rates.estimate("promote/disk") is None
    rates.learn(forwards(1))
    assert rates.line(PREFILL) is not None


def test_tokens_are_dearer_behind_a_context_and_pass_every_stage() -> None:
    one, four = known_rates(), known_rates(stages=4)
    near, far = one.recompute_s(512, 0), one.recompute_s(512, 30_000)
    assert near is not None and far is not None and far > near
    assert four.recompute_s(512, 30_000) == pytest.approx(4 * far)
    line = one.line(PREFILL)
    assert line is not None
    assert tokens_s(line, 512, 100) == pytest.approx(line.unit_s[0] * 512 + line.unit_s[1] * attended(512, 100))


def test_a_decode_step_is_the_median_of_the_last_ones() -> None:
    def after(*seconds: float) -> float | None:
        rates = Rates()
        for each in seconds:
            rates.decoded(each)
        return rates.step_s

    few = [0.02] * (ENOUGH_STEPS - 1)
    assert after(*few) is None
    assert after(*few, 5.0) == 0.02
    assert after(*few, 5.0, *[0.03] * 40) == 0.03


def test_what_forwards_of_few_tokens_say_of_many_is_not_known() -> None:
    rates = known_rates()
    assert rates.recompute_s(4 * 8192, 0) is not None and rates.recompute_s(4 * 8192 + 1, 0) is None
    rates.step_tokens = 2048
    assert rates.recompute_s(1_000_000, 0) is not None


def test_one_in_so_many_transfers_that_are_not_worth_it_is_a_trial() -> None:
    rates = known_rates()
    for _ in range(TRIAL_EVERY - 1):
        assert not rates.stale(LOAD, 0.2)
        rates.passed(LOAD)
    assert rates.stale(LOAD, 1.0) and not rates.stale(LOAD, 1.1) and not rates.stale("promote/disk", 0.2)
    for _ in range(2 * TRIAL_EVERY):
        rates.passed(LOAD)
    assert rates.stale(LOAD, 2.9) and not rates.stale(LOAD, 3.1)
    rates.learn(Measured(loads=[("staged", 1 << 20, 1.2e-4)]))
    assert not rates.stale(LOAD, 0.2)


def test_hits_that_are_computed_are_loads_not_worth_it() -> None:
    rates = known_rates()
    nothing = FixedMode(LoadMode.LAYERWISE).choose(
        LoadCase(
            num_tokens=1, local_tokens=0, found_tokens=0, block_tokens=1, block_bytes=1, layers=1, queued_bytes=0,
            running=0, step_s=None,
        )
    )  # fmt: skip
    for _ in range(TRIAL_EVERY):
        rates.decided(nothing)
    assert not rates.stale(LOAD, 0.2)
    for _ in range(TRIAL_EVERY):
        rates.decided(dataclasses.replace(nothing, reason="recompute"))
    assert rates.stale(LOAD, 0.2)


def test_a_sample_much_faster_than_expected_is_followed_by_another_trial() -> None:
    rates = known_rates(load_fixed_s=1.0)
    rates.learn(Measured(loads=[("staged", 1 << 20, 0.01)]))
    assert rates.stale(LOAD, 0.2)


def test_a_calibration_is_known_at_once_and_an_earlier_run_goes_before_it() -> None:
    rates = Rates()
    rates.calibrated([(1 << 20, 0.001), (1 << 30, 1.0)])
    line = rates.line(LOAD)
    assert line is not None and line.seconds(1 << 30) == pytest.approx(1.0, rel=0.05)
    rates.restore(known_rates(load_unit_s=1e-12).state())
    line = rates.line(LOAD)
    assert line is not None and line.unit_s[0] == pytest.approx(1e-12, rel=0.1)
    unknown = Rates()
    unknown.calibrated([])
    assert unknown.line(LOAD) is None


def test_what_is_kept_comes_back_through_json() -> None:
    rates = known_rates()
    for _ in range(ENOUGH_SAMPLES):
        rates.promoted("disk", 1 << 24, 0.05)
        rates.demoted("disk", 1 << 24, 0.5)
    rates.promoted("mooncake", 1 << 24, 1.0)
    again = Rates()
    again.restore(json.loads(json.dumps(rates.state())))
    assert set(again.names()) == set(rates.names()) - {"promote/mooncake"}
    for name in ("promote/disk", "demote/disk", LOAD):
        before, after = rates.line(name), again.line(name)
        assert before is not None and after is not None
        assert after.seconds(1 << 24) == pytest.approx(before.seconds(1 << 24), rel=0.05)


@pytest.mark.parametrize(
    "state",
    [
        {"load": None},
        {"load": {"count": 20, "spread": 0.1, "samples": []}},
        {"load": {"count": 20, "spread": 0.1, "samples": [[[1.0, 2.0], 1.0]]}},
        {"load": {"count": 20, "spread": 0.1, "samples": [[[0.0], 1.0]]}},
        {"load": {"count": 20, "spread": 0.1, "samples": [[[1.0], -1.0]]}},
        {"load": {"count": 20, "spread": 0.1, "samples": [[[1.0], float("nan")]]}},
        {"load": {"count": 20, "spread": float("nan"), "samples": [[[1.0], 1.0]]}},
        {"load": {"count": float("inf"), "spread": 0.1, "samples": [[[1.0], 1.0]]}},
        {"load": {"count": "x", "spread": 0.1, "samples": [[[1.0], 1.0]]}},
        {"prefill": {"count": 20, "spread": 0.1, "samples": [[[1.0], 1.0]]}},
        {"load": {"spread": 0.1, "samples": [[[1.0], 1.0]]}},
        [],
    ],
)
def test_a_state_that_cannot_be_changes_nothing(state: object) -> None:
    rates = Rates()
    with pytest.raises(ValueError, match="no state of rates"):
        rates.restore(state)  # type: ignore[arg-type]
    assert rates.names() == []

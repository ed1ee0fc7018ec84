from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layerstream.decisions import LoadCase
from layerstream.estimates import Line
from layerstream.measured import attended
from layerstream.split import Costs, best_split


def exponents(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10.0**power)


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    block = draw(st.sampled_from([1, 16, 64]))
    found = draw(st.integers(1, 60)) * block
    local = draw(st.integers(0, 40)) * block
    case = LoadCase(
        num_tokens=local + found + draw(st.integers(1, 60 * block)),
        local_tokens=local,
        found_tokens=found,
        block_tokens=block,
        block_bytes=draw(st.integers(1, 1 << 22)),
        layers=draw(st.integers(1, 80)),
        queued_bytes=draw(st.sampled_from([0, 1 << 20, 1 << 30])),
        running=draw(st.sampled_from([0, 3])),
        step_s=draw(st.sampled_from([None, 0.001, 0.02])),
    )
    return Costs(
        case=case,
        load=Line(fixed_s=draw(exponents(-7, -1)), unit_s=(draw(exponents(-11, -6)),)),
        forward=Line(
            fixed_s=draw(exponents(-5, -1)), unit_s=(draw(exponents(-7, -2)), draw(st.just(0.0) | exponents(-10, -5)))
        ),
        step_tokens=draw(st.sampled_from([16, 512, 8192])),
        stages=draw(st.sampled_from([1, 4])),
    )


def beside_others(*, num_tokens: int, found: int, layers: int, step_s: float | None, **costs: Any) -> Costs:
    """Blocks of 16 tokens and 1 MiB."""
    case = LoadCase(
        num_tokens=num_tokens,
        local_tokens=0,
        found_tokens=found,
        block_tokens=16,
        block_bytes=1 << 20,
        layers=layers,
        queued_bytes=0,
        running=0 if step_s is None else 3,
        step_s=step_s,
    )
    return Costs(case=case, **costs)


PARKS_TOO_LATE = beside_others(
    num_tokens=1527,
    found=864,
    layers=32,
    step_s=0.02,
    load=Line(fixed_s=66.3e-6, unit_s=(1.088e-9,)),
    forward=Line(fixed_s=7.5e-3, unit_s=(16.8e-6, 0.0)),
    step_tokens=512,
    stages=4,
)
"""The best is the last that is not parked."""
ENDS_WITH_A_FULL_STEP = beside_others(
    num_tokens=593,
    found=560,
    layers=32,
    step_s=None,
    load=Line(fixed_s=755e-6, unit_s=(2.996e-9,)),
    forward=Line(fixed_s=816e-6, unit_s=(78e-6, 699e-9)),
    step_tokens=64,
)
"""The best is the last that leaves a full step to compute."""


@given(any_costs())
@example(PARKS_TOO_LATE)
@example(ENDS_WITH_A_FULL_STEP)
def test_no_other_split_gains_more(costs: Costs) -> None:
    best = best_split(costs)
    most = max(costs.gain_s(blocks) for blocks in range(1, costs.blocks + 1))
    assert 1 <= best <= costs.blocks
    assert costs.gain_s(best) >= most - 1e-9 * abs(most) - 1e-12


def costs(*, load_s: float, found: int = 100, rest: int = 1000, **case: int) -> Costs:
    """Blocks of 10 tokens; a token takes 1 ms of a forward, a block `load_s` to load; 10 layers."""
    whole = LoadCase(
        **{  # type: ignore[arg-type]
            "num_tokens": 10 * found + rest,
            "local_tokens": 0,
            "found_tokens": 10 * found,
            "block_tokens": 10,
            "block_bytes": 1000,
            "layers": 10,
            "queued_bytes": 0,
            "running": 0,
            "step_s": None,
            **case,
        }
    )
    return Costs(
        case=whole,
        load=Line(fixed_s=0.0, unit_s=(load_s / 1000,)),
        forward=Line(fixed_s=0.0, unit_s=(1e-3, 0.0)),
        step_tokens=100_000,
    )


def test_a_load_that_hides_behind_the_rest_is_whole() -> None:
    assert best_split(costs(load_s=0.005)) == 100


def test_a_load_slower_than_computing_is_cut_where_it_hides_behind_the_rest() -> None:
    # A block loads in 20 ms and computes in 10 ms. Of R = 200 blocks m are loaded while 200 - m are computed: 20 m = 10
    # (200 - m), so m = 66.7, and the 67th costs more than it saves.
    assert best_split(costs(load_s=0.020)) == 66


def test_what_one_step_cannot_compute_hides_nothing() -> None:
    whole = costs(load_s=0.020)
    one_step = Costs(case=whole.case, load=whole.load, forward=whole.forward, step_tokens=200)
    # 20 blocks of 10 ms are computed beside m blocks of 20 ms.
    assert best_split(one_step) == 10


@pytest.mark.parametrize(("queued", "waits"), [(0, 0.0), (50_000, 1.0)])
def test_loads_before_it_are_waited_for(queued: int, waits: float) -> None:
    its = costs(load_s=0.020, queued_bytes=queued)
    assert its.waits_s == pytest.approx(waits)
    assert its.stall_s(50) == pytest.approx(waits + 50 * 0.020 / 10)
    assert its.load_s(50) == pytest.approx(waits + 1.0)


def test_the_stall_is_the_first_layer_or_what_compute_leaves_of_all() -> None:
    its = costs(load_s=0.020)
    assert its.stall_s(30) == pytest.approx(30 * 0.002)
    assert its.stall_s(100) == pytest.approx(2.0 - 9 * 0.1)


def test_a_request_that_is_parked_beside_others_waits_for_their_step() -> None:
    alone, beside = costs(load_s=0.020, running=0), costs(load_s=0.020, running=2)
    beside = Costs(
        case=LoadCase(**{name: getattr(beside.case, name) for name in beside.case.__slots__} | {"step_s": 0.05}),
        load=beside.load,
        forward=beside.forward,
        step_tokens=beside.step_tokens,
    )
    # The step of the others is also something to hide behind.
    assert beside.stall_s(100) == pytest.approx(alone.stall_s(100) - 0.9 * 0.05)
    assert beside.gain_s(100) == pytest.approx(alone.gain_s(100) + 0.9 * 0.05 - 0.05)
    assert beside.gain_s(10) == pytest.approx(alone.gain_s(10))


def test_computing_a_prefix_counts_every_pair() -> None:
    its = costs(load_s=0.020, local_tokens=500, num_tokens=3000)
    its = Costs(case=its.case, load=its.load, forward=Line(fixed_s=1.0, unit_s=(0.0, 1e-6)), step_tokens=200, stages=2)
    assert its.recompute_s(7) == pytest.approx(2e-6 * attended(70, 500))
    assert its.first_step_s(7) == pytest.approx(1.0 + 1e-6 * attended(200, 570))
